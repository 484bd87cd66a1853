"""vLLM's executor of a rank: one worker, in this process, whose peers run the same engine on the same requests.

It is the way of vLLM's ``external_launcher``, less what that takes from a launcher: the environment (``RANK``), and
collectives over all ranks, of which here only those of the replica take part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class RankExecutor(UniProcExecutor):
    """See above."""

    rank = local_rank = 0

    @classmethod
    def of(cls, rank: int, local_rank: int) -> type[RankExecutor]:
        """Return the class for ``rank`` of a replica, on device ``local_rank`` of those that the process sees."""
        return type("RankExecutor", (cls,), {"rank": rank, "local_rank": local_rank})

    def _distributed_args(self) -> tuple[str, int, int]:
        return "env://", self.rank, self.local_rank  # the groups are there: nobody has to be met

    def determine_available_memory(self) -> list[int]:
        """Return the bytes for the KV cache: every rank takes what the one with the least can."""
        from vllm.distributed.parallel_state import get_tp_group

        (found,) = super().determine_available_memory()
        least = torch.tensor([found], dtype=torch.int64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return [int(least.item())]
