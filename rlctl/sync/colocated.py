"""The colocated path: trainer and rollout share devices, and weights change hands inside them.

Order, so that the peak stays low: weights wake -> load -> trainer offload -> KV wake. The KV cache comes back only
when the trainer's memory is gone. On CUDA the allocator's expandable segments are off meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.device_handle import contiguous_blocks
from rlctl.sync.digest import Verify, sampled_place
from rlctl.sync.member import described
from rlctl.sync.protocols import LoadReport, Replica, WeightSource
from rlctl.sync.report import PhaseListener, SyncError, SyncReport
from rlctl.sync.tensor_meta import TensorMeta

PHASES = ("wake_weights", "load", "offload_trainer", "wake_kv")


class ColocatedSync:
    """Carries weights to replicas in this process.

    Args:
        source: the trainer's model.
        replicas: engines that take the weights.
        timeout: deadline in seconds, checked between tensors and phases; nothing here waits on another process.
        on_phase: called after each phase with (phase, seconds, error or "").
        verify: whether what was sent is hashed, and read back of the engines: all tensors, one of each sixteen, none.
    """

    def __init__(
        self,
        source: WeightSource,
        replicas: Sequence[Replica],
        *,
        timeout: float,
        on_phase: PhaseListener,
        verify: Verify = "full",
    ) -> None:
        self._source = source
        self._replicas = list(replicas)
        self._timeout = timeout
        self._on_phase = on_phase
        self._verify = verify

    def sync(self, version: int) -> SyncReport:
        """Bring every replica to ``version``.

        Raises:
            SyncError: a phase failed, the deadline passed, names did not match, or an engine holds other bytes than
                were sent; all replicas that may hold a mix are named as fenced and stay asleep.
        """
        begin = time.monotonic()
        phases: dict[str, float] = {}
        sent = _Counter()
        try:
            with contiguous_blocks():
                self._run(version, phases, sent, begin + self._timeout)
        except SyncError:
            raise
        except Exception as error:
            done = ", ".join(phases) or "none"
            raise SyncError(
                f"weight sync to version {version} failed after phases: {done} ({error})",
                fenced=[r.replica for r in self._replicas],
            ) from error
        seconds = time.monotonic() - begin
        return SyncReport(version, sent.tensors, sent.bytes, seconds, phases, stall=seconds)

    def _run(self, version: int, phases: dict[str, float], sent: _Counter, deadline: float) -> None:
        self._phase("wake_weights", phases, lambda: self._wake("weights"))
        self._phase("load", phases, lambda: self._load(version, sent, deadline))
        self._phase("offload_trainer", phases, self._source.offload)
        self._phase("wake_kv", phases, lambda: self._wake("kv_cache"))

    def _phase(self, name: str, phases: dict[str, float], act: Callable[[], None]) -> None:
        begin = time.monotonic()
        error = ""
        try:
            act()
        except Exception as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            seconds = time.monotonic() - begin
            self._on_phase(name, seconds, error)
        phases[name] = seconds

    def _wake(self, tag: str) -> None:
        for replica in self._replicas:
            replica.wake((tag,))

    def _load(self, version: int, sent: _Counter, deadline: float) -> None:
        for replica in self._replicas:
            held = replica.weights() if self._verify != "off" else {}
            expected = _Expected(held, self._verify, version)
            stream = expected.noted(sent.count(self._source.per_tensor_params(), deadline))
            require_all(replica.load_weights(stream, version), replica.replica)
            expected.compare(replica)


class _Counter:
    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0

    def count(self, stream: Iterator[tuple[str, torch.Tensor]], deadline: float) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            if time.monotonic() > deadline:
                raise TimeoutError(f"deadline passed at tensor {name}")
            self.tensors += 1
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


class _Expected:
    """What an engine must say that it holds of the tensors that are looked at."""

    def __init__(self, held: Mapping[str, TensorMeta], verify: Verify, version: int) -> None:
        self._held = held
        self._verify = verify
        self._version = version
        self._described: dict[str, list[Any]] = {}

    def noted(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for place, (name, tensor) in enumerate(stream):
            if self._verify == "full" or (self._verify == "sampled" and sampled_place(place, self._version)):
                held = self._held.get(name)
                cast = tensor if held is None else tensor.detach().to(torch_dtype(held.dtype))
                self._described[name] = described(name, cast)
            yield name, tensor

    def compare(self, replica: Replica) -> None:
        if not self._described:
            return
        found = replica.digests(self._described)
        wrong = [name for name, due in self._described.items() if list(found[name]) != due]
        if wrong:
            raise SyncError(
                f"replica {replica.replica} holds {len(wrong)} tensors otherwise than they were sent "
                f"({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''})",
                fenced=[replica.replica],
                fix="the next sync sends all of it; if it fails alike, the engine changes what it is given",
            )


def require_all(report: LoadReport, replica: str) -> None:
    """Raise SyncError unless every name was known and every parameter was sent: success means all of it."""
    if not report.complete:
        odd = [*report.unknown[:3], *report.untouched[:3]]
        raise SyncError(
            f"replica {replica}: loaded {len(report.loaded)}, unknown {len(report.unknown)}, "
            f"untouched {len(report.untouched)} ({', '.join(odd)})",
            fenced=[replica],
            fix="the names sent and the names of the engine do not match; compare them by rlctl convert-keys --inspect",
        )
