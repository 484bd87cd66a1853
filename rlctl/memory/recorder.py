"""What each phase of a step really takes: a listener to a run's events that looks at a probe whenever one ends."""

from __future__ import annotations

from rlctl.experience.events import Event, Hook, ReplicaChanged, Stage, StepEnded, SyncPhase
from rlctl.memory.probes import Probe

_SYNC = {
    "wake_weights": "sync: wake weights",
    "load": "sync: load",
    "offload_trainer": "sync: offload trainer",
    "wake_kv": "wake KV cache",
}


class PhaseRecorder:
    """Collects the highest peak of each phase of the colocated modes in one process.

    The first step makes the optimizer's moments, so the phases of a step count from the second on; what lies before
    the first step is the phase "load".

    Args:
        probe: marked before anything was loaded.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._steps = 0
        self._loaded = False
        self._last = 0
        self.peaks: dict[str, int] = {}
        self.extras: dict[str, dict[str, int]] = {}

    def on_event(self, event: Event) -> None:
        """See a run's listeners."""
        if isinstance(event, Hook) and event.name == "on_init_end":
            self._file("load", self._probe.peak())
            self._loaded = True
        elif isinstance(event, SyncPhase) and event.phase in _SYNC:
            self._end(_SYNC[event.phase])
        elif isinstance(event, ReplicaChanged) and event.change == "slept":
            self._end("rollout")
            self._end("sample end", self._last)
        elif isinstance(event, Stage):
            self._stage(event.name)
        elif isinstance(event, StepEnded):
            self._steps = event.step
        self._last = self._probe.now()

    def before_optimizer(self) -> None:
        """An optimizer is about to step: the passes are over."""
        self._end("forward backward")

    def _stage(self, name: str) -> None:
        if name == "update_actor":
            self._end("optimizer step")
        elif name == "advantages":
            self._end("sleep", self._probe.now())
            self._probe.peak()

    def _end(self, phase: str, nbytes: int | None = None) -> None:
        if not self._loaded:
            return
        found = self._probe.peak() if nbytes is None else nbytes
        if self._steps:
            self._file(phase, found)

    def _file(self, phase: str, nbytes: int) -> None:
        if nbytes >= self.peaks.get(phase, 0):
            self.peaks[phase] = nbytes
            self.extras[phase] = self._probe.extras()
