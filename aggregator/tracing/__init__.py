"""Traces of rounds: spans from the core's events and decisions, sent to an OpenTelemetry collector."""
