"""Evaluation: judges global models beside training, keeps the curve, and changes no file of a run."""
