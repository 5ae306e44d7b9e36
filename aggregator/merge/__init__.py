"""From pseudo-gradients to a version: merge kernels, the outer step, inspection of payloads."""
