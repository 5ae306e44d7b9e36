"""Supervised processes of this machine: started, watched, restarted and ended."""
