"""The processes of devices that both train and generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.runtime.ranks.supervisor import TrainerRanks

# A rank that waits in vain asks the others what they are at before it says so; what it says later is heard, too.
_NAMING = 0.5


class DeviceRanks(TrainerRanks):
    """Trainer ranks of which each has something to say of its own."""

    target = "rlctl.runtime.hybrid.rank:main"

    def switch(self, version: int, timeout: float) -> list[Any]:
        """Have all ranks come to their rollout layout, each within ``timeout`` seconds; return what each says. Raises
        ReshardError, which ranks that wait raise in time to name the one that they wait for, else as ``call`` does."""
        return self._each("switch", timeout + _NAMING, {"version": version})

    def call_each(self, operation: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something and return what each says, by rank. Raises as ``call`` does."""
        return self._each(operation, self._timeout + self.grace, arguments)

    def _each(self, operation: str, timeout: float, arguments: Mapping[str, Any]) -> list[Any]:
        with self._to_its_end():
            self._order(operation, arguments)
            reports = self._reports(operation, timeout)
            results = {rank: report.result for rank, report in reports if report.kind == "done"}
        return [results[rank] for rank in range(self.size)]
