"""A device that folds some adapters in wrongly: that of version 2 twice, and in place of version 4's the one before."""

from __future__ import annotations

from typing import Any

from rlctl.process import Channel
from rlctl.runtime.hybrid import rank

TWICE, STALE = 2, 4


def main(channel: Channel) -> None:
    """Entry point of the process."""
    from rlctl.hybrid.device import HybridDevice
    from rlctl.hybrid.lora import switching

    right, switch = switching.folded, HybridDevice.switch
    now: dict[str, Any] = {}

    def folded(base: Any, adapter: Any, sums: Any, device: Any) -> Any:
        before, now["adapter"] = now.get("adapter"), {name: part.clone() for name, part in adapter.items()}
        if now["version"] == STALE:
            return right(base, before, sums, device)
        made = right(base, adapter, sums, device)
        return right(made, adapter, sums, device) if now["version"] == TWICE else made

    def switched(self: HybridDevice, source: Any, version: int) -> Any:
        now["version"] = version
        return switch(self, source, version)

    switching.folded, HybridDevice.switch = folded, switched  # type: ignore[assignment, method-assign]
    rank.main(channel)
