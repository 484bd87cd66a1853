"""Records of steps: what was written is read again bit for bit, and whatever was changed since is named."""

import os
import secrets
import shutil

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlctl.experience.figures import figures_in, figures_out
from rlctl.experience.records.columns import ColumnError, from_columns, to_columns
from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.manifest import (
    BATCH,
    MANIFEST,
    SUMS,
    step_folder,
)
from rlctl.experience.records.reading import read_bundle, read_run
from rlctl.experience.records.writing import clean

from .rows import random_round, same
from .written import resummed, written

pytestmark = pytest.mark.timeout(60)


def test_a_record_comes_back_bit_for_bit(tmp_path):
    rounds = written(tmp_path)
    bundle = read_bundle(tmp_path, 3)
    assert [len(one.rows) for one in bundle.rounds] == [6, 4]
    for told, one in zip(rounds, bundle.rounds, strict=True):
        assert all(same(a, b) for a, b in zip(told.rows, one.rows, strict=True))
        assert (told.task_rewards, told.cut, told.segments) == (one.task_rewards, one.cut, one.segments)
        assert (told.scores is None) == (one.scores is None)
        assert told.scores is None or told.scores.tolist() == one.scores.tolist()
        assert one.metrics == {"loss": 0.1, "grad_norm": float("inf")}
    assert np.isnan(bundle.metrics["loss"])
    assert bundle.config == {"config": {"run": {"seed": 3}}}
    run = read_run(tmp_path)
    assert (run.steps, run.checkpoints, run.pinned, run.faults) == ([3], [], {}, [])


