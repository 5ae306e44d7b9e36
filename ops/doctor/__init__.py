"""``atoll doctor``: looks at machine, Redis, keys and broker."""
