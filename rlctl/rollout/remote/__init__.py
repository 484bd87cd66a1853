"""Replicas in processes of their own; see ``replica`` for the driver's side and ``process`` for the other."""
