"""Models links: conditions, wiring, regions, and arrival times of bytes. Pure."""
