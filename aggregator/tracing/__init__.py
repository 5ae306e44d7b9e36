"""Traces of rounds: spans from the events and decisions of the core, and their export to an OpenTelemetry collector."""
