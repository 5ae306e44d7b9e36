"""What a fleet needs and how it fares, before it is rented: ``atoll plan`` and ``atoll simulate``."""
