"""The broker's gateway: who may connect, what comes in, and counters for each connection."""
