"""A whole run on this machine: ``up``, its plan, its display and its report."""
