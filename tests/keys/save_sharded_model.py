"""A program: a tiny model as training leaves it: a DCP folder of a whole state, and files of every rank's DTensors.

Usage: python -m tests.keys.save_sharded_model FOLDER. The ranks of a (data 2, tensor 2) mesh are played one after the
other on torch's fake process group.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.keys.tiny_models import save

PLAN = {
    **dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ColwiseParallel()),
    **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
    **dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], RowwiseParallel()),
}


def play(rank: int, model: torch.nn.Module, folder: Path) -> None:
    """Save what one of four ranks holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN, src_data_rank=None)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    torch.save(model.state_dict(), folder / f"model_world_size_4_rank_{rank}.pt")


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model = save("qwen3", folder / "hf", tie_word_embeddings=True)
    (folder / "ranks").mkdir()
    children = []
    for rank in range(4):
        child = os.fork()  # the imports are done, and no thread runs yet
        if child == 0:
            play(rank, model, folder / "ranks")
            os._exit(0)
        children.append(child)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    state = {"model": {f"_orig_mod.{n}": t for n, t in model.state_dict().items()}, "optim": {"step": torch.ones(3)}}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)


if __name__ == "__main__":
    main()
