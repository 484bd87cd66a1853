"""Advantages, losses and their parts: pure functions on tensors."""
