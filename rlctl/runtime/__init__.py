"""Where a run lives: its folder, its checkpoints, its signals, its processes."""