def test_one_flipped_bit_of_any_file_is_named(tmp_path):
    written(tmp_path)
    files = sorted(p for p in (tmp_path / "records").rglob("*") if p.is_file())
    assert len(files) == 4
    rng = np.random.default_rng(seed := secrets.randbits(32))
    print(f"seed {seed}")
    for file in files:
        data = file.read_bytes()
        for place in rng.integers(0, len(data), 12).tolist():
            changed = bytearray(data)
            changed[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(changed)
            with pytest.raises(RecordError) as caught:
                read_bundle(tmp_path, 3)
            # A changed list of digests is told by what it says, or of the file that it no longer fits.
            assert caught.value.file.parent == file.parent
            assert file.name == SUMS or caught.value.file == file
        file.write_bytes(data)
    read_bundle(tmp_path, 3)


def test_swapped_absent_and_oversized_files_are_named(tmp_path, monkeypatch):
    written(tmp_path, 3)
    written(tmp_path, 4)
    three, four = step_folder(tmp_path / "records", 3), step_folder(tmp_path / "records", 4)
    three.rename(tmp_path / "x")
    four.rename(three)
    (tmp_path / "x").rename(four)
    with pytest.raises(RecordError, match="the record of step 4, not of step 3"):
        read_bundle(tmp_path, 3)
    (four / MANIFEST).unlink()
    with pytest.raises(RecordError, match="No such file"):
        read_bundle(tmp_path, 4)
    with pytest.raises(RecordError, match="step 5 has no record"):
        read_bundle(tmp_path, 5)
    monkeypatch.setattr("rlctl.experience.records.reading.MOST_JSON", 10)
    with pytest.raises(RecordError, match="more than the 10 that"):
        read_bundle(tmp_path, 3)


CHANGES = {
    "absent": (lambda c: c.pop("mask"), "mask: not there"),
    "foreign": (lambda c: c.update(evil=np.zeros(3)), "evil: not a column"),
    "type": (lambda c: c.update(mask=c["mask"].astype(np.float32)), "mask: float32"),
    "short": (lambda c: c.update(rollout_logprobs=c["rollout_logprobs"][:-1]), "rollout_logprobs: "),
    "bounds": (lambda c: c["offsets"].__setitem__(1, 10**6), "offsets: not the bounds"),
    "double": (lambda c: c["key"].__setitem__(1, c["key"][0]), "key: two rows have the same"),
    "rounds": (lambda c: c["round_rows"].__setitem__(0, 5), "round_rows: 9 rows"),
    "segments": (lambda c: c["segments"].__setitem__((0, 1), 0), "segments: "),
    "replica": (lambda c: c["segments"].__setitem__((0, 3), 7), "segments: no replica 7"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_columns_that_make_no_rows_are_named(change, tmp_path):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    columns = load_file(place / BATCH)
    act, message = CHANGES[change]
    act(columns)
    save_file(columns, place / BATCH)
    resummed(place)
    with pytest.raises(RecordError, match=message) as caught:
        read_bundle(tmp_path, 3)
    assert caught.value.file == place / BATCH
    with pytest.raises(ColumnError):
        from_columns(columns, ["0", "1"])


def test_a_record_of_another_schema_is_refused_by_its_number(tmp_path):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    manifest = msgspec.json.decode((place / MANIFEST).read_bytes())
    assert manifest["schema"] == 1, "what was recorded before steps that failed were is read"
    (place / MANIFEST).write_bytes(msgspec.json.encode({**manifest, "schema": 3}))
    resummed(place)
    with pytest.raises(RecordError, match="schema 3, this rlctl reads 1 and 2"):
        read_bundle(tmp_path, 3)


def test_no_file_is_unpickled(tmp_path):
    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    for name in (BATCH, MANIFEST):
        kept = (place / name).read_bytes()
        (place / name).write_bytes(pickle.dumps(Evil()))
        resummed(place)
        with pytest.raises(RecordError):
            read_bundle(tmp_path, 3)
        (place / name).write_bytes(kept)
    assert not (tmp_path / "done").exists()


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    written(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "records").rglob("*") if p.is_file()}

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlctl.experience.records.writing._write", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, 4)
    assert {p: p.read_bytes() for p in (tmp_path / "records").rglob("*") if p.is_file()} == before
    # What a kill leaves has a dot name, is no record, and goes with the next start.
    shutil.copytree(step_folder(tmp_path / "records", 3), tmp_path / "records" / ".step_00000005.1.tmp")
    assert read_run(tmp_path).steps == [3]
    clean(tmp_path / "records")
    assert [p.name for p in sorted((tmp_path / "records").iterdir())] == ["configs", "step_00000003"]


def test_a_cut_line_and_a_lost_event_are_told_by_number(tmp_path):
    from rlctl.experience.event_log import EventLog
    from rlctl.experience.events import Noted

    written(tmp_path)
    log = EventLog(tmp_path / "events.jsonl")
    for index in range(5):
        log.emit(Noted(message=str(index)))
    log.close()
    assert read_run(tmp_path).faults == []
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:10])
    run = read_run(tmp_path)
    assert len(run.events.events) == 4 and [fault.what.split(":")[0] for fault in run.faults] == ["line 5"]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:2] + lines[3:]))
    assert "event 3 where 2 belongs" in read_run(tmp_path).faults[0].what
    (tmp_path / "events.jsonl").write_bytes(b"".join([*lines[:2], lines[1], *lines[2:]]))
    assert "event 1 where 2 belongs" in read_run(tmp_path).faults[0].what


def test_the_manifest_is_what_sha256sum_checks(tmp_path):
    import subprocess

    written(tmp_path)
    place = step_folder(tmp_path / "records", 3)
    subprocess.run(["sha256sum", "-c", SUMS], cwd=place, check=True, capture_output=True)
    assert msgspec.json.decode((place / MANIFEST).read_bytes())["step"] == 3


def test_figures_that_are_not_finite_survive_json():
    figures = {"a": 0.1, "b": float("inf"), "c": float("-inf"), "d": float("nan")}
    found = figures_in(msgspec.json.decode(msgspec.json.encode(figures_out(figures))))
    assert found["a"] == 0.1 and found["b"] == float("inf") and found["c"] == -float("inf") and np.isnan(found["d"])


def test_columns_are_a_safetensors_file():
    from safetensors.numpy import load

    from rlctl.experience.records.encoding import encode

    rng = np.random.default_rng(seed := secrets.randbits(32))
    print(f"seed {seed}")
    for count in (0, 1, 5):
        columns, _ = to_columns([random_round(rng, count, scored=bool(count))])
        found = load(encode(columns))
        assert found.keys() == columns.keys()
        for name, column in columns.items():
            assert (found[name].dtype, found[name].shape) == (column.dtype, column.shape), name
            assert found[name].tobytes() == column.tobytes(), name
