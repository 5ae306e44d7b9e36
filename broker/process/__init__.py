"""The process kit of every daemon: settings, flags, TOML, logs, clocks and signals."""
