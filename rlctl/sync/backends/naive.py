"""Weights for engines on the trainer's own devices.

Where all of a trainer rank's rollout workers are in its process, tensors go from hand to hand: no copy where both sides
share the memory, else one. To workers in processes of their own it is ``ipc``.
"""

from __future__ import annotations

from rlctl.sync.backends.ipc import IpcEngine


class NaiveEngine(IpcEngine):
    """See the module."""

    name = "naive"
    in_process = True
