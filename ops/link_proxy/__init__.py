"""A proxy that makes loopback behave like the links of :mod:`ops.links`."""
