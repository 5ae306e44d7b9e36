"""``atoll doctor``: looks at machine, Redis, keys and broker; ``finding`` and ``*_findings`` are pure."""
