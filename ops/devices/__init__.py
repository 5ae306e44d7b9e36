"""What simulated processes have beside sockets: disks that crash and a Redis that fails."""
