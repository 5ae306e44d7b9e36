"""The relay: who is heard, what goes where, what is kept and what is refused. Pure."""
