"""The fate of every token, per island and fragment, and who trains which data. Pure."""
