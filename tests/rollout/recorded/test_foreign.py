"""Responses out of somebody's file: a good one trains, and each way of being malformed is named and refused."""

import json
import math
import os
import secrets
from pathlib import Path

import numpy as np
import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.experience.events import Noted
from rlctl.experience.records.reading import read_bundle, read_run
from rlctl.rollout.recorded.alignment import align, misaligned
from rlctl.rollout.recorded.foreign import read_jsonl
from rlctl.rollout.recorded.trajectories import Limits
from tests.trainers.recorded import record

pytestmark = pytest.mark.timeout(240)

LIMITS = Limits(vocab_size=100_000, samples=4, max_prompt_tokens=128, max_new_tokens=16)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record(folder, "run.seed=3", steps=2)
    return folder


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict]:
    """The first step's responses as another system would write them."""
    (one,) = read_bundle(run, 1).rounds
    return [
        {
            "id": f"r{index}",
            "group": row.group,
            "prompt_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "logprobs": row.rollout_logprobs.tolist(),
            "reward": row.reward,
            "version": 0,
            "finish_reason": "length" if cut else "stop",
        }
        for index, (row, cut) in enumerate(zip(one.rows, one.cut, strict=True))
    ]


def written(folder: Path, lines: list[dict], end: str = "\n") -> Path:
    path = folder / "responses.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)
    return path


def longest(lines: list[dict]) -> int:
    return max(range(len(lines)), key=lambda index: len(lines[index]["response_ids"]))


def test_another_run_trained_on_the_same_responses_ends_with_the_same_bits(run, tmp_path):
    first = read_bundle(run, 2).manifest.params_sha256
    again = record(tmp_path / "again", "run.seed=3", f"rollout.engine=recorded:{run}", steps=2)
    assert again["params_digest"] == first
    assert (read_run(tmp_path / "again").steps, again["steps"]) == ([1, 2], 2)
    # The data ends with the record, whatever run.steps says.
    assert record(tmp_path / "longer", "run.seed=3", f"rollout.engine=recorded:{run}", steps=9)["steps"] == 2


def test_a_good_file_trains_as_the_run_did(run, lines, tmp_path):
    path = written(tmp_path, lines)
    record(tmp_path / "run", "run.seed=3", f"rollout.engine=recorded:{path}", "run.validate_prompts=4", steps=1)
    bundle = read_bundle(tmp_path / "run", 1)
    notes = [event.message for event in read_run(tmp_path / "run").events.events if isinstance(event, Noted)]
    assert any("4 groups of recorded responses" in note and "nats a token" in note for note in notes)
    told = read_bundle(run, 1)
    for a, b in zip(told.rounds[0].rows, bundle.rounds[0].rows, strict=True):
        assert (a.response_ids, a.reward, a.advantages.tolist()) == (b.response_ids, b.reward, b.advantages.tolist())
    # A run of one step has another schedule of learning rates than the run had, so the weights are others.
    assert bundle.rounds[0].metrics["loss"] == told.rounds[0].metrics["loss"]


def broken(line: dict, **changes: object) -> dict:
    return {name: value for name, value in {**line, **changes}.items() if value is not ...}


