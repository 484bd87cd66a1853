"""Responses that were made before, by another run or another system, as the source of a run's rollouts."""
