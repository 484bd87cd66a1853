"""A run whose trainer ranks and rollout replicas are processes of their own; see ``group``."""
