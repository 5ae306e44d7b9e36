"""The kit of every daemon: logs, clocks, signals."""
