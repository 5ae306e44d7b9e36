"""Errors, settings, and tables of state machines: what every room uses."""
