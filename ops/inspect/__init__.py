"""Questions to a run: status, explain, replay, export, evaluate."""
