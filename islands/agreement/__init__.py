"""How the hosts of an island agree to do the same at the same step. Pure."""
