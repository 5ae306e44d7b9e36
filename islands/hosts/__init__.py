"""Several hosts that train one island: their agreements, and what carries these out."""
