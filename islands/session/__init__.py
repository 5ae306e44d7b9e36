"""The communication thread of an island, its connections, its workers and its files."""
