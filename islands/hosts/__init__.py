"""Several hosts that train one island: their agreements, and each one's part of each tensor. Pure."""
