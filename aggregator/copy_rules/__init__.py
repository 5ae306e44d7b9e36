"""Rules of copies in an object store: contents of a set, times of copies, deletion. Pure."""
