"""Goodput and uptime of fleets up to millions of chips: ``atoll simulate``. All but command, view and published is pure."""
