"""The ledger: the fate of every token, and the owner of every data share. Pure."""
