"""Where a run's figures go besides its own files: TensorBoard, Weights & Biases, trackio, and other people's."""
