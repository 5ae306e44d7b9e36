"""Sinks of a fleet: follows a run by its tapes or its Redis, and writes its figures to TensorBoard, W&B or MLflow."""
