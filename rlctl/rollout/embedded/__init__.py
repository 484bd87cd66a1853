"""The rollout engine that lives in the trainer's process: continuous batching over a plain torch forward."""
