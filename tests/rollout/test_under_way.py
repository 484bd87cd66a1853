"""What a replica is not sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.errors import UsageError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.under_way import UnderWay

GOOD = Request(RequestKey(0, 0), (1, 2, 31), SamplingParams(4), seed=1)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, key=RequestKey(1, 0), prompt_ids=(1, 32)),
        replace(GOOD, key=RequestKey(1, 0), prompt_ids=(-1, 3)),
        replace(GOOD, key=RequestKey(1, 0), prefix=(Segment([3, 99], [-1.0, -1.0], 0, "a"),)),
    ],
)
def test_tokens_that_the_model_has_not_never_reach_a_replica(bad: Request) -> None:
    under_way = UnderWay()
    with pytest.raises(UsageError, match=r"outside 0 \.\. 31"):
        under_way.add([GOOD, bad], max_length=64, vocab_size=32)
    assert under_way.requests() == []
    under_way.add([GOOD, bad], max_length=64)  # of a model that is not known here
    assert len(under_way) == 2
