"""Programs: the command line, whole runs on one machine, status, export, virtual time."""
