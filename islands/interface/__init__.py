"""Checked arguments, settings and the installation: shared by all rooms of islands."""
