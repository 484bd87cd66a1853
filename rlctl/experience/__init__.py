"""What a run lives through: requests, segments, prompt groups, the buffer, the event log."""
