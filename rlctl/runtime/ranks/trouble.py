"""What is known of ranks when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.runtime.ranks.messages import Report


@dataclass
class Trouble:
    """Those that are gone, what failed ones say, those that have not answered."""

    gone: set[int] = field(default_factory=set)
    failed: dict[int, Report] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    @property
    def told(self) -> bool:
        """Whether a rank has said what is wrong, and not only that it waits for others."""
        return any(not report.waiting and report.error and report.error.kind for report in self.failed.values())
