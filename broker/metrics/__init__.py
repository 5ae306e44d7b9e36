"""Metrics for Prometheus: families as plain values, made when somebody asks, and the server that hands them out."""
