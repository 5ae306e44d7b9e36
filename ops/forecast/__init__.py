"""Forecasts a fleet's needs, pace and goodput before it is rented. Pure."""