MALFORMED = {
    "short log-probs": (lambda line: broken(line, logprobs=line["logprobs"][:-1]), "token ids but .* log-probs"),
    "a None": (lambda line: broken(line, logprobs=[None, *line["logprobs"][1:]]), "no finite log-prob at token 0"),
    "text only": (lambda line: broken(line, response_ids=..., response="4"), "no response_ids.*\n?.*text alone"),
    "no log-probs": (lambda line: broken(line, logprobs=...), "token ids but 0 log-probs"),
    "wrong vocabulary": (
        lambda line: broken(line, response_ids=[999_999, *line["response_ids"][1:]]),
        "999999, and the",
    ),
    "duplicate id": (lambda line: broken(line, id="r0"), "id r0 was given in line 1 already"),
    "mixed versions": (
        lambda line: broken(line, versions=[0] * (len(line["response_ids"]) - 1) + [1]),
        "mixed versions, 0 to 1",
    ),
    "NaN reward": (lambda line: broken(line, reward=math.nan), "the reward is nan"),
    "no reward": (lambda line: broken(line, reward=...), "the reward is absent"),
    "empty response": (lambda line: broken(line, response_ids=[], logprobs=[]), "response is empty"),
    "probabilities": (lambda line: broken(line, logprobs=[0.5] * len(line["logprobs"])), "is 0.5, above 0"),
    "another prompt": (lambda line: broken(line, prompt_ids=[1]), "its group has another prompt"),
    "interrupted": (lambda line: broken(line, finish_reason="abort"), "finish_reason is 'abort'"),
    "segments": (lambda line: broken(line, segments=[{"begin": 1, "end": 2, "version": 0}]), "does not follow"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_response_is_refused_by_its_line(fault, lines, tmp_path):
    act, message = MALFORMED[fault]
    at = longest(lines)
    path = written(tmp_path, [act(line) if index == at else line for index, line in enumerate(lines)])
    with pytest.raises(FindingsError, match=message) as caught:
        read_jsonl(path, LIMITS)
    assert [finding.where for finding in caught.value.findings] == [f"{path}:{at + 1}"]


def test_every_malformed_line_is_told_at_once(lines, tmp_path):
    changed = [dict(line) for line in lines]
    faults = [fault for fault in MALFORMED if fault not in ("mixed versions", "another prompt")]  # of some lengths only
    for index, fault in enumerate(faults, 1):
        changed[index] = MALFORMED[fault][0](changed[index])
    with pytest.raises(FindingsError) as caught:
        read_jsonl(written(tmp_path, changed), LIMITS)
    told = {int(finding.where.rpartition(":")[2]) for finding in caught.value.findings}
    assert told == set(range(2, len(faults) + 2))


def test_a_cut_line_a_repeated_field_and_a_short_group_are_told(lines, tmp_path):
    path = written(tmp_path, lines, end="")
    read_jsonl(path, LIMITS)  # a last line without its end is whole
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FindingsError, match=f":{len(lines)}: the line is cut"):
        read_jsonl(path, LIMITS)
    with pytest.raises(FindingsError, match="the reward is 1000"):
        read_jsonl(written(tmp_path, [broken(line, reward=10**400) for line in lines]), LIMITS)
    path.write_text('{"reward": 1, "reward": 2}\n')
    with pytest.raises(FindingsError, match="reward is given twice"):
        read_jsonl(path, LIMITS)
    with pytest.raises(FindingsError, match="the group has 3 responses, and a prompt of this run has 4"):
        read_jsonl(written(tmp_path, lines[:-1]), LIMITS)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(FindingsError, match="not JSON"):
        read_jsonl(path, LIMITS)
    path.write_text("")
    with pytest.raises(UsageError, match="holds no responses"):
        read_jsonl(path, LIMITS)


@pytest.mark.parametrize("shift", [1, -1])
def test_log_probs_beside_other_tokens_are_refused_with_their_shift(shift, lines, tmp_path):
    at = longest(lines)
    assert len(lines[at]["logprobs"]) >= 8
    changed = broken(lines[at], logprobs=np.roll(lines[at]["logprobs"], shift).tolist())
    path = written(tmp_path, [changed if index == at else line for index, line in enumerate(lines)])
    with pytest.raises(FindingsError, match=rf"shifted by \{shift:+d} they fit best") as caught:
        record(tmp_path / "run", f"rollout.engine=recorded:{path}", steps=1)
    assert [finding.where for finding in caught.value.findings] == [f"{path}:{at + 1}"]
    assert not (tmp_path / "run").exists()


def test_segments_say_which_tokens_are_of_which_version(lines, tmp_path):
    at = longest(lines)
    count = len(lines[at]["response_ids"])
    segments = [{"begin": 0, "end": 3, "version": 0, "replica": "a"}, {"begin": 3, "end": count, "version": 2}]
    path = written(tmp_path, [broken(lines[at], segments=segments)] * 1)
    (group,) = read_jsonl(path, Limits(100_000, 1, 128, 16))
    assert [(s.version, len(s.token_ids)) for s in group.trajectories[0].segments] == [(0, 3), (2, count - 3)]


def test_what_is_no_source_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(UsageError, match="there is no"):
        record(tmp_path / "run", "rollout.engine=recorded:nowhere.jsonl", steps=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no recorded steps"):
        record(tmp_path / "run", f"rollout.engine=recorded:{tmp_path}", steps=1)
    assert not (tmp_path / "run").exists()


def test_shifts_are_found_and_noise_is_not_taken_for_one():
    rng = np.random.default_rng(seed := secrets.randbits(32))
    print(f"seed {seed}")
    for _ in range(200):
        policy = -rng.exponential(1.0, int(rng.integers(8, 60)))
        near = policy + 0.02 * rng.standard_normal(policy.size)
        shift = int(rng.integers(-2, 3))
        found = align([np.roll(near, shift)], [policy])
        assert found is not None and (not found.wrong or found.shift == shift != 0)
        # Another policy's log-probs are far at every shift, and that is no shift.
        other = [-rng.exponential(1.0, 40) for _ in range(4)]
        assert misaligned(other, [-rng.exponential(1.0, 40) for _ in range(4)], ["x"] * 4)[0] == []
    assert align([np.zeros(2)], [np.zeros(2)]) is None


@pytest.mark.timeout(30)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="no regular file"):
            read_jsonl(path, LIMITS)
