"""vLLM's AsyncLLM as what a replica's process hosts: its engine core is a child of this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.admission import check_request
from rlctl.rollout.embedded.slots import Pending
from rlctl.rollout.vllm.asking import check_sampling, output_of, sampling
from rlctl.rollout.vllm.engine_process import end_tasks, remove_shared_memory, start_engine, wait_for_end
from rlctl.rollout.vllm.environment import set_environment
from rlctl.rollout.vllm.handles import AsyncLLMHandle
from rlctl.rollout.vllm.names import ADAPTER, ADAPTER_ID
from rlctl.rollout.vllm.read_back import whole_digests
from rlctl.rollout.vllm.replica import VllmReplica
from rlctl.rollout.vllm.starting import engine_arguments, require_vllm
from rlctl.sync.deadline import Deadline
from rlctl.sync.protocols import Interruption

if TYPE_CHECKING:
    from rlctl.rollout.remote.setup import ReplicaSetup
    from rlctl.sync.worker_process import Loader

T = TypeVar("T")

# A step while requests run lasts this long at most, in seconds: their progress is told every so many steps.
_TICK = 0.1


class VllmServed:
    """``Served`` by vLLM. Requests are taken before the first sync too, and wait for it.

    Args:
        setup: of the replica.

    Raises:
        UnavailableError: there is no vLLM, or none for this device.
        UsageError: lockstep is asked for, or an option that there is not.
        RlctlError: the engine did not start.
    """

    def __init__(self, setup: ReplicaSetup) -> None:
        if setup.lockstep:
            raise UsageError(
                "vLLM decodes by itself, and run.deterministic=true needs an engine that decodes when it is told to",
                where="rollout.engine",
                fix="set rollout.engine=transformers, or run.deterministic=false",
            )
        set_environment(
            os.environ, source=setup.source, device=setup.device, tensor_parallel=setup.tensor_parallel,
            threads=setup.threads, token=setup.token,
        )  # fmt: skip
        require_vllm()
        arguments = engine_arguments(setup)
        self._max_length = setup.max_length
        self._changed = threading.Condition()
        self._asked: dict[RequestKey, Pending] = {}
        self._tasks: dict[RequestKey, asyncio.Task[None]] = {}
        self._ended: list[Output] = []
        self._fault: RlctlError | None = None
        self._closing = False
        self._loop = asyncio.new_event_loop()
        # The engine core ends with the thread that started it, so this one lasts as long as the replica.
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            self._engine = self._run(start_engine(arguments), Deadline(600.0))
        except Exception as error:
            self._stop_loop()
            raise RlctlError(
                f"vLLM did not start: {type(error).__name__}: {error}", fix="its own words are in the replica's log"
            ) from error
        self._vocab = int(self._engine.model_config.get_vocab_size())
        self._handle = AsyncLLMHandle(self._engine, self._loop)
        self._replica = VllmReplica(self._handle, setup.replica)
        deadline = Deadline(60.0)
        self._handle.pause("keep", deadline)
        remove_shared_memory(set(self._handle.call("rlctl_shared_memory", (), deadline)))
        self._lora: Any = None
        if setup.adapter is not None:
            from vllm.lora.request import LoRARequest

            self._handle.call("rlctl_expect_adapters", (msgspec.json.encode(setup.adapter),), deadline)
            self._lora = LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER)  # a sync has brought it before anything runs
        self._cuts = all(self._handle.call("rlctl_log_before_cuts", (), deadline))
        self._watcher = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
        self._watcher.start()

    # --- Served ---

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self._replica.replica

    @property
    def serving(self) -> int | None:
        """See Served."""
        return self._replica.serving if self._fault is None else None

    @property
    def loaders(self) -> Sequence[Loader]:
        """See Served: one for each of vLLM's workers."""
        return self._replica.loaders

    @property
    def num_running(self) -> int:
        """See Served."""
        with self._changed:
            return len(self._asked) + len(self._ended)

    def submit(self, requests: Sequence[Request]) -> None:
        """See Served."""
        for request in requests:
            pending = Pending(request, list(request.prefix))
            with self._changed:
                try:
                    taken = self._asked.keys() | {output.key for output in self._ended}
                    check_request(request, taken, vocab_size=self._vocab, max_length=self._max_length)
                    check_sampling(request, cuts=self._cuts)
                except UsageError as error:
                    self._fault = self._fault or error
                    self._changed.notify_all()
                    return
                reason = pending.ended()
                if reason is not None:
                    self._ended.append(Output(request.key, pending.segments, reason))
                    self._changed.notify_all()
                    continue
                self._asked[request.key] = pending
            self._loop.call_soon_threadsafe(self._ask, pending)

    def step(self, timeout: float = 0.0) -> list[Output]:
        """See Served; vLLM decodes by itself. Raises RlctlError, at once, when its engine is gone."""
        with self._changed:
            if self._asked:
                timeout = min(timeout, _TICK)
            self._changed.wait_for(lambda: bool(self._ended) or self._fault is not None, timeout)
            if self._fault is not None:
                raise self._fault
            ended, self._ended = self._ended, []
            return ended

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """See Served."""
        return self._run(self._so_far(), Deadline(30.0))

    def abort(self, keys: Iterable[RequestKey] | None, deadline: Deadline) -> None:
        """See Served."""
        with self._changed:
            wanted = list(self._asked if keys is None else keys)
        self._run(self._abort(wanted), deadline)

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See Served. Requests under way are computed again from their tokens after waking."""
        self._replica.interrupt("keep", -1, deadline)
        self._handle.drop_cache(deadline)
        self._handle.call("rlctl_sleep", (level,), deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See Served."""
        self._handle.call("rlctl_wake", (list(tags),), deadline)

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See Served."""
        wanted = None if names is None else list(names)
        found: dict[str, list[Any]] = {}
        if len(self.loaders) > 1:
            targets = self.loaders[0].targets()
            whole = [name for name in targets if wanted is None or name in wanted]
            found = whole_digests(self._handle, targets, whole, deadline)
            wanted = [] if wanted is None else [name for name in wanted if name not in targets]  # all workers have them
        if wanted is None or wanted:
            found |= self._handle.call("rlctl_digests", (wanted,), deadline)[0]
        return found

    def close(self) -> None:
        """See Served."""
        if self._closing:
            return
        self._closing = True
        self._engine.shutdown(timeout=0.0)
        self._engine.shutdown = lambda: None  # what it calls once more when it is collected, maybe too late to work
        self._watcher.join(5.0)
        self._stop_loop()

    # --- ServedReplica ---

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._replica.interrupt(how, version, deadline)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._replica.release_kv(deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._replica.restore_kv(deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._replica.resume(version, deadline)

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self._replica.fence(reason)

    # --- on the event loop ---

    def _ask(self, pending: Pending) -> None:
        self._tasks[pending.request.key] = self._loop.create_task(self._answer(pending))

    async def _answer(self, pending: Pending) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        key = pending.request.key
        params = SamplingParams(**sampling(pending), output_kind=RequestOutputKind.FINAL_ONLY)
        last: Any = None
        try:
            async for output in self._engine.generate(
                tokens_input(list(pending.ids)), params, _name(key), lora_request=self._lora
            ):
                last = output
            ended = output_of(pending, last.outputs[0], self.replica)
        except EngineDeadError:
            return  # who watches the process says so
        except Exception as error:  # noqa: BLE001 - whatever it is, this response will not come
            self._fail(RlctlError(f"vLLM failed on request {tuple(key)}: {type(error).__name__}: {error}"))
            return
        finally:
            del self._tasks[key]
        with self._changed:
            del self._asked[key]
            self._ended.append(ended)
            self._changed.notify_all()

    async def _abort(self, keys: Sequence[RequestKey]) -> None:
        # Again, for one that had not reached the engine yet.
        while tasks := [self._tasks[key] for key in keys if key in self._tasks]:
            await self._engine.abort([_name(key) for key in keys if key in self._tasks])
            await asyncio.wait(tasks, timeout=0.05)

    async def _so_far(self) -> dict[RequestKey, list[Segment]]:
        from vllm.v1.engine import FinishReason

        processor = self._engine.output_processor
        found = {}
        for key, pending in list(self._asked.items()):
            states = [processor.request_states.get(name) for name in processor.external_req_ids.get(_name(key), ())]
            for state in filter(None, states):  # what an abort would return now
                output = state.make_request_output([], None, FinishReason.ABORT, None)
                found[key] = output_of(pending, output.outputs[0], self.replica).segments
        return found

    # --- the engine's life ---

    def _run(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(deadline.remaining)
        except TimeoutError as error:
            future.cancel()
            raise deadline.error("vLLM's event loop") from error

    def _watch(self) -> None:
        how = wait_for_end(self._engine)
        if not self._closing:
            self._fail(RlctlError(f"vLLM's engine process of replica {self.replica} is gone ({how})"))

    def _fail(self, fault: RlctlError) -> None:
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(end_tasks(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)


def _name(key: RequestKey) -> str:
    return f"{key.ordinal}.{key.sample}.{key.turn}"
