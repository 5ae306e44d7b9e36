"""Trained models as other tools write them, read by name."""
