"""The state of a run that the parts of the core share: fragments, rounds, members, records. Pure."""
