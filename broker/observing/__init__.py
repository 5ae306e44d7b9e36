"""Observers: status of a run through its broker, where Redis cannot be reached."""
