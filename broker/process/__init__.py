"""The kit of every daemon: settings, flags, TOML, logs, clocks, signals, state machines as tables."""
