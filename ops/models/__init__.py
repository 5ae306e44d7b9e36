"""The global model of a run: read from its stores, written for other tools, and its snapshots."""
