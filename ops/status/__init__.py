"""How a run stands: who is in it, how far each island is, which versions there are, and who leads; by Redis alone."""
