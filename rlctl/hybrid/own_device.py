"""Where a rank computes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def own_device() -> torch.device:
    """Return this rank's GPU where the default process group is NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
