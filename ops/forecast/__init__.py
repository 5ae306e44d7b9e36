"""What a fleet needs and how it fares, before it is rented. Pure."""
