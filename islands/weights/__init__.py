"""Reads the tensors of trained models by name, in the formats of other tools."""
