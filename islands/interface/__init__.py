"""What the rooms of islands share: checked arguments, settings, and what is installed."""
