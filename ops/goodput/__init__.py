"""Goodput and uptime of fleets of up to millions of chips: ``atoll simulate``."""
