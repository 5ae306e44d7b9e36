"""Standby aggregators and replication to them, as state machines. Pure."""
