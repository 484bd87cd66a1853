"""Checkpoints: exact, whole or absent, pruned, and honest about damage."""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.runtime.checkpoints import Checkpoints, read_checkpoint


class Part:
    def __init__(self, state):
        self.content = state

    def state(self):
        return self.content

    def load(self, state):
        self.content = state


def random_state(rng: random.Random) -> dict:
    torch.manual_seed(rng.randrange(1 << 30))
    return {
        "updates": rng.randrange(100),
        "name": "a/b",
        "float": rng.random(),
        "none": None,
        "list": [1, {"x": torch.randn(3)}, [True]],
        "params": {
            "w": torch.randn(4, 3),
            "t": torch.randn(4, 3).T,
            "half": torch.randn(5).bfloat16(),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(2.5),
            "steps": torch.tensor([1, 2, 3]),
        },
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_state_comes_back_exactly(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    one, two = random_state(rng), random_state(rng)
    path = Checkpoints(tmp_path / "ckpt", keep=2).save(7, {"one": Part(one), "two": Part(two)})
    step, parts = read_checkpoint(path)
    assert step == 7
    assert same(parts, {"one": one, "two": two})
    assert {p.name for p in path.iterdir()} == {"SHA256SUMS", "state.json", "tensors.safetensors"}


def test_only_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, {"p": Part({"x": step})})
    assert checkpoints.steps() == [9, 10]
    assert {p.name for p in tmp_path.iterdir()} == {"step_9", "step_10"}


def test_damage_is_named(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save(1, {"p": Part({"x": torch.ones(64)})})
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "tensors.safetensors").write_bytes(data)
    with pytest.raises(RlctlError, match="changed since it was written"):
        read_checkpoint(path)
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(RlctlError, match="format 99"):
        read_checkpoint(path)
    (path / "state.json").write_text("{")
    with pytest.raises(RlctlError, match="not a checkpoint"):
        read_checkpoint(path)


def test_a_flipped_bit_of_the_plain_values_is_seen(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save(1, {"p": Part({"x": torch.ones(2), "rate": 1e-05, "n": 7})})
    for name in ("state.json", "SHA256SUMS"):
        whole = (path / name).read_bytes()
        for bit in range(0, 8 * len(whole), 11):  # 11: every bit of a byte, over eight of them
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(data)
            with pytest.raises(RlctlError, match=r"changed since it was written|not a checkpoint|checkpoint format"):
                read_checkpoint(path)
        (path / name).write_bytes(whole)
    read_checkpoint(path)


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"p": Part({"x": torch.ones(10)})})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(RlctlError, match="could not be written") as caught:
            checkpoints.save(2, {"p": Part({"x": torch.ones(1 << 16)})})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "--resume" in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} == {"step_1"}
    read_checkpoint(tmp_path / "step_1")


WRITER = """
    import sys, torch
    from pathlib import Path
    from rlctl.runtime.checkpoints import Checkpoints
    class Part:
        def __init__(self, step): self.step = step
        def state(self): return {"step": self.step, "x": torch.full((1 << 18,), float(self.step))}
    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
    print("ready", flush=True)
    for step in range(1, 10_000):
        checkpoints.save(step, {"p": Part(step)})
"""


def test_killed_at_random_moments_every_checkpoint_is_whole(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for trial in range(6):
        folder = tmp_path / str(trial)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.01, 0.25))
        process.kill()
        process.wait()
        checkpoints = Checkpoints(folder, keep=2)
        for step in checkpoints.steps():
            number, parts = read_checkpoint(checkpoints.path(step))
            assert number == step == parts["p"]["step"]
            assert torch.equal(parts["p"]["x"], torch.full((1 << 18,), float(step)))
        checkpoints.clean()
        left = {p.name for p in folder.iterdir()} if folder.exists() else set()
        assert left == {f"step_{step}" for step in checkpoints.steps()}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "SHA256SUMS"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "list"])
def test_what_is_no_checkpoint_is_refused_and_not_waited_for(tmp_path, name, kind):
    checkpoints = Checkpoints(tmp_path, keep=2)
    file = checkpoints.save(1, {"part": Part({"w": torch.ones(2)})}) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "deep":
        file.write_text("[" * 200_000)
    else:
        file.write_text('{"format": 1, "step": 1e999, "tensors_sha256": "", "parts": []}')
    with pytest.raises(RlctlError):
        read_checkpoint(file.parent)
