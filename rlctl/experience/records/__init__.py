"""The record of a trained step: a manifest beside its rows, content-addressed, and the reading of both."""
