"""A small forward pass after a switch, whose result nobody looks at."""

from __future__ import annotations

import numpy as np

from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.hybrid.sampler import RankSampler
from rlctl.model.fsdp2.engine import Fsdp2Engine
from rlctl.rollout.base import Request, SamplingParams

# No prompt of a run has this number.
_NOBODY = RequestKey(-1, 0)


def warm_training(engine: Fsdp2Engine) -> None:
    """Score two tokens; all ranks do."""
    row = Row(_NOBODY, -1, [0], [0], 0.0, np.zeros(1, np.float32), np.zeros(1, np.int64))
    engine.log_probs([row], temperature=1.0)


def warm_rollout(engine: RankSampler) -> None:
    """Generate two tokens; all ranks of the replica do."""
    engine.generate([Request(_NOBODY, (0,), SamplingParams(2, temperature=0.0), seed=0)])
