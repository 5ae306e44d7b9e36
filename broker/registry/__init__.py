"""What stands in Redis about a run: how it is written, and how it is read back."""
