"""Agreement among the hosts of an island: all do the same at the same step. Pure."""
