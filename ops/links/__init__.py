"""Links: a proxy between clients and the broker that makes one machine's loopback behave as a wide-area network."""
