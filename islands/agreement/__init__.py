"""The agreement of an island's hosts: what all of them do at the same step. Pure."""
