"""The needs of a fleet and its pace, in closed form: ``atoll plan``. All but its command, view and sizing is pure."""
