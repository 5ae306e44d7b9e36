"""Devices of simulated processes beside sockets: disks that crash and a Redis that fails."""
