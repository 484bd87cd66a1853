"""Moving fresh weights from the trainer to the rollout engines, checked."""
