"""The embedded rollout engine: continuous batching of one model in this process."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import FinishReason, RequestKey, Segment
from rlctl.rollout.base import WAKE_TAGS, LoadReport, Output, Request, RolloutEngine
from rlctl.rollout.embedded.admission import check_length, check_request
from rlctl.rollout.embedded.choice import Forward, make_decoder
from rlctl.rollout.embedded.decoder import Decoder, Prefix
from rlctl.rollout.embedded.sampling import sample
from rlctl.rollout.embedded.slots import Pending, Slots
from rlctl.rollout.finishing import outputs_of
from rlctl.sync.member import described
from rlctl.sync.tensor_meta import TensorMeta

# Freed memory of a model whose weights are smaller stays with the allocator, for whoever asks next in this process: to
# hand it back each step and have its pages made anew costs more than it is worth.
_WORTH_RETURNING = 32 << 20


class EmbeddedEngine(RolloutEngine):
    """See ``RolloutEngine``. Free slots are refilled once an eighth of them is free, or all of them.

    Args:
        forward: see ``make_decoder``.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        max_slots: int = 64,
        max_length: int = 2048,
        replica: str = "0",
        device: str = "cpu",
        trust_remote_code: bool = False,
        forward: Forward = "auto",
    ) -> None:
        if isinstance(model, str | Path):
            if not Path(model).is_dir():
                raise UsageError(f"no folder {str(model)!r}", fix="give a model folder or a configuration")
            model = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        check_length(model, max_length)
        self._decoder = self._make_decoder(
            model, forward, dtype=dtype, device=device, trust_remote_code=trust_remote_code, max_rows=max_slots,
            max_length=max_length,
        )  # fmt: skip
        self._device, self.replica = device, replica
        self._max_slots, self._max_length = max_slots, max_length
        self._slots = Slots(max_slots, max_length)
        self._waiting: deque[Pending] = deque()
        self._finished: list[Output] = []
        self._shared: dict[tuple[int, ...], Prefix] = {}
        self._version = 0
        self._missing: set[str] = set()
        self._awake: set[str] = set()
        self._weight_bytes = 0
        self._closed = False
        self.wake()

    @property
    def forward(self) -> str:
        """How the model runs: ``fused``, ``cached`` or ``recomputing``."""
        return self._decoder.name

    @property
    def version(self) -> int | None:
        return None if self._missing or "weights" not in self._awake else self._version

    @property
    def num_running(self) -> int:
        return len(self._slots) + len(self._waiting) + len(self._finished)

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_open()
        taken = {pending.request.key for pending in (*self._slots.pending, *self._waiting)}
        taken.update(output.key for output in self._finished)
        for request in requests:
            check_request(request, taken, vocab_size=self._decoder.vocab_size, max_length=self._max_length)
            taken.add(request.key)
        for request in requests:
            pending = Pending(request, [])
            for segment in request.prefix:
                pending.add(segment)
            ended = pending.ended()
            if ended is None:
                self._waiting.append(pending)
            else:
                self._finished.append(Output(request.key, pending.segments, ended))

    def step(self) -> list[Output]:
        self._require_ready()
        finished, self._finished = self._finished, []
        logits = []
        if len(self._slots):
            logits.append(self._decoder.decode(torch.from_numpy(self._slots.last_tokens()).to(self._device)))
        logits.extend(self._refill())
        if logits:
            stopped, full = self._slots.record(*self._sample(torch.cat(logits) if len(logits) > 1 else logits[0]))
            ended = stopped | full
            if ended.any():
                for row in np.flatnonzero(ended):
                    reason: FinishReason = "stop" if stopped[row] else "length"
                    finished.append(self._end(self._slots.close(int(row), self._version, self.replica), reason))
                self._decoder.reorder(self._slots.keep(~ended))
        return finished

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self._require_ready()
        self.submit(requests)
        mine, others = outputs_of(requests, self.step)
        self._finished.extend(others)
        return mine

    def abort(self, keys: Iterable[RequestKey] | None = None) -> list[Output]:
        self._require_open()
        named = None if keys is None else set(keys)
        hit = np.array([named is None or p.request.key in named for p in self._slots.pending], dtype=np.bool_)
        ended = [self._slots.close(int(row), self._version, self.replica) for row in np.flatnonzero(hit)]
        if ended:
            self._decoder.reorder(self._slots.keep(~hit))
        waiting, self._waiting = self._waiting, deque()
        for pending in waiting:
            (ended if named is None or pending.request.key in named else self._waiting).append(pending)
        return [self._end(pending, "abort") for pending in ended]

    def progress(self) -> dict[RequestKey, list[Segment]]:
        return {
            pending.request.key: self._slots.so_far(row, self._version, self.replica)
            for row, pending in enumerate(self._slots.pending)
        }

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> LoadReport:
        named, aliases = self._awake_weights(), self._decoder.aliases()
        self._requeue()
        loaded: list[str] = []
        unknown: list[str] = []
        before, self._missing = self._missing, set(named)  # all of them, should the stream raise
        for name, tensor in stream:
            target = named.get(aliases.get(name, name))
            if target is None:
                unknown.append(name)
                continue
            if target.shape != tensor.shape:
                raise RlctlError(f"{name} has shape {list(tensor.shape)}, the model's is {list(target.shape)}")
            with torch.no_grad():
                target.copy_(tensor)
            loaded.append(name)
        touched = {aliases.get(name, name) for name in loaded}
        self._missing = before - touched
        self._version = version
        return LoadReport(loaded, unknown, [name for name in named if name not in touched])

    def weights(self) -> dict[str, TensorMeta]:
        return {name: TensorMeta.of(name, tensor) for name, tensor in self._awake_weights().items()}

    def digests(self, names: Iterable[str] | None = None) -> dict[str, list[Any]]:
        held, aliases = self._awake_weights(), self._decoder.aliases()
        wanted = list(held) if names is None else list(names)
        for name in wanted:
            if aliases.get(name, name) not in held:
                raise RlctlError(f"the engine holds no tensor {name}")
        return {name: described(name, held[aliases.get(name, name)].cpu()) for name in wanted}

    def sleep(self, level: int = 1) -> None:
        self._require_open()
        if level not in (1, 2):
            raise UsageError(f"sleep level is {level}", fix="give 1 (KV cache) or 2 (KV cache and weights)")
        self._requeue()
        self._decoder.free_cache()
        self._awake.discard("kv_cache")
        if level == 2:
            self._decoder.free_weights()
            self._awake.discard("weights")
        if self._weight_bytes >= _WORTH_RETURNING:
            _return_memory(self._device)

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        self._require_open()
        unknown = [tag for tag in tags if tag not in WAKE_TAGS]
        if unknown:
            raise UsageError(f"unknown wake tag {unknown[0]!r}", fix=f"known: {', '.join(WAKE_TAGS)}")
        for tag in set(tags) - self._awake:
            if tag == "weights":
                self._decoder.allocate_weights()
                named = self._decoder.named_weights()
                self._missing, self._weight_bytes = set(named), sum(tensor.nbytes for tensor in named.values())
            else:
                self._decoder.allocate_cache()
            self._awake.add(tag)

    def close(self) -> None:
        if not self._closed:
            self.sleep(2)
            self._waiting.clear()
            self._finished.clear()
            self._closed = True

    def _refill(self) -> list[Tensor]:
        """Move waiting requests into free slots; return the logits of the new rows, none when nothing was moved."""
        free = self._max_slots - len(self._slots)
        if not self._waiting or (len(self._slots) and free < max(1, self._max_slots // 8)):
            return []
        groups: dict[tuple[int, ...], list[Pending]] = {}
        for _ in range(min(free, len(self._waiting))):
            pending = self._waiting.popleft()
            groups.setdefault(pending.ids, []).append(pending)
        new = [ids for ids in groups if ids not in self._shared]
        prefixes = {**self._shared, **dict(zip(new, self._decoder.prefill(new), strict=True))}
        self._decoder.place([(prefixes[ids], len(members)) for ids, members in groups.items()])
        for members in groups.values():
            for pending in members:
                self._slots.add(pending)
        # A group cut by the end of the free slots goes on in the next refill without a second prefill.
        rest = self._waiting[0].ids if self._waiting else None
        self._shared = {rest: prefixes[rest]} if rest in groups else {}
        return [prefixes[ids].logits.expand(len(members), -1) for ids, members in groups.items()]

    def _make_decoder(self, config: Any, forward: Forward, **sizes: Any) -> Decoder:
        return make_decoder(config, forward, **sizes)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return [n] the next token of each row, and [n] its log-prob."""
        numbers = (self._slots.noise(), *self._slots.params())
        return sample(logits, *(torch.from_numpy(n).to(self._device) for n in numbers), plain=self._slots.plain)

    def _sample(self, logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        with torch.inference_mode():
            chosen = self._choose(logits)
        tokens, logprobs = (a.cpu().numpy() for a in chosen)
        finite = np.isfinite(logprobs)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            key = self._slots.pending[row].request.key
            self._requeue()
            raise RlctlError(f"the model's logits are not finite for request {tuple(key)}", fix="check the weights")
        return tokens, logprobs

    def _requeue(self) -> None:
        """Move every row back to the head of the queue; its cache is dropped and will be computed again."""
        for row in reversed(range(len(self._slots))):
            self._waiting.appendleft(self._slots.close(row, self._version, self.replica))
        self._decoder.reorder(self._slots.keep(np.zeros(len(self._slots), dtype=np.bool_)))
        self._shared = {}

    def _end(self, pending: Pending, reason: FinishReason) -> Output:
        return Output(pending.request.key, pending.segments, reason)

    def _awake_weights(self) -> dict[str, Tensor]:
        self._require_open()
        if "weights" not in self._awake:
            raise RlctlError("weights that are asleep can be neither loaded nor read", fix="wake('weights') first")
        return self._decoder.named_weights()

    def _require_open(self) -> None:
        if self._closed:
            raise RlctlError("the rollout engine is closed")

    def _require_ready(self) -> None:
        self._require_open()
        asleep = [tag for tag in WAKE_TAGS if tag not in self._awake]
        if asleep:
            raise RlctlError(f"the rollout engine is asleep: {', '.join(asleep)}", fix="wake() first")
        if self._missing:
            raise RlctlError(
                f"the rollout engine has no weights for {len(self._missing)} names, {min(self._missing)} among them",
                fix="load_weights with every name first",
            )


def _return_memory(device: str) -> None:
    """Give freed memory back to the system, which allocators do not do of their own accord."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl needs none
        if trim is not None:
            trim(0)
