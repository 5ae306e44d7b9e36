"""The parts of the core: who is in, what is admitted, merged, committed and published. Pure."""
