"""A program: a tiny FSDP2 job that saves its weights as a DCP folder and as per-rank files of DTensors.

Usage: save_sharded.py FOLDER. Two processes meet over gloo through a file in FOLDER; four more play the ranks
of a (data 2, tensor 2) mesh on torch's fake process group, which needs no meeting.
"""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DATA, TENSOR = 2, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8, dtype=torch.bfloat16)
        self.down = nn.Linear(8, 5, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3)  # does not divide by the ranks
        self.one = nn.Linear(4, 1, bias=False)  # fewer rows than ranks
        self.register_buffer("steps", torch.tensor([3, 4], dtype=torch.int64))


def model() -> Model:
    torch.manual_seed(7)
    return Model()


def with_gloo(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=DATA)
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (DATA,)))
    dcp.save({"model": sharded.state_dict(), "step": 11}, checkpoint_id=folder / "dcp2")
    torch.save(sharded.state_dict(), folder / f"model_world_size_{DATA}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def with_fake_group(rank: int, folder: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=DATA * TENSOR)
    mesh = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("dp", "tp"))
    sharded = model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(sharded, mesh["tp"], plan, src_data_rank=None)
    fully_shard(sharded, mesh=mesh["dp"])
    torch.save(sharded.state_dict(), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def in_child(run: Callable[[int, Path], None], rank: int, folder: Path) -> int:
    """Run in a forked process, which has all imports already, and return its id. No thread runs yet."""
    child = os.fork()
    if child == 0:
        run(rank, folder)
        os._exit(0)
    return child


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder = Path(sys.argv[1])
    (folder / "mesh").mkdir()
    torch.save(model().state_dict(), folder / "full.pt")
    children = [in_child(with_fake_group, rank, folder / "mesh") for rank in range(DATA * TENSOR)]
    children.append(in_child(with_gloo, 1, folder))
    with_gloo(0, folder)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)


if __name__ == "__main__":
    main()
