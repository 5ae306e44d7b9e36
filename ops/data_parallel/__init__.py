"""The synchronous baseline: ``up --profile data-parallel``."""
