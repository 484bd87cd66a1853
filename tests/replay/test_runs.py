"""Replays of whole run folders: what holds, and what is named when somebody has been at them."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.replay.findings import Steps
from rlctl.replay.replaying import replay
from tests.trainers.recorded import record

pytestmark = pytest.mark.timeout(240)

SAME = ("run.deterministic=true", "run.checkpoint_every=2", "run.keep_checkpoints=9", "run.threads=1")
STEPS = 5
LEVELS = ("R0", "R1", "R2", "R3", "R4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    record(folder, *SAME, steps=STEPS)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def found(run, *levels, first=None, last=None):
    return list(replay(run, steps=Steps(first, last), levels=levels))


def differing(run, *levels, **which):
    return [f for f in found(run, *levels, **which) if f.status != "exact"]


def sign(folder):
    """Write the digests of a record anew, as somebody would who wants to be believed."""
    names = ("batch.safetensors", "manifest.json")
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))


def reconfigure(run, step, key, value):
    """Have a step recorded under another configuration, with all digests in order."""
    records = run / "records"
    folder = records / f"step_{step:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    document = json.loads((records / "configs" / f"{manifest['config_sha256']}.json").read_text())
    *parents, leaf = key.split(".")
    node = document["config"]
    for name in parents:
        node = node[name]
    assert node[leaf] != value
    node[leaf] = value
    data = json.dumps(document).encode()
    manifest["config_sha256"] = hashlib.sha256(data).hexdigest()
    (records / "configs" / f"{manifest['config_sha256']}.json").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    sign(folder)


def test_an_untouched_run_is_exact_at_every_level(whole):
    seen = []
    findings = list(replay(whole, steps=Steps(), levels=LEVELS, on_progress=lambda done, of: seen.append((done, of))))
    assert [(f.step, f.level, f.status, f.reason) for f in findings if f.status != "exact"] == []
    assert {(f.step, f.level) for f in findings} >= {
        (s, level) for s in range(1, 6) for level in ("R0", "R1", "R2", "R3")
    }
    assert [done for done, _ in seen] == list(range(1, len(findings) + 1))
    result = json.loads((whole / "result.json").read_text())
    assert [f.params_digest for f in findings if f.params_digest][-1] == result["params_digest"]


def test_a_flipped_bit_is_named_wherever_it_is(whole, run):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    step = "records/step_00000003"
    config = next((whole / "records" / "configs").iterdir()).relative_to(whole)
    files = [
        f"{step}/manifest.json", f"{step}/batch.safetensors", f"{step}/SHA256SUMS", config, "config.json",
        "events.jsonl", "metrics.jsonl", "ckpt/step_2/tensors.safetensors", "ckpt/step_2/state.json",
        "ckpt/step_2/SHA256SUMS", "records/end.json", "ckpt/step_4/state.json", "env.json", "result.json",
        "records/pinned.json", "records/SHA256SUMS", "final/config.json", "final/model.safetensors",
    ]  # fmt: skip
    for name in files:
        data = bytearray((whole / name).read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        (run / name).write_bytes(data)
        named = differing(run, "R0")
        assert named, f"{name} changed and nobody saw"
        words = " ".join(f.reason + f.first_difference.tensor for f in named)
        assert Path(name).name in words or f"{Path(name).parent.name}: " in words, (name, words)
        (run / name).write_bytes((whole / name).read_bytes())
    assert differing(run, "R0") == []


@pytest.mark.parametrize("name", ["records/step_00000003/SHA256SUMS", "records/SHA256SUMS"])
def test_every_bit_of_the_ends_of_lines_counts(run, name):
    was = (run / name).read_bytes()
    for place in [at for at, byte in enumerate(was) if byte == ord("\n")]:
        for bit in range(8):
            data = bytearray(was)
            data[place] ^= 1 << bit
            (run / name).write_bytes(data)
            step = 3 if "step" in name else STEPS
            assert differing(run, "R0", first=step, last=step), (place, bit)
    (run / name).write_bytes(was)
    assert differing(run, "R0") == []


def test_records_that_changed_places_are_named(run):
    records = run / "records"
    (records / "step_00000002").rename(records / "x")
    (records / "step_00000003").rename(records / "step_00000002")
    (records / "x").rename(records / "step_00000003")
    assert [(f.step, f.status) for f in differing(run, "R0", "R1", first=2, last=3)] == [
        (2, "differs"), (3, "differs"), (2, "differs"), (3, "differs"),
    ]  # fmt: skip
    assert "it is the record of step 3, not of step 2" in differing(run, "R0", last=2)[0].reason


def test_a_record_of_another_run_is_named(run, tmp_path):
    record(tmp_path / "other", *SAME, "run.seed=7", steps=2)
    other = tmp_path / "other" / "records"
    shutil.rmtree(run / "records" / "step_00000002")
    shutil.copytree(other / "step_00000002", run / "records" / "step_00000002")
    for file in (other / "configs").iterdir():
        shutil.copy(file, run / "records" / "configs")
    (hashes,) = differing(run, "R0", first=2, last=2)
    assert "events.jsonl" in hashes.reason and "run.seed" in hashes.reason
    (again,) = differing(run, "R2", first=2, last=2)
    assert again.status == "differs"


def test_a_removed_event_is_named(run):
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if b'"selected"' in line and b'"step":3' in line)
    (run / "events.jsonl").write_bytes(b"".join(lines[:place] + lines[place + 1 :]))
    named = differing(run, "R0")
    assert [f.step for f in named] == [0, 3, 4, 5]
    assert f"line {place + 1}: event {place + 1} where {place} belongs" in named[0].reason


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("trainer.optimizer.lr", 0.5, ("update_actor", "lr", 0.4999)),
        ("run.threads", 2, ("fingerprint", "threads", 1.0)),
        ("algorithm.clip_high", 0.9, None),
    ],
)
def test_another_setting_is_named(run, key, value, where):
    document = json.loads((run / "config.json").read_text())
    section, *rest = key.split(".")
    node = document["config"][section]
    for name in rest[:-1]:
        node = node[name]
    node[rest[-1]] = value
    (run / "config.json").write_text(json.dumps(document))
    named = differing(run, "R0")
    assert [f.step for f in named] == list(range(1, STEPS + 1)) and all(key in f.reason for f in named)
    reconfigure(run, 3, key, value)
    if where is not None:
        (named,) = differing(run, "R2", first=3, last=3)
        first = named.first_difference
        assert (named.status, first.stage, first.tensor) == ("differs", *where[:2])
        assert first.max_abs == pytest.approx(where[2], rel=1e-3)


def test_another_checkpoint_is_named(run):
    """A checkpoint is sound in itself, and another's."""
    shutil.rmtree(run / "ckpt" / "step_2")
    shutil.copytree(run / "ckpt" / "step_4", run / "ckpt" / "step_2")
    (named,) = differing(run, "R2", first=3, last=3)
    assert named.status == "differs" and "it is the checkpoint of step 4" in named.reason
    state = run / "ckpt" / "step_2" / "state.json"
    state.write_text(state.read_text().replace('"step": 4', '"step": 2', 1))
    digest = hashlib.sha256(state.read_bytes()).hexdigest()
    (run / "ckpt" / "step_2" / "SHA256SUMS").write_text(f"{digest}  state.json\n")
    (named,) = differing(run, "R2", first=3, last=3)
    assert named.status == "differs" and "not the checkpoint that step 3 was recorded after" in named.reason


