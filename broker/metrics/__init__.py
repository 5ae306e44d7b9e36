"""Metrics for Prometheus: families as plain values, made on demand, and the server for them."""
