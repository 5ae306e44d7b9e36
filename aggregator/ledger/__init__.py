"""The ledger: the fate of every token, and the owner of every block of the data. Pure."""
