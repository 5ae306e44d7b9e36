"""The story of a run as values, from its tapes, records and evaluations. Pure."""
