"""Troubles made on purpose: what a run must survive, done to it."""
