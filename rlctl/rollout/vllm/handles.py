"""A running vLLM engine as a weight sync needs it: ``LLM`` in this process, or ``AsyncLLM`` on its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rlctl.errors import RlctlError
from rlctl.rollout.vllm.extension import decoded
from rlctl.sync.deadline import Deadline
from rlctl.sync.protocols import Interruption


class EngineHandle(Protocol):
    """What VllmReplica does to an engine. Every call may take until ``deadline``."""

    def workers(self) -> int:
        """Return how many workers the engine has."""

    def call(self, method: str, arguments: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Run a method of ``WeightExtension`` on all workers; return what each answered, or raise its error."""

    def pause(self, how: Interruption, deadline: Deadline) -> None:
        """Stop computing: end the requests that run, wait for their end, or keep them. New ones wait."""

    def drop_cache(self, deadline: Deadline) -> None:
        """Forget every key and value; what runs is computed again from its tokens."""

    def resume(self, version: int, deadline: Deadline) -> None:
        """Compute again; outputs carry ``version`` from now on."""

    def hold(self) -> None:
        """Stop computing as soon as possible, without waiting for it."""


class LLMHandle:
    """vLLM's ``LLM``, a batch at a time: whoever generates does so within ``batch()``.

    A batch runs to its end, whatever the interruption asks for: ``LLM`` gives nothing of a request before that.

    Args:
        llm: with ``worker_extension_cls=names.EXTENSION``.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._changed = threading.Condition()
        self._paused = self._busy = False

    @contextmanager
    def batch(self, timeout: float | None = None) -> Iterator[Any]:
        """Lend the ``LLM`` for one batch, as soon as no sync is under way. Raises RlctlError after ``timeout`` s."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._paused and not self._busy, timeout):
                raise RlctlError("the engine does not serve: a weight sync is under way, or the last one fenced it")
            self._busy = True
        try:
            yield self._llm
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def workers(self) -> int:
        """See EngineHandle."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size)

    def call(self, method: str, arguments: Sequence[Any], deadline: Deadline) -> list[Any]:
        """See EngineHandle. With the engine in this process, the call itself cannot be ended by the deadline."""
        answers = self._llm.collective_rpc(method, timeout=deadline.remaining, args=tuple(arguments))
        return [decoded(answer) for answer in answers]

    def pause(self, how: Interruption, deadline: Deadline) -> None:
        """See EngineHandle."""
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._busy, deadline.remaining):
                raise deadline.error("waiting for the end of the batch that runs")

    def drop_cache(self, deadline: Deadline) -> None:
        """See EngineHandle."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RlctlError("vLLM did not reset its prefix cache")

    def resume(self, version: int, deadline: Deadline) -> None:
        """See EngineHandle."""
        self._llm.update_weight_version(str(version))
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def hold(self) -> None:
        """See EngineHandle."""
        with self._changed:
            self._paused = True


class AsyncLLMHandle:
    """vLLM's ``AsyncLLM``; requests of others may be under way.

    Args:
        engine: with ``worker_extension_cls=names.EXTENSION``.
        loop: the event loop that it runs on; calls come from other threads.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def workers(self) -> int:
        """See EngineHandle."""
        return int(self._engine.vllm_config.parallel_config.world_size)

    def call(self, method: str, arguments: Sequence[Any], deadline: Deadline) -> list[Any]:
        """See EngineHandle."""
        answers = self._run(
            lambda: self._engine.collective_rpc(method, timeout=deadline.remaining, args=tuple(arguments)),
            method,
            deadline,
        )
        return [decoded(answer) for answer in answers]

    def pause(self, how: Interruption, deadline: Deadline) -> None:
        """See EngineHandle."""
        self._run(lambda: self._engine.pause_generation(mode=how, clear_cache=True), f"pause ({how})", deadline)

    def drop_cache(self, deadline: Deadline) -> None:
        """See EngineHandle."""
        reset = self._run(
            lambda: self._engine.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache", deadline
        )
        if not reset:
            raise RlctlError("vLLM did not reset its prefix cache")

    def resume(self, version: int, deadline: Deadline) -> None:
        """See EngineHandle."""
        self._run(lambda: self._engine.update_weight_version(str(version)), "update_weight_version", deadline)
        self._run(self._engine.resume_generation, "resume_generation", deadline)

    def hold(self) -> None:
        """See EngineHandle."""
        asyncio.run_coroutine_threadsafe(self._engine.pause_generation(mode="keep", clear_cache=False), self._loop)

    def _run(self, start: Callable[[], Coroutine[Any, Any, Any]], what: str, deadline: Deadline) -> Any:
        future = asyncio.run_coroutine_threadsafe(start(), self._loop)
        try:
            return future.result(deadline.remaining)
        except TimeoutError as error:
            future.cancel()
            raise deadline.error(f"vLLM's {what}") from error
