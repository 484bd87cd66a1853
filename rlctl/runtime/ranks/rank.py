"""One trainer rank: a child process that makes its part of the model and does what the run says."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlctl.process import Channel
from rlctl.runtime.ranks.adapter_operations import ADAPTER_OPERATIONS, adapted
from rlctl.runtime.ranks.meeting import store_of
from rlctl.runtime.ranks.messages import Order, RankSetup, Report, head_of, pieces_of
from rlctl.sync.error_data import ErrorData

if TYPE_CHECKING:
    import torch

    from rlctl.experience.rows import Row
    from rlctl.model.fsdp2.engine import Fsdp2Engine
    from rlctl.model.fsdp2.lora import Fsdp2LoraEngine
    from rlctl.runtime.ranks.local_rank import LocalLoraRank, LocalRank
    from rlctl.runtime.ranks.sending import Sending

    RankEngine = Fsdp2Engine | Fsdp2LoraEngine | LocalRank | LocalLoraRank

log = logging.getLogger("rank")
Operation = Callable[..., Any]


class Rank:
    """What a rank's operations work on.

    Attributes:
        setup: how it is made.
        first: whether it is rank 0, which answers for all.
        rows: those of the next operation.
        model: as it was loaded, until it is shared out.
        engine: its part of the model, from ``join`` on.
        sending: its place in weight syncs, from ``join`` on.
    """

    engine: RankEngine
    sending: Sending

    def __init__(self, setup: RankSetup, channel: Channel) -> None:
        import torch

        self.setup = setup
        self.first = setup.rank == 0
        self.rows: list[Row] = []
        self._channel = channel
        torch.set_num_threads(setup.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.model = self.load()

    def load(self) -> Any:
        """Return the model: on the first rank with its weights, which the others get from there."""
        from rlctl.model.loading import load_shapes, load_weights

        setup = self.setup
        if setup.engine == "fsdp2":
            import rlctl.model.fsdp2.engine  # noqa: F401 - slow, and whoever meets the others should not be late
        make = load_weights if self.first else load_shapes
        return make(setup.source, trust_remote_code=setup.trust_remote_code)

    def join(self) -> None:
        """Meet the others and share the model out."""
        import torch

        from rlctl.model.passes import DTYPES
        from rlctl.runtime.ranks.sending import Sending

        setup = self.setup
        if setup.device == "cuda":
            torch.cuda.set_device(0)  # its place shows it that one only
        if setup.engine == "fsdp2":
            self._meet()
        self.engine = self.build()
        self.model = None
        self.sending = Sending(
            self.engine,
            noted=self.first and setup.noted,
            device=torch.device(self.device),
            adapter=adapted(self) if setup.adapter_alone else None,
            held=DTYPES[setup.dtype],
        )

    def _meet(self) -> None:
        import torch.distributed as dist

        setup = self.setup
        if setup.interface:
            os.environ["GLOO_SOCKET_IFNAME"] = setup.interface
        dist.init_process_group(
            {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[setup.device],
            store=store_of(setup.store, setup.world, setup.timeout),
            rank=setup.rank,
            world_size=setup.world,
            timeout=timedelta(seconds=setup.timeout),
        )

    @property
    def device(self) -> str:
        """Where it computes, as torch names it."""
        return "cpu" if self.setup.device == "cpu" else f"{self.setup.device}:0"

    def build(self) -> RankEngine:
        """Return this rank's part of the model; the others make theirs."""
        setup = self.setup
        common: dict[str, Any] = {
            "dtype": setup.dtype,
            "micro_batch_tokens": setup.micro_batch_tokens,
            "total_updates": setup.total_updates,
            "device": self.device,
            "memory": setup.memory,
            "on_pass": lambda: self.say(Report("pass")),
        }
        if setup.lora is not None:
            common |= {"lora": setup.lora, "seed": setup.seed, "base": setup.source}
        if setup.engine == "local":
            from rlctl.runtime.ranks.local_rank import LocalLoraRank, LocalRank

            hosted = LocalRank if setup.lora is None else LocalLoraRank
            return hosted(self.model, setup.optimizer, **common)
        from rlctl.model.fsdp2.engine import Fsdp2Engine
        from rlctl.model.fsdp2.lora import Fsdp2LoraEngine

        spread = Fsdp2Engine if setup.lora is None else Fsdp2LoraEngine
        return spread(self.model, setup.optimizer, tp=setup.tp, **common)

    def say(self, report: Report) -> None:
        """Tell the run something."""
        self._channel.send(report, self.setup.timeout)

    def send_tensors(self, tensors: Iterator[tuple[str, str, torch.Tensor]]) -> None:
        """Hand (kind, name, tensor) to the run, one at a time; other ranks than the first only take part."""
        for kind, name, tensor in tensors:
            if not self.first:
                continue
            self.say(Report("tensor", head_of(kind, name, tensor)))
            for piece in pieces_of(tensor):
                self._channel.send(piece, self.setup.timeout)

    def receive_piece(self) -> bytes:
        """Return the next piece of a tensor that the run sends."""
        return self._channel.receive(self.setup.timeout, bytes)


