"""What a replay found, in words."""

from rlctl.replay.findings import Difference, Finding
from rlctl.report.replay_findings import finding_text


def test_a_file_is_named_once():
    where = Difference("record", "/runs/a/events.jsonl")
    reason = "events.jsonl: line 3: cut; lines 9 to 11 are others; config.json: it is another"
    found = Finding(step=0, level="R0", status="differs", reason=reason, first_difference=where)
    assert finding_text(found) == (
        "the run differs at R0: stage record, /runs/a/events.jsonl: "
        "line 3: cut; lines 9 to 11 are others; config.json: it is another"
    )
    gap = Difference("update_actor", "lr", 0.25)
    found = Finding(step=2, level="R2", status="differs", reason="as it was", first_difference=gap)
    assert finding_text(found) == "step 2 differs at R2: stage update_actor, lr, by at most 0.25: as it was"
