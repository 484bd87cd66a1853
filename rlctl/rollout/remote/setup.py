"""What a replica's process is told when it starts."""

from __future__ import annotations

from typing import Any

import msgspec


class ReplicaSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is made.

    Attributes:
        engine: name of the rollout engine, with what follows a colon.
        source: folder or hub name of the model; only its configuration is read, weights come by a sync.
        dtype: "float32" or "bfloat16".
        max_slots: most requests that are decoded at once.
        max_length: most tokens of prompt and response together.
        replica: its name, which is written into segments.
        token: of the run; what it shares with the checkpoint-engine workers.
        device: as torch names it.
        trust_remote_code: let the model's folder run its own code.
        tensor_parallel: devices that it spans, and processes that its weights are loaded into.
        threads: compute threads; 0 leaves it to the libraries.
        lockstep: it decodes when it is told to, by ``tick``, and not by itself.
        progress_ticks: decode steps between two reports of unfinished responses; what was made since the last is lost
            when the process dies.
        adapter: PEFT configuration of the adapters that come alone, after a base; None: syncs bring whole weights.
        vocab_size: number of token ids of the model; 0: not known. A request with others is refused where it is sent.
        options: further arguments of the engine.
    """

    engine: str
    source: str
    dtype: str
    max_slots: int
    max_length: int
    replica: str
    token: str
    device: str = "cpu"
    trust_remote_code: bool = False
    tensor_parallel: int = 1
    threads: int = 0
    lockstep: bool = False
    progress_ticks: int = 32
    adapter: dict[str, Any] | None = None
    vocab_size: int = 0
    options: dict[str, Any] = {}
