"""Links: a proxy that makes one machine's loopback behave like a wide-area network."""
