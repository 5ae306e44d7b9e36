"""Large messages in chunks, and the credit that lets a sender send them: both ends of a bulk connection. Pure."""
