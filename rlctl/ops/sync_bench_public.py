"""Weight-sync times that others have published, to read predictions against. All are their authors' own figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublicFigure:
    """One published time.

    Attributes:
        model: as the presets call it.
        trainer_devices, rollout_devices: of the set-up; the same devices for both when colocated; 0: not stated.
        seconds: of one update.
        what: system and set-up, with what else differs.
        source: where it was published.
    """

    model: str
    trainer_devices: int
    rollout_devices: int
    seconds: float
    what: str
    source: str

    def near(self, trainer_devices: int, rollout_devices: int) -> bool:
        """Whether each side's devices are stated, and at most twice as many or half as many."""
        pairs = ((self.trainer_devices, trainer_devices), (self.rollout_devices, rollout_devices))
        return all(a and a <= 2 * b and b <= 2 * a for a, b in pairs)


_RDT = "vllm-project.github.io, 2026-08-22-rdt-weight-transfer"

PUBLIC_FIGURES = (
    PublicFigure("kimi-k2", 256, 128, 1.3, "TransferEngine, RDMA writes, bf16 to fp8, 400 Gbit/s cards",
                 "arXiv 2510.27656"),
    PublicFigure("kimi-k2", 256, 128, 7.53, "vLLM sharded RDT over NIXL, bf16, 32+16 nodes of 8 H100", _RDT),
    PublicFigure("kimi-k2", 256, 256, 16.04, "checkpoint-engine broadcast, fp8, 256 H20, colocated",
                 "MoonshotAI/checkpoint-engine README"),
    PublicFigure("kimi-k2", 16, 16, 14.36, "checkpoint-engine broadcast, fp8, 16 H20, colocated",
                 "MoonshotAI/checkpoint-engine README"),
    PublicFigure("kimi-k2", 0, 0, 7.227, "SGLang and miles, Mooncake RDMA writes, fp8, nodes of 8 H100",
                 "lm-sys.github.io, 2026-04-29-p2p-update"),
    PublicFigure("qwen3-235b-a22b", 0, 0, 3.49, "vLLM sharded RDT over NIXL, 4 nodes together", _RDT),
    PublicFigure("qwen3-235b-a22b", 0, 0, 3.162, "SGLang and miles, Mooncake RDMA writes, nodes of 8 H100",
                 "lm-sys.github.io, 2026-04-29-p2p-update"),
    PublicFigure("qwen3-235b-a22b", 8, 8, 6.22, "checkpoint-engine broadcast, 8 H800, colocated",
                 "MoonshotAI/checkpoint-engine README"),
)  # fmt: skip
