"""What must hold for any input: an answer or a readable error, in bounded time, nothing run, nothing half written."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rlctl.errors import RlctlError
from rlctl.keys.carried_files import carry_files
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.inspect import inspect
from rlctl.keys.output_folder import OutputFolder
from rlctl.keys.shard_layout import TensorShape, plan_shards
from rlctl.keys.shard_writer import ShardWriter
from rlctl.keys.tensor_source import open_tensors
from tests.keys.hostile_inputs import damage, model_tensors, write_model

# What no reader of a checkpoint has a reason to do; seen through Python's audit events.
FORBIDDEN = frozenset({
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect",
})  # fmt: skip
_watched: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and (event in FORBIDDEN or (event == "exec" and _is_new_code(arguments))):
        _watched.append(f"{event} {str(arguments)[:200]}")


def _is_new_code(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments) and getattr(arguments[0], "co_filename", "<string>").startswith("<string")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect every forbidden event of the block."""
    global _watched
    _watched = events = []
    try:
        yield events
    finally:
        _watched = None


class TooSlowError(BaseException):
    """Not an Exception, and above all no OSError, which the code under test may rightly turn into its own."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in the block after ``seconds``."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def copy(source: Path, target: Path) -> None:
    """Read all there is to read of a checkpoint, and copy it under new names. Raises RlctlError."""
    opened = open_tensors(source)
    try:
        opened.check()
        layout = plan_shards(
            (TensorShape(f"new.{e.name}", e.dtype, e.shape) for e in opened.entries.values()), max_shard_bytes=60
        )
        with OutputFolder(target, sources=[source], expected_bytes=layout.nbytes, durable=False) as out:
            carry_files(source, out.path)
            with ShardWriter(out.path, layout) as writer:
                if isinstance(opened, Checkpoint):
                    writer.copy((f"new.{name}", entry) for name, entry in opened.entries.items())
                else:
                    for name in opened.entries:
                        writer.write(f"new.{name}", opened.tensor(name))
    finally:
        opened.close()


def run(kind: str, source: Path, base: Path, target: Path, rng: random.Random) -> None:
    """Do one of the things that a user would do with what lies at ``source``. Raises RlctlError."""
    if rng.random() < 0.25:
        json.dumps(inspect(source).document())
    if rng.random() < 0.3:
        copy(source, target)
    elif kind == "adapter" and rng.random() < 0.5:
        prepare(Conversion(base, "hf", adapter=source, merge=True)).write(target, durable=False)
    else:
        to = rng.choice(["peft", "vllm-lora"] if kind == "adapter" else ["hf", "hf-fused", "megatron", "vllm"])
        strict = rng.random() < 0.5
        prepared = prepare(Conversion(source, to, tp=rng.choice([None, 2]), base=base if rng.random() < 0.3 else None))
        json.dumps(prepared.document())
        prepared.check(strict=strict)
        prepared.write(target, verify=rng.random() < 0.3, durable=False)


def survives(seed: int, work: Path) -> str:
    """Let one hostile checkpoint of ``seed`` be used, and return its kind with ``"ok"`` or the class of its error.

    Raises AssertionError, naming seed and damage, when anything but the two legal ends happened.
    """
    rng = random.Random(seed)
    source, base, target = work / "source", work / "base", work / "out" / "target"
    source.mkdir(parents=True)
    if not base.exists():
        write_model(base, model_tensors())
    kind, what = damage(source, rng)
    outcome = "ok"
    try:
        with watched() as events, deadline(10):
            try:
                run(kind, source, base, target, rng)
            except RlctlError as error:
                str(error).encode("utf-8", "backslashreplace")
                outcome = type(error).__name__
        assert not events, events
        assert target.exists() == (outcome == "ok"), "partial output"
        left = [p.name for p in target.parent.iterdir() if p != target] if target.parent.exists() else []
        assert not left, f"left over: {left}"
    except (Exception, TooSlowError) as error:
        raise AssertionError(f"seed {seed}, {kind}, {what}: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        for folder in (source, target.parent):
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
    return f"{kind} {outcome}"
