"""Copies of a store and its tape in an object store, behind the local disk, and the way back."""
