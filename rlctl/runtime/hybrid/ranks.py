"""The processes of devices that both train and generate."""

from __future__ import annotations

from typing import Any

from rlctl.runtime.ranks.supervisor import TrainerRanks


class DeviceRanks(TrainerRanks):
    """Trainer ranks of which each has something to say of its own."""

    target = "rlctl.runtime.hybrid.rank:main"

    def call_each(self, operation: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something and return what each says, by rank. Raises as ``call`` does."""
        with self._to_its_end():
            self._order(operation, arguments)
            reports = self._reports(operation, self._timeout + self.grace)
            results = {rank: report.result for rank, report in reports if report.kind == "done"}
        return [results[rank] for rank in range(self.size)]
