"""Checkpoint engines, one file each."""
