"""What every process of ours needs: settings, flags, TOML, logs, clocks and signals."""
