"""Several hosts that train one island: what carries out their agreement. Shells."""
