"""Rollout correction: what to do when tokens were sampled by another policy than the one that is trained."""
