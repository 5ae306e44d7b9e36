"""Inputs and outputs of the core: settings, events and actions. Pure."""
