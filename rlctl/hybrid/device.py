"""One of the devices that both train and generate, while it generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from transformers import AutoConfig

from rlctl.hybrid.checkpoint_engine import ReshardEngine
from rlctl.hybrid.device_plan import rollout_layout, trainer_layout
from rlctl.hybrid.lora.making import adapter_engine
from rlctl.hybrid.sampler import RankSampler, Sampling, make_sampler
from rlctl.hybrid.tp.group import TensorGroup, replicas
from rlctl.hybrid.tp.weights import apart
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.model_spec import ModelSpec
from rlctl.rollout.base import Output, Request
from rlctl.rollout.on_ranks import RankRolloutSetup, Seat, Switched
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.protocols import AdapterShardSource, MasterSource, ShardSource, WeightSource
from rlctl.sync.slicing import Layouts

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HybridDevice:
    """See ``RankRollout``. All ranks make one; ``torch.distributed`` is set up where there are several.

    Raises:
        UsageError: the sampler does not know the model, or it cannot be cut into so many parts.
    """

    def __init__(self, setup: RankRolloutSetup) -> None:
        config = AutoConfig.from_pretrained(setup.source, trust_remote_code=setup.trust_remote_code)
        dtype, self._emptied = _DTYPES[setup.dtype], setup.offload_params
        rank = dist.get_rank() if dist.is_initialized() else 0
        layouts = Layouts.of_model(
            ModelSpec.from_config(config.to_dict()),
            trainer_layout(setup.ranks, setup.trainer_tp),
            rollout_layout(setup.engine, 1, setup.replica_tp, pad=setup.pad),
            dtype=dtype_code(dtype),
        )
        options = EngineOptions(
            timeout=setup.timeout,
            verify=setup.verify,
            device=setup.device,
            layouts=layouts,
            extras={
                "replicas": setup.replicas,
                "devices_per_node": setup.devices_per_node,
                "delta": setup.delta,
            },
        )
        member = Member("trainer", rank, setup.ranks)
        self._adapted = setup.adapter is not None
        make = ReshardEngine if setup.adapter is None else adapter_engine(setup.adapter, parked=self._emptied)
        self.checkpoint_engine = make(member, options)
        part = self.checkpoint_engine.part
        self.seat = Seat(*divmod(part, setup.replica_tp)) if part >= 0 else Seat(-1, -1)
        ranks, tp = self.checkpoint_engine.plan.placement.rollout, setup.replica_tp
        how = Sampling(
            setup.engine,
            tp,
            setup.dtype,
            setup.max_slots,
            setup.max_length,
            setup.device,
            setup.timeout,
            pad=setup.pad,
        )
        # vLLM makes its groups itself.
        group = TensorGroup(None if setup.engine == "vllm" else replicas(ranks, tp))
        self._engine = make_sampler(config, how, ranks, group)

    def switch(self, source: WeightSource, version: int) -> Switched:
        """See RankRollout."""
        engine = self.checkpoint_engine
        held = dict(_parts_of(source, adapted=self._adapted))
        engine.prepare()
        engine.init_process_group()
        try:
            stats = engine.send_weights(held.items(), version)
        finally:
            engine.finalize()
        if self._engine is not None:
            shards = apart(engine.shards, held.values()) if self._emptied else engine.shards
            self._engine.adopt(shards, version)
        return Switched(
            tensors=stats.tensors,
            sent=stats.bytes_moved,
            received=engine.report.received_bytes,
            seconds=stats.seconds,
            shard_bytes=sum(tensor.nbytes for tensor in engine.shards.values()),
            extra_bytes=engine.extra_nbytes,
            kept_bytes=engine.report.kept_bytes,
        )

    def wake(self) -> None:
        """See RankRollout."""
        if self._engine is not None:
            self._engine.wake(("kv_cache",))

    def sleep(self) -> None:
        """See RankRollout."""
        if self._engine is not None:
            self._engine.sleep(2)
        self.checkpoint_engine.release()

    def submit(self, requests: Sequence[Request]) -> None:
        """See RankRollout."""
        if requests:
            self._awake().submit(requests)

    def decode(self, ticks: int) -> list[Output]:
        """See RankRollout."""
        found: list[Output] = []
        if self._engine is not None:
            for _ in range(ticks):
                if not self._engine.num_running:
                    break
                found += self._engine.step()
        return found

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """See RankRollout."""
        return self._awake().generate(requests)

    def abort(self) -> list[Output]:
        """See RankRollout."""
        return [] if self._engine is None else self._engine.abort()

    def _awake(self) -> RankSampler:
        assert self._engine is not None, "this device does not generate"
        return self._engine


def _parts_of(source: WeightSource, *, adapted: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a rank holds, as it holds it where it can say so: what travels is cast before it does."""
    if adapted:
        assert isinstance(source, AdapterShardSource)
        return source.base_and_adapter()
    if isinstance(source, MasterSource):
        return source.local_masters()
    return source.local_params() if isinstance(source, ShardSource) else source.per_tensor_params()
