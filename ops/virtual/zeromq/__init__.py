"""Simulated ZeroMQ: sockets as the broker and its clients use them, over a network in virtual time."""
