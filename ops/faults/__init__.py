"""Faults of a run: their kinds and plans, and the invariants that hold in spite of them. Pure."""
