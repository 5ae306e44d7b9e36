"""Commands that inspect a run: status, explain, replay, export, evaluate."""
