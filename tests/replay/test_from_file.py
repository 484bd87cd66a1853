"""Replaying a run whose tokens were not generated, but came from another run's records."""

import pytest

from rlctl.replay.findings import Steps
from rlctl.replay.whole import replay_run
from tests.trainers.recorded import record

pytestmark = pytest.mark.timeout(120)

SMALL = ("trainer.prompts_per_step=2", "trainer.mini_batch_prompts=1", "rollout.max_new_tokens=8")


def test_tokens_from_a_file_are_not_generated_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    record(first, *SMALL, steps=2)
    record(second, *SMALL, f"rollout.engine=recorded:{first}", steps=2)
    found = {(one.step, one.level): one for one in replay_run(second, steps=Steps(), levels=["all"])}
    for step in (1, 2):
        for level in ("R0", "R1", "R2", "R4"):
            assert found[step, level].status == "exact", found[step, level]
        assert found[step, "R3"].status == "unavailable"
        assert found[step, "R3"].reason == (f"its tokens came from {first}: nothing generated them; try --level R2")
