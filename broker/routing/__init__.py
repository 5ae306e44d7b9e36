"""The relay: routing, senders, queues and refusals of a broker. Pure."""
