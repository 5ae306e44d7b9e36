"""The island's state machine and its parts. Pure."""
