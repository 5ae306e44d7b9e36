"""Plans that are settled before anything starts: devices of islands, cells of an experiment. Pure."""
