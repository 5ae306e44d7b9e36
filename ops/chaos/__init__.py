"""Chaos: faults done on purpose to a local run while it trains, a report, a check of the invariants."""
