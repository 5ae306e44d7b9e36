"""``atoll doctor``: looks at a machine, Redis, keys and the way to a broker; ``finding``, ``*_findings`` are pure."""
