"""Evaluation: judges global models beside training, and keeps the curve; reads a run's files and changes none."""
