"""A page to look at a run: its history from tape and Redis, a server, and a report that is one file."""
