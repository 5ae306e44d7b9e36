"""The proxy that makes one machine's loopback behave like the links of :mod:`ops.links`."""