def _rows(rank: Rank, rows: list[Any]) -> None:
    from rlctl.experience.row_data import RowData, unpack_rows

    rank.rows += unpack_rows(msgspec.convert(rows, list[RowData]))


def _log_probs(rank: Rank, temperature: float) -> bytes | None:
    rows, rank.rows = rank.rows, []
    return _flat(rank, rank.engine.log_probs(rows, temperature=temperature))


def _kept_log_probs(rank: Rank, temperature: float) -> bytes | None:
    rows, rank.rows = rank.rows, []
    return _flat(rank, rank.engine.kept_log_probs(rows, temperature=temperature))


def _update(rank: Rank, loss: dict[str, Any]) -> dict[str, Any] | None:
    from rlctl.model.base import LossSpec

    rows, rank.rows = rank.rows, []
    found = rank.engine.update(rows, msgspec.convert(loss, LossSpec))
    if not rank.first:
        return None
    logprobs = _flat(rank, found.logprobs)
    return {
        "metrics": found.metrics,
        "logprobs": logprobs,
        "tokens": found.tokens,
        "micro_batches": found.micro_batches,
    }


def _flat(rank: Rank, values: list[Any]) -> bytes | None:
    from rlctl.experience.row_data import pack_floats

    return b"".join(pack_floats(value) for value in values) if rank.first else None


def _weights(rank: Rank) -> None:
    rank.send_tensors(("", name, tensor) for name, tensor in rank.engine.per_tensor_params())


def _state(rank: Rank) -> int:
    rank.send_tensors(rank.engine.tensors())
    return rank.engine.updates


def _load(rank: Rank, updates: int, heads: list[Any]) -> None:
    from rlctl.runtime.ranks.messages import TensorHead, tensor_from

    told = msgspec.convert(heads, list[TensorHead])
    tensors = (tensor_from(head, rank.receive_piece) for head in told)
    names = [(head.kind, head.name) for head in told]
    rank.engine.load_tensors(updates, names, tensors if rank.first else None)


def _save_pretrained(rank: Rank, folder: str) -> None:
    rank.engine.save_pretrained(Path(folder))


OPERATIONS: Mapping[str, Operation] = {
    "join": lambda rank: rank.join(),
    "rows": _rows,
    "log_probs": _log_probs,
    "keep_policy": lambda rank: rank.engine.keep_policy(),
    "kept_log_probs": _kept_log_probs,
    "update": _update,
    "weights": _weights,
    "state": _state,
    "load": _load,
    "offload": lambda rank: rank.engine.offload(),
    "onload": lambda rank: rank.engine.onload(),
    "save_pretrained": _save_pretrained,
    "params_digest": lambda rank: rank.engine.params_digest(),
    "sent": lambda rank: rank.sending.sent,
    **ADAPTER_OPERATIONS,
}


def main(channel: Channel) -> None:
    """Entry point of a rank's process."""
    serve(channel, OPERATIONS)


def serve(channel: Channel, operations: Mapping[str, Operation]) -> None:
    """Be a rank: do what comes over ``channel``, until it is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # Slurm tells every process of a job to end; the run's own saves a checkpoint first, with its ranks.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup = channel.receive(60.0, RankSetup)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {setup.rank}: %(message)s")
    made: list[Rank] = []
    _attempt(channel, setup, "load", lambda: made.append(Rank(setup, channel)))
    # Handled before the next message is read, so that it cancels no later transfer than the one that it was sent for.
    signal.signal(signal.SIGUSR2, lambda *_: made[0].sending.cancel())
    while True:
        order = channel.receive(math.inf, Order)
        if order.operation == "sync":
            channel.send(made[0].sending.answer(**order.arguments), setup.timeout)
            continue
        act = operations[order.operation]
        _attempt(channel, setup, order.operation, lambda: act(made[0], **order.arguments))  # noqa: B023 - called at once


def _attempt(channel: Channel, setup: RankSetup, name: str, act: Callable[[], Any]) -> None:
    """Do something and report how it went. The run ends a rank that failed."""
    log.info(name)
    try:
        report = Report("done", act())
    except EOFError:
        raise
    except Exception as error:
        log.exception("failed")
        report = Report("failed", error=ErrorData.of(error), waiting=_in_collective(error))
    channel.send(report, setup.timeout)


def _in_collective(error: Exception) -> bool:
    """Whether an error came out of a wait for other ranks."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "torch/distributed/" in frames[-1].filename or "gloo" in str(error).lower()
