"""A mode and a checkpoint engine that another package brings: found by their entry points, in every process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_starts import run_module

MODE = '''
from rlctl.errors import Finding
from rlctl.trainers.base import Trainer
from rlctl.trainers.contracts import ModeContract
from rlctl.trainers.rules import Rule


def the_batch_is_even(config):
    if config.trainer.prompts_per_step % 2 == 0:
        return None
    return Finding("an odd batch", "trainer.prompts_per_step", "take an even one")


class EveryOther(Trainer):
    """Weights are synced after every second step only."""

    contract = ModeContract(
        "every_other",
        "a mode of another package",
        {"trainer.max_staleness": 1, "trainer.warmup_batches": 0.0, "trainer.old_log_probs": "recompute"},
        (Rule("the batch is even", the_batch_is_even),),
    )

    def on_init_end(self):
        self.update_weights()

    def on_sample_end(self, step):
        if step.number % 2 == 0:
            self.parts.rollouts.sleep()

    def on_step_end(self, step):
        if step.error is None and step.number % 2 == 0:
            self.update_weights()
'''
BACKEND = '''
import shutil
import tempfile
import time
from pathlib import Path

import torch

from rlctl.sync.bucket_engine import BucketEngine
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.work import Done


class Shelf(BucketEngine):
    """Buckets are files in a folder of the sending rank's."""

    name = "shelf"
    folder = None
    put = taken = 0

    def _metadata(self):
        self.put = self.taken = 0
        if self.member.role == "trainer":
            self.folder = Path(tempfile.mkdtemp(prefix="shelf-"))
        return {"folder": str(self.folder)}

    @classmethod
    def build_topology(cls, trainer_world, rollout_world, metadata):
        return [{"senders": 1, "folder": metadata[0]["folder"]} for _ in metadata]

    def _connect(self, *, folder):
        self.folder = Path(folder)

    def _put(self, bucket):
        content = bucket.data[: bucket.meta.used].numpy().tobytes()
        unfinished = self.folder / "unfinished"
        unfinished.write_bytes(len(content).to_bytes(8, "little") + content + bucket.meta.encode())
        unfinished.rename(self.folder / str(self.put))
        self.put += 1
        return Done(None)

    def _take(self, sender, buffer):
        file = self.folder / str(self.taken)
        while not file.exists():
            self.check_cancelled("while a bucket was due")
            self.deadline.check("waiting for a bucket")
            time.sleep(0.001)
        self.taken += 1
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        buffer[: end - 8] = torch.frombuffer(bytearray(data[8:end]), dtype=torch.uint8)
        return Done(BucketMeta.decode(data[end:]))

    def _disconnect(self, *, failed):
        if self.member.role == "trainer" and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
'''
ARGUMENTS = (
    "trainer.mode=every_other", "run.steps=4", "trainer.prompts_per_step=4", "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=8", "run.validate_prompts=0", "run.threads=1",
)  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    info = tmp_path / "every_other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: every-other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlctl.trainers]\nevery_other = every_other:EveryOther\n"
        "[rlctl.checkpoint_engines]\nshelf = shelf_engine:Shelf\n"
    )
    (tmp_path / "every_other.py").write_text(MODE)
    (tmp_path / "shelf_engine.py").write_text(BACKEND)
    (tmp_path / "temporary").mkdir()
    return {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}


def rlctl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("rlctl", ["train", "--json", *arguments], env=environment, timeout=250)


def test_it_runs(environment, tmp_path):
    done = rlctl(environment, "--run-dir", str(tmp_path / "run"), *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["mode"] == "every_other" and document["steps"] == 4
    # The weights of steps 2 and 4 are those of the step before.
    assert document["staleness"] == {"mean": 0.5, "max": 1.0, "tokens": document["staleness"]["tokens"]}
    assert document["sync"]["count"] == 3


@pytest.mark.new_interpreters
def test_both_run_in_processes_of_their_own(environment, tmp_path):
    done = rlctl(
        environment, "--profile", "cpu-separate", "--run-dir", str(tmp_path / "run"), "sync.backend=shelf", *ARGUMENTS
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["mode"], document["sync"]["count"]) == ("every_other", 3)
    # After each sync the replica's log-probs were those of the trainer: what came over the shelf is what it serves.
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["status"] for e in events if e["kind"] == "sync_ended"] == ["committed"] * 3
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if name.startswith(("shelf-", "rlctl"))]


def test_its_rules_hold_before_anything_starts(environment, tmp_path):
    done = rlctl(
        environment, "--run-dir", str(tmp_path / "run"), "trainer.mode=every_other", "trainer.prompts_per_step=3"
    )
    assert done.returncode == 2 and "an odd batch" in done.stderr
    assert not (tmp_path / "run").exists()
