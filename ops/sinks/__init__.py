"""Sinks of a fleet: follows a run by tapes or Redis; writes figures to TensorBoard, W&B or MLflow."""
