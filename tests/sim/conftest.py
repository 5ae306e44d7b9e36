"""Simulated runs leave many objects and few cycles behind: they are looked for less often."""

import gc

gc.set_threshold(100_000, 20, 100)
