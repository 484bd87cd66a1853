"""Level R4: what a run decided is decided again from its event log, and compared."""
