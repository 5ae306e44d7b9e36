"""Errors and settings: what every room uses."""
