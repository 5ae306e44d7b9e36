"""The broker's door: who may connect, what comes in, and what each connection is counted for."""
