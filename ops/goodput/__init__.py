"""``atoll simulate``: goodput and uptime of fleets up to millions of chips."""
