"""One GPU that trains and generates in turn: what sleeps gives its memory back, nothing grows, no bit changes.

    PYTHONPATH=. python benchmarks/gpu_check_hybrid.py [--cycles 20] [--out result.json]

One GPU and four minutes do. The model is trained by FSDP2 in float32 and generates in bfloat16, once with the
allocator's usual segments and once with expandable ones, each in a process of its own. Prints one JSON document with
device, versions, the memory timeline and the checks. Exit 0 when all hold, 4 when one does not, 3 without a GPU.
Switches between several devices need several: they are not checked here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlctl.algorithms.objective import Objective
from rlctl.errors import EXIT_CHECK, EXIT_UNAVAILABLE
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.hybrid.device import HybridDevice
from rlctl.model.base import LossSpec
from rlctl.model.fsdp2.engine import Fsdp2Engine
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.on_ranks import RankRolloutSetup
from rlctl.schema.training import OptimizerConfig

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 32000,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
SEGMENTS = {"usual": "", "expandable": "expandable_segments:True"}
PROMPTS, NEW_TOKENS, LENGTH = 16, 32, 512
SECONDS = 100.0
# Share of the weights by which what is held after a sleep may differ: small buffers of libraries come with first use.
SLACK = 0.02


class Timeline:
    """Device memory at named moments, in bytes; zeros on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")
        self.moments: list[dict[str, Any]] = []

    def mark(self, moment: str) -> int:
        """Note the memory now; return what is allocated."""
        found = {"allocated": 0, "reserved": 0, "peak": 0}
        if self.on_gpu:
            torch.cuda.synchronize()
            found = {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "peak": torch.cuda.max_memory_allocated(),
            }
            torch.cuda.reset_peak_memory_stats()
        self.moments.append({"moment": moment, **found})
        return found["allocated"]


def requests() -> list[Request]:
    """Greedy ones, always the same."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    return [Request(RequestKey(n, 0), (1 + n, 2, 3, 4), params, 0) for n in range(PROMPTS)]


def rows() -> list[Row]:
    """What one step trains."""
    made = []
    for n in range(8):
        ids, zeros = list(range(5 + n, 37 + n)), np.zeros(32, np.float32)
        advantages = np.full(32, 1.0 if n % 2 else -1.0, np.float32)
        row = Row(RequestKey(n, 0), n, [1, 2, 3], ids, 0.0, zeros, np.zeros(32, np.int64))
        row.old_logprobs, row.advantages = zeros, advantages
        made.append(row)
    return made


def cycles(folder: str, device: str, dtype: str, count: int) -> dict[str, Any]:
    """Train a step, then switch to generation and back ``count`` times; the process group is there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    world, time_line = dist.get_world_size(), Timeline(device)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    training = Fsdp2Engine(model, OptimizerConfig(), dtype=dtype, micro_batch_tokens=1024, device=device)
    tp = 2 if world % 2 == 0 else 1
    devices = HybridDevice(
        RankRolloutSetup(
            engine="transformers",
            source=folder,
            trust_remote_code=False,
            dtype=dtype,
            device=device,
            ranks=world,
            trainer_tp=1,
            replicas=world // tp,
            replica_tp=tp,
            devices_per_node=world,
            max_slots=PROMPTS,
            max_length=LENGTH,
            offload_params=False,
            timeout=60.0,
            verify="full",
        )
    )  # fmt: skip
    training.update(rows(), LossSpec(Objective("ppo_clip"), "token-mean", horizon=LENGTH))
    before, digest = time_line.mark("trained"), training.params_digest()
    first: list[list[int]] = []
    seconds, after, same = [], [], True
    shard_bytes = sent = 0
    for version in range(count):
        start = time.perf_counter()
        switched = devices.switch(training, version)
        time_line.mark("switched")
        seconds.append(time.perf_counter() - start)
        shard_bytes, sent = switched.shard_bytes, switched.sent
        devices.wake()
        time_line.mark("cache awake")
        tokens = [output.token_ids for output in devices.generate(requests())]
        first = first or tokens
        same = same and tokens == first
        time_line.mark("generated")
        devices.sleep()
        after.append(time_line.mark("asleep"))
    untouched = training.params_digest() == digest
    training.update(rows(), LossSpec(Objective("ppo_clip"), "token-mean", horizon=LENGTH))
    time_line.mark("trained again")
    return {
        "switch_s": seconds, "shard_bytes": shard_bytes, "sent_bytes": sent, "timeline": time_line.moments,
        "checks": {
            "tokens stay": same,
            "training is not touched": untouched,
            "training goes on": training.updates == 2 and training.params_digest() != digest,
            "sleep gives memory back": after[-1] - before <= SLACK * shard_bytes,
            "nothing grows": after[-1] <= after[min(1, count - 1)] + SLACK * shard_bytes,
            "one device moves nothing": world > 1 or sent == 0,
        },
    }  # fmt: skip


def child(folder: str, count: int) -> None:
    """One process of the check: prints its document."""
    meeting = dist.FileStore(str(Path(folder, "store")), 1)  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=meeting, rank=0, world_size=1)
    print(json.dumps(cycles(folder, "cuda:0", "bfloat16", count)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the document there, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check_hybrid: no CUDA device is visible, so nothing was run", file=sys.stderr)
        return EXIT_UNAVAILABLE
    if arguments.child:
        child(arguments.child, arguments.cycles)
        return 0
    found = {}
    for name, setting in SEGMENTS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            command = [sys.executable, __file__, "--child", folder, "--cycles", str(arguments.cycles)]
            env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        found[name] = json.loads(done.stdout) if done.returncode == 0 else {"checks": {"ran": False}}
        if done.returncode:
            print(done.stderr, file=sys.stderr)
    held = all(all(one["checks"].values()) for one in found.values())
    document = json.dumps(
        {
            "device": torch.cuda.get_device_name(0),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "held": held,
            "segments": found,
        },
        indent=1,
    )
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n")
    return 0 if held else EXIT_CHECK


if __name__ == "__main__":
    sys.exit(main())
