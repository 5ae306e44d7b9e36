"""Atoll beside others of its field, each installed by pip in an environment of its own."""
