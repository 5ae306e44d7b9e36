"""The laboratory: learning experiments in virtual time, their records and the report. Not pure."""
