"""What every process of a run shares: messages, codec, fragments, the relay and the registry."""
