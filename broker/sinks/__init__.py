"""Sinks: write a run's figures to TensorBoard, Weights & Biases or MLflow by their libraries. Shell."""
