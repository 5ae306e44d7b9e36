"""The parts of the core: membership, admission, rounds, commits and publication. Pure."""
