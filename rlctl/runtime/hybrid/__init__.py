"""A run on one set of devices that both train and generate; see ``group``."""
