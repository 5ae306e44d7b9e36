"""Hostile bytes, for the decoder of the wire and for a running broker."""