def test_what_is_not_kept_is_unavailable_with_the_reason(run):
    for folder in ("ckpt/step_0", "ckpt/step_2", "records/step_00000001"):
        shutil.rmtree(run / folder)
    findings = found(run, "R1", "R2", "R3", first=3)
    assert {(f.step, f.level): f.status for f in findings if f.level != "R3"} == {
        (3, "R1"): "exact", (4, "R1"): "exact", (5, "R1"): "exact",
        (3, "R2"): "unavailable", (4, "R2"): "unavailable", (5, "R2"): "exact",
    }  # fmt: skip
    (reason,) = {f.reason for f in findings if f.level == "R2" and f.step == 3}
    assert reason == ("there is no checkpoint at or before step 2: the first that is kept is step 4's; try --level R1")
    shutil.rmtree(run / "records" / "step_00000005")
    with pytest.raises(UsageError, match="no chosen step has a record; steps 2 to 4 are recorded"):
        found(run, "R0", first=5)


def test_a_run_that_went_on_under_another_rate_is_exact_throughout(run):
    record(run, *SAME, "trainer.optimizer.lr=0.003", steps=7, resume=True)
    assert [(f.step, f.level, f.reason) for f in differing(run, *LEVELS)] == []
    assert [f.step for f in found(run, "R2")] == list(range(1, 8))


def test_a_log_that_lost_its_end_is_named_by_its_schedule_too(run):
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert differing(run, "R4") == []
    for gone in (1, 2, 3):
        log.write_bytes(b"".join(lines[:-gone]))
        (cut,) = differing(run, "R4")
        assert (cut.step, cut.status, cut.first_difference.tensor) == (0, "differs", f"event {len(lines) - gone}")
        assert f"the run's last event is {len(lines) - 1}" in cut.reason
    (run / "records" / "end.json").unlink()  # as without records
    (cut,) = differing(run, "R4")
    assert (cut.step, cut.status) == (0, "differs") and "without the run's end" in cut.reason
    ended = max(number for number, line in enumerate(lines) if b'"step_ended"' in line)
    log.write_bytes(b"".join(lines[:ended]))
    places = {f.step: f.first_difference.tensor for f in differing(run, "R4") if f.status == "differs"}
    assert places == {0: f"event {ended}", STEPS: f"end of step {STEPS}"}


@pytest.mark.parametrize(("schema", "who"), [(None, "an older"), (2, "a newer")])
def test_a_log_of_another_schema_is_unavailable_and_says_so(run, schema, who):
    log = run / "events.jsonl"
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    (began,) = [line for line in lines if line["kind"] == "run_started"]
    assert began.pop("schema") == 1
    if schema is not None:
        began["schema"] = schema
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = differing(run, "R4")
    assert [(f.step, f.status) for f in told] == [(step, "unavailable") for step in range(1, STEPS + 1)]
    assert all(f.reason.startswith(f"recorded by {who} rlctl: its events are of schema {schema or 0}") for f in told)
