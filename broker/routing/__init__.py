"""The relay: routing, presence, queues and refusals of a broker. Pure."""
