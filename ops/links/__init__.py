"""Links of a run: their conditions, wiring and regions, and when bytes may arrive. Pure."""
