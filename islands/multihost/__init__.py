"""The driver of an island of several hosts: what they say to each other, and what each does. Shell."""
