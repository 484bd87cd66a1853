"""An SGLang server as a replica: requests over HTTP, interrupted by syncs, its weights replaced through a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, get_args

import torch

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.keys.dtypes import torch_dtype
from rlctl.rollout.base import Output, Request
from rlctl.rollout.sglang import requests
from rlctl.rollout.sglang.answers import version_of
from rlctl.rollout.sglang.connection import SglangConnection
from rlctl.rollout.sglang.dispatch import Dispatch
from rlctl.rollout.sglang.requests import Tag
from rlctl.rollout.sglang.weights import FolderLoader
from rlctl.sync.deadline import Deadline
from rlctl.sync.member import described
from rlctl.sync.protocols import Interruption

_FENCE_SECONDS = 10.0


class SglangServed:
    """See ``Served``. The server decodes by itself; ``step`` hands on what has ended.

    Args:
        server: the connection to it.
        loader: what takes its weights.
        replica: its name.
        max_slots: most requests that are sent to it at once.
        max_length: most tokens of prompt and response together.
        request_timeout: seconds within which every response must have ended.
        process: the server's, when this replica has started it.
    """

    def __init__(
        self,
        server: SglangConnection,
        loader: FolderLoader,
        replica: str,
        *,
        max_slots: int,
        max_length: int,
        request_timeout: float = 3600.0,
        process: AbstractContextManager[object] | None = None,
    ) -> None:
        self.replica = replica
        self.serving: int | None = None
        self.loaders = [loader]
        self._server = server
        self._loader = loader
        self._process = process
        self._dispatch = Dispatch(
            server,
            replica,
            max_slots=max_slots,
            max_length=max_length,
            request_timeout=request_timeout,
            adapter=lambda: loader.adapter_name,
        )
        self._asleep: set[Tag] = set()

    # --- requests ---

    @property
    def num_running(self) -> int:
        """See Served."""
        return self._dispatch.num_running

    def submit(self, requests: Sequence[Request]) -> None:
        """See Served."""
        self._dispatch.submit(requests)

    def step(self, timeout: float = 0.0) -> list[Output]:
        """Return what ended; waits up to ``timeout`` seconds for something.

        Raises ReplicaLostError once the server is gone, and what it said of a request that it refused.
        """
        return self._dispatch.outputs(timeout)

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """See Served: what was made before; of a call under way the server says nothing before it ends."""
        return self._dispatch.progress()

    def abort(self, keys: Iterable[RequestKey] | None, deadline: Deadline) -> None:
        """See Served."""
        self._dispatch.end(keys, deadline)

    # --- ServedReplica ---

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        if how == "keep" and self._loader.adapter_name is not None:
            raise UsageError(
                "SGLang's requests go on with the adapter that they began with",
                where="trainer.interruption",
                fix="abort or wait",
            )
        self.serving = None
        if how == "wait":
            self._dispatch.drain(deadline)
        self._dispatch.hold()
        if how == "abort":
            self._dispatch.end(None, deadline)
        self._server.ask(requests.pause("retract"), deadline)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._release(["kv_cache"], deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._restore(["kv_cache"], deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Raises RlctlError when the server holds another version."""
        held = version_of(self._server.ask(requests.model_info(), deadline)["weight_version"])
        if held != version or not self._loader.whole:
            what = f"version {held}" if self._loader.whole else "no whole weights"
            raise RlctlError(f"SGLang holds {what}, and version {version} is to be served")
        if self._asleep:
            raise RlctlError(f"SGLang is to serve, and has given up its {' and '.join(sorted(self._asleep))}")
        self._server.ask(requests.go_on(), deadline)
        self.serving = version
        self._dispatch.open()

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self.serving = None
        self._dispatch.hold()
        threading.Thread(target=self._pause_behind, daemon=True).start()

    # --- life ---

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See Served."""
        if level not in (1, 2):
            raise UsageError(f"sleep level is {level}", fix="give 1 (KV cache) or 2 (KV cache and weights)")
        self.serving = None
        self._dispatch.hold()
        self._server.ask(requests.pause("retract"), deadline)
        if level == 2:
            self._loader.forget()
        self._release(["kv_cache"] if level == 1 else ["kv_cache", "weights"], deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See Served."""
        known = [tag for tag in get_args(Tag) if tag in tags]
        if len(known) != len(set(tags)):
            raise UsageError(f"no memory has the tags {', '.join(tags)}", fix=f"known: {', '.join(get_args(Tag))}")
        self._restore(known, deadline)

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See Served. SGLang writes every number as text: ask for a few weights. Raises RlctlError for a model whose
        class cannot be read by the names that it is sent under (those of Llama can)."""
        metas = self._loader.targets()
        found = {}
        for name in metas if names is None else names:
            if name not in metas:
                raise RlctlError(f"the model has no tensor {name}")
            meta = metas[name]
            values = self._server.ask(requests.read_weight(name, meta.shape[0]), deadline)
            if values is None:
                raise RlctlError(f"SGLang's class of this model cannot read {name} back")
            tensor = torch.tensor(values, dtype=torch.float32)
            if tuple(tensor.shape) != meta.shape:
                raise RlctlError(f"SGLang reads {name} back as {tuple(tensor.shape)}, and it was sent as {meta.shape}")
            found[name] = described(name, tensor.to(torch_dtype(meta.dtype)))
        return found

    def close(self) -> None:
        """Let go what syncs have mapped, and end the server, if this replica has started it."""
        self._dispatch.close()
        if self._process is not None:
            self._process.__exit__(None, None, None)
        self._loader.close()

    def _release(self, tags: Sequence[Tag], deadline: Deadline) -> None:
        fresh: list[Tag] = [tag for tag in tags if tag not in self._asleep]
        if fresh:
            self._server.ask(requests.release(fresh), deadline)
            self._asleep.update(fresh)

    def _restore(self, tags: Sequence[Tag], deadline: Deadline) -> None:
        asleep: list[Tag] = [tag for tag in tags if tag in self._asleep]
        if asleep:
            self._server.ask(requests.restore(asleep), deadline)
            self._asleep.difference_update(asleep)

    def _pause_behind(self) -> None:
        try:
            self._server.ask(requests.pause("retract"), Deadline(_FENCE_SECONDS))
        except RlctlError as error:  # it may go on computing with what it holds
            self._dispatch.fail(error)
