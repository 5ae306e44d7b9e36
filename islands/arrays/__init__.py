"""Any parameter tree as fragments: names, host copies, device placement, reference values. Pure."""
