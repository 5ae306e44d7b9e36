"""The island's state machine and its parts: what to hand over, what to adopt, what to say. Pure."""
