"""Connections to a broker: sockets, keys, and what is done when one is lost."""
