"""Groups are whole or nothing, rows never invent a log-prob, the buffer keeps order and survives a restart."""

import json
import random

import pytest

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.rows import MisalignedError, check_aligned, rows_of
from rlctl.experience.segments import RequestKey, Segment


def response(ordinal: int, sample: int, tokens: int = 3, reward: float | None = 1.0, version: int = 0) -> Response:
    segment = Segment(list(range(tokens)), [-0.5 - 0.1 * t for t in range(tokens)], version)
    return Response(RequestKey(ordinal, sample), [segment], "stop", reward)


def group(ordinal: int, size: int = 2) -> PromptGroup:
    return PromptGroup(ordinal, row=ordinal, label="k=2", prompt_ids=[1, 2], size=size, dispatched=0)


def test_a_group_finishes_with_its_last_response_and_takes_no_stranger():
    one = group(4)
    one.add(response(4, 1))
    assert one.status == "running"
    with pytest.raises(ValueError, match="does not belong"):
        one.add(response(4, 1))
    with pytest.raises(ValueError, match="does not belong"):
        one.add(response(5, 0))
    with pytest.raises(ValueError, match="does not belong"):
        one.add(response(4, 2))
    one.add(response(4, 0))
    assert one.status == "finished"
    assert [r.key.sample for r in one.ordered] == [0, 1]


def test_an_interrupted_response_does_not_finish_a_group():
    cut = response(0, 0)
    cut.finish_reason = "abort"
    with pytest.raises(ValueError, match="interrupted"):
        group(0).add(cut)


def test_selection_is_by_ordinal_whatever_the_order_of_arrival():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    buffer = GroupBuffer()
    for ordinal in range(8):
        buffer.submit(group(ordinal))
    arrivals = [(o, s) for o in range(8) for s in range(2) if o != 3]
    rng.shuffle(arrivals)
    for ordinal, sample in arrivals:
        buffer.complete(response(ordinal, sample))
    assert [g.ordinal for g in buffer.select(4)] == [0, 1, 2, 4]
    assert [g.ordinal for g in buffer.unfinished()] == [3]
    with pytest.raises(LookupError, match="3 finished"):
        buffer.select(4)
    with pytest.raises(ValueError, match="twice"):
        buffer.submit(group(3))


def test_buffer_state_goes_through_json_and_comes_back_equal():
    buffer = GroupBuffer()
    for ordinal in (2, 5):
        buffer.submit(group(ordinal))
    buffer.complete(response(5, 1, tokens=4, reward=0.25, version=7))
    other = GroupBuffer()
    other.load(json.loads(json.dumps(buffer.state())))
    assert other.state() == buffer.state()
    loaded = other.unfinished()[1]
    assert loaded.responses[1].logprobs == response(5, 1, tokens=4).logprobs
    assert loaded.responses[1].key == RequestKey(5, 1)
    other.complete(response(5, 0))
    assert [g.ordinal for g in other.finished()] == [5]
    assert loaded.oldest_version == 0 and buffer.unfinished()[1].oldest_version == 7


def test_rows_are_sorted_by_key_and_carry_the_version_of_each_token():
    groups = [group(9), group(1)]
    for one in groups:
        one.add(response(one.ordinal, 1))
        two = response(one.ordinal, 0, tokens=2, version=3)
        two.segments.append(Segment([7], [-1.0], 4))
        one.add(two)
    rows = rows_of(groups)
    assert [tuple(r.key) for r in rows] == [(1, 0, 0), (1, 1, 0), (9, 0, 0), (9, 1, 0)]
    assert rows[0].versions.tolist() == [3, 3, 4]
    assert rows[0].response_ids == [0, 1, 7] and rows[0].length == 5


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([1, 2, 3, 4, 5], [-1.0] * 4, "5 token ids but 4 log-probs"),
        ([1, 2, 3, 4, 5], [-1.0, -1.0, None, -1.0, -1.0], "token 2 of 5"),
        ([1, 2], [-1.0, float("nan")], "token 1 of 2"),
        ([1, 2], None, "2 token ids but 0"),
        (None, None, "no token ids"),
        ([], [], "no token ids"),
    ],
)
def test_misaligned_log_probs_are_refused_with_index_and_lengths(ids, logprobs, message):
    with pytest.raises(MisalignedError, match=message):
        check_aligned(ids, logprobs, "prompt 0, sample 1")


def test_a_segment_must_be_aligned_and_a_row_must_have_its_reward():
    with pytest.raises(ValueError, match="2 token ids but 1"):
        Segment([1, 2], [-0.1])
    one = group(0, size=1)
    one.add(response(0, 0, reward=None))
    with pytest.raises(MisalignedError, match="no reward"):
        rows_of([one])
