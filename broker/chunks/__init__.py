"""Both ends of a bulk connection: large messages in chunks, sent as far as credit allows. Pure."""
