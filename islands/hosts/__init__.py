"""Several hosts that train one island: what they agree on, and which part of each tensor is whose. Pure."""
