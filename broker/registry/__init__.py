"""The registry: the state of a run in Redis, written and read."""
