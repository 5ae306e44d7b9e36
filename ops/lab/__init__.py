"""The laboratory: learning experiments in virtual time, with records and a report. Not pure."""
