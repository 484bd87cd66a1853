"""Changing the layout of weights in place: only what a rank lacks travels."""
