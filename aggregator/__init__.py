"""Merges pseudo-gradients into versions: rounds, weights, the outer step, the ledger and the store."""
