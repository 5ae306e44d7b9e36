"""Turns pseudo-gradients into a version: merge kernels, the outer step, payload inspection."""
