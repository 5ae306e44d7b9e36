"""The broker's gateway: who may connect, what comes in, and what has its turn to go out."""
