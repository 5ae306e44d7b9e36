"""Processes of this machine as a supervised group: started, watched, restarted and ended."""
