"""``atoll plan``: what a fleet needs and does, in closed form."""
