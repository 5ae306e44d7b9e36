"""Findings of ``atoll doctor`` on a machine, a Redis and a broker. Pure."""
