"""Observers: status of a run through its broker, for who cannot reach Redis."""
