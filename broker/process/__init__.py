"""The process kit of every daemon: settings, flags, TOML, logs, clocks, signals, and state machines as tables."""
