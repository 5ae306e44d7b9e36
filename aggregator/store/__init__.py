"""The durable store of an aggregator, and its event tape."""
