"""Clients of a broker: the bytes that their connections bring in, and their messages in chunks. Pure."""
