"""Decisions before anything starts: devices of islands, cells of an experiment. Pure."""
