"""The broker, and what all processes of a run share: messages, codec, settings, registry."""
