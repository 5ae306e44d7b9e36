"""Rules of copies in an object store: what is in a set, when one is made, what is deleted. Pure."""
