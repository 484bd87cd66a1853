"""Making models by transformers in a process that has threads."""

from __future__ import annotations

import threading

ONE_AT_A_TIME = threading.RLock()
"""Held while transformers makes a model. It exchanges functions of torch and of all models for the time being (those
that initialise weights, the one that ties the head to the embedding) and puts back what it found. Two threads at once
would leave them exchanged for good, and every later model of the process with weights that are anything."""
