"""A process of a sync bench that holds a shard of the weights, and takes the whole of them in place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rlctl.hybrid.checkpoint_engine import ReshardEngine
from rlctl.ops.sync_bench_member import BenchHost
from rlctl.ops.sync_bench_workload import make
from rlctl.process import Channel
from rlctl.sync.boxes import slices
from rlctl.sync.host import serve_host
from rlctl.sync.member import described
from rlctl.sync.plan import Plan
from rlctl.sync.slicing import slice_name
from rlctl.sync.tensor_meta import TensorMeta


class DeviceHost(BenchHost):
    """One device; its ``weights`` are what it trains."""

    cancellable = BenchHost.cancellable | {"switch"}

    def meet(self, rank: int, world: int, meeting: str, timeout: float) -> None:
        """Find the other devices through the file ``meeting``."""
        store = FileStore(meeting, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))

    def hold(self, seed: int) -> None:
        """Take this device's shards, of random bits."""
        plan, rank = self._plan(), self.engine.member.rank
        metas = []
        for weight in plan.weights:
            box = next((s.box for s in plan.train.shares(weight) if rank in s.ranks), None)
            if box is not None:
                metas.append(TensorMeta(weight.name, weight.dtype, tuple(high - low for low, high in box)))
        self.weights = make(metas, seed + rank)

    def switch(self, version: int) -> int:
        """Take what is lacking; return the bytes of what the device generates with then."""
        engine = self._reshard()
        try:
            engine.send_weights(self.weights.items(), version)
        finally:
            engine.finalize()
        return sum(tensor.nbytes for tensor in engine.shards.values())

    def train(self) -> None:
        """Go back to training: what was taken is let go."""
        self._reshard().release()

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return slice -> [dtype, shape, digest] of what is trained here, and of what is generated with."""
        plan, engine = self._plan(), self._reshard()
        trained = {
            slice_name(t.tensor, t.box): described("", self.weights[t.src_tensor][slices(t.src_box)].contiguous())
            for t in plan.transfers(src=engine.member.rank)
        }
        generated = {}
        if engine.part >= 0:
            generated = {
                slice_name(t.tensor, t.box): described("", engine.shards[t.dst_tensor][slices(t.dst_box)].contiguous())
                for t in plan.transfers(dst=engine.part)
            }
        return {"trained": trained, "generated": generated}

    def _reshard(self) -> ReshardEngine:
        assert isinstance(self.engine, ReshardEngine)
        return self.engine

    def _plan(self) -> Plan:
        return self._reshard().plan


def serve(channel: Channel) -> None:
    """Entry point of the process."""

    serve_host(channel, DeviceHost())
