"""One file a trainer mode: its hooks and nothing else."""
