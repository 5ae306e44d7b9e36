"""Chaos: faults done on purpose to a local run while it trains, a report, and a check of the invariants."""
