"""vLLM as the rollout engine of one rank: its scheduler and its worker in this process, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.hybrid.tp.group import naming
from rlctl.hybrid.vllm.groups import ReplicaGroups
from rlctl.hybrid.vllm.parameters import RankParameters
from rlctl.hybrid.vllm.starting import described, engine_config, leave_as_found, prepare_process, start
from rlctl.rollout.base import WAKE_TAGS, Output, Request
from rlctl.rollout.embedded.admission import check_request
from rlctl.rollout.embedded.slots import Pending
from rlctl.rollout.finishing import outputs_of
from rlctl.rollout.vllm import kv_memory
from rlctl.rollout.vllm.asking import check_sampling, output_of, sampling
from rlctl.rollout.vllm.extension import decoded

if TYPE_CHECKING:
    from rlctl.hybrid.sampler import Sampling


class VllmSampler:
    """See ``RankSampler``. Every rank of the replica has an engine, and all take the same steps: what they decide is
    a function of the requests, and logits are gathered to the same bits everywhere.

    Args:
        config: of vLLM.
        groups: of the engine's ranks.
        rank, world: of the replica.
        replica: its name.
        how: see Sampling.
    """

    def __init__(
        self, config: Any, groups: ReplicaGroups, *, rank: int, world: int, replica: str, how: Sampling
    ) -> None:
        self._config, self._groups, self._replica = config, groups, replica
        self._naming = naming if world > 1 else lambda _: nullcontext()
        self._max_length = how.max_length
        self._asked: dict[str, Pending] = {}
        self._ended: list[Output] = []
        self._version: int | None = None
        self._served = False
        self._awake: set[str] = set(WAKE_TAGS)
        with self._computing("start"):
            self._engine = start(config, rank, how.device)
            self._worker = self._engine.model_executor.driver_worker.worker
            self._parameters = RankParameters(self._worker, rank, world)
            self._cuts = all(decoded(said) for said in self._engine.collective_rpc("rlctl_log_before_cuts"))
        self._vocab = int(config.model_config.get_vocab_size())
        self.sleep(2)

    @property
    def version(self) -> int | None:
        """See RankSampler."""
        return self._version

    @property
    def num_running(self) -> int:
        """See RankSampler."""
        return len(self._asked) + len(self._ended)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the worker holds."""
        return self._parameters.nbytes

    def adopt(self, shards: Mapping[str, Tensor], version: int) -> None:
        """See RankSampler. Keys and values of other weights are dropped: what runs is computed again."""
        self._version = None
        self._forget()
        with self._computing("adopt"):
            if not self._on_cpu and "weights" not in self._awake:
                self._worker.wake_up(["weights"])
            self._parameters.take(shards)
            self._engine.set_weight_version(str(version))
        self._awake.add("weights")
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """See RankSampler. Raises UsageError (and takes none) when one cannot be served."""
        taken = {pending.request.key for pending in self._asked.values()} | {output.key for output in self._ended}
        for request in requests:
            check_request(request, taken, vocab_size=self._vocab, max_length=self._max_length)
            check_sampling(request, cuts=self._cuts)
            taken.add(request.key)
        for request in requests:
            self._ask(Pending(request, list(request.prefix)))

    def step(self) -> list[Output]:
        """See RankSampler. Raises RlctlError while asleep, CollectiveError when another rank is gone."""
        found, self._ended = self._ended, []
        if self._asked:
            if self._awake != set(WAKE_TAGS):
                raise RlctlError("the engine is asleep", fix="give it weights, and wake its KV cache, first")
            # vLLM also draws from the process's own noise, whose numbers it then overwrites by those of the requests.
            with self._computing("a step of vLLM"), torch.random.fork_rng(devices=()):
                outputs = self._engine.step()
            found += [
                output_of(self._asked.pop(output.request_id), output.outputs[0], self._replica)
                for output in outputs
                if output.finished
            ]
        return found

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """See RankSampler. Outputs of other requests come by the next ``step``."""
        self.submit(requests)
        mine, others = outputs_of(requests, self.step)
        self._ended += others
        return mine

    def abort(self) -> list[Output]:
        """See RankSampler."""
        from vllm.v1.engine import FinishReason

        found, self._ended = self._ended, []
        processor = self._engine.output_processor
        for name, pending in self._asked.items():
            (state,) = [processor.request_states[inner] for inner in processor.external_req_ids[name]]
            ended = state.make_request_output([], None, FinishReason.ABORT, None)
            found.append(output_of(pending, ended.outputs[0], self._replica))
        if self._asked:
            with self._computing("abort"):
                self._engine.abort_request(list(self._asked))
        self._asked.clear()
        return found

    def sleep(self, level: int) -> None:
        """See RankSampler. On the CPU both levels free all that they say; on an accelerator vLLM's sleep mode does."""
        self._forget()
        with self._computing("sleep"):
            if level >= 2 and not self._on_cpu:
                self._worker.sleep(2)
            else:
                kv_memory.release(self._worker)
        self._awake.discard("kv_cache")
        if level >= 2:
            self._parameters.drop()
            self._version = None
            self._awake.discard("weights")
        kv_memory.trim()

    def wake(self, tags: Sequence[str]) -> None:
        """See RankSampler."""
        if "kv_cache" in tags and "kv_cache" not in self._awake:
            with self._computing("wake"):
                kv_memory.restore(self._worker)
            self._awake.add("kv_cache")

    @property
    def _on_cpu(self) -> bool:
        return bool(self._worker.device.type == "cpu")

    def _ask(self, pending: Pending) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        request = pending.request
        reason = pending.ended()
        if reason is not None:
            self._ended.append(Output(request.key, pending.segments, reason))
            return
        name = f"{request.key.ordinal}.{request.key.sample}.{request.key.turn}"
        params = SamplingParams(**sampling(pending), output_kind=RequestOutputKind.FINAL_ONLY)
        with self._computing("submit"):
            self._engine.add_request(name, tokens_input(list(pending.ids)), params)
        self._asked[name] = pending
        self._served = True

    def _forget(self) -> None:
        """Drop keys and values of all requests; what runs waits to be computed again."""
        if not self._served:
            return
        with self._computing("reset"):
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RlctlError("vLLM did not reset its prefix cache")
        self._served = bool(self._asked)

    @contextmanager
    def _computing(self, what: str) -> Iterator[None]:
        with self._groups.current(), self._naming(what):
            yield


def make_vllm_sampler(config: Any, how: Sampling, replicas: Sequence[Sequence[int]], number: int) -> VllmSampler | None:
    """See ``sampler.make_sampler``."""
    prepare_process(how.device)
    rank = dist.get_rank()
    ranks = list(replicas[number]) if number >= 0 else [rank]
    with leave_as_found(), described(config) as folder:
        vllm_config = engine_config(folder, how, world=len(ranks), replica=str(number))
        groups = ReplicaGroups(replicas, vllm_config, vllm_config.parallel_config.rank)
        if number < 0:
            return None
        return VllmSampler(vllm_config, groups, rank=ranks.index(rank), world=len(ranks), replica=str(number), how=how)
