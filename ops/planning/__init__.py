"""The needs of a fleet and its pace, in closed form: ``atoll plan``."""
