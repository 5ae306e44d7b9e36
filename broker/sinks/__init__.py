"""Sinks: writes figures of a run to TensorBoard, Weights & Biases or MLflow, by their own libraries. Shell."""
