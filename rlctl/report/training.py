"""What a training run shows while it runs and when it has ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlctl.experience.events import Checkpointed, Event, Noted, Signalled, StepEnded, Validated
from rlctl.report.curve import format_curve, format_sparkline
from rlctl.report.output import Report
from rlctl.report.panel import Panel
from rlctl.report.progress import Pace
from rlctl.units import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_SUMMARY_WIDTH = 80
_LABELS_IN_A_LINE = 6
_ETA_WINDOW = 20
_MIN_SHARE = 0.01
_TASKS = "tasks/"
# Metric of a step -> how it is shown.
_FIGURES = {
    "reward": ("reward", "{:.3f}"),
    "task_reward": ("task's", "{:.3f}"),
    "response_tokens": ("length", "{:.1f}"),
    "turns": ("turns", "{:.2f}"),
    "logprob_gap": ("gap", "{:.1e}"),
    "generate_tokens_per_s": ("generate", "{:.0f} tok/s"),
    "train_tokens_per_s": ("train", "{:.0f} tok/s"),
}


class TrainingView:
    """One training run on the screen: a live panel on a terminal, now and then a line elsewhere.

    Used in a ``with`` statement around the run, which tells it of its start (:meth:`begin`) and of every event
    (:meth:`on_event`); the command calls :meth:`summary` at the end.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._pace = Pace()
        self._panel: Panel | None = None
        self._steps = 0
        self._first_step = 1
        self._rewards: list[float] = []
        self._seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._said = True
        self._line = ""

    def begin(self, start: Mapping[str, Any]) -> None:
        """Say where the run lives and where it starts.

        Args:
            start: ``run_dir``, ``steps`` in all, ``step`` that the run goes on from (0: a new one).
        """
        self._steps = start["steps"]
        self._first_step = start["step"] + 1
        resumed = f", going on from step {start['step']}" if start["step"] else ""
        self._report.line(f"run folder {start['run_dir']}: {start['steps']} steps{resumed}")

    def on_event(self, event: Event) -> None:
        """Show one event of the run; most are none of a reader's business."""
        if isinstance(event, StepEnded):
            self._step(event.step, event.figures)
        elif isinstance(event, Validated):
            few = event.by_label if len(event.by_label) <= _LABELS_IN_A_LINE else {}
            labels = "".join(f", {label} {value:.3f}" for label, value in few.items())
            self._report.line(f"held-out accuracy after step {event.step}: {event.accuracy:.3f}{labels}")
        elif isinstance(event, Checkpointed):
            self._report.detail(f"checkpoint {event.name} saved in {format_duration(event.seconds)}")
        elif isinstance(event, Signalled):
            self._report.line(f"{event.name}: saving a checkpoint at the end of this step; once more to stop at once")
        elif isinstance(event, Noted):
            self._report.warn(event.message)

    def _step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rewards.append(metrics.get("reward", math.nan))
        self._seconds.append(metrics.get("seconds", 0.0))
        left = max(0, self._steps - step) * sum(self._seconds) / len(self._seconds)
        figures = step_figures(metrics)
        self._line = "  ".join(
            [f"step {step}/{self._steps}", *(f"{n} {v}" for n, v in figures), f"eta {format_duration(left)}"]
        )
        if self._panel is not None:
            self._panel.draw(self._picture(step, figures, left))
            self._said = False
            return
        first = len(self._rewards) == 1
        self._said = self._pace.due(step / max(1, self._steps)) or first or self._report.verbosity > 0
        if self._said:
            self._report.line(self._line)

    def summary(self, result: Mapping[str, Any], commands: Sequence[str] = ()) -> None:
        """Print the end of a run for people (nothing under ``--json``; the document is the command's to print).

        Args:
            result: the document of the run: ``run_dir``, ``steps``, ``seconds``, ``reward`` (``first``, ``last``,
                ``curve``), ``tasks`` (name -> ``prompts``, ``reward``), ``eval`` (``before``, ``after``,
                ``by_label``), ``samples_per_s``, ``tokens_per_s``, and what ``ops.mode_results`` gives.
            commands: what to run next.
        """
        report, reward = self._report, result["reward"]
        report.text(
            f"\n{result['steps']} steps in {format_duration(result['seconds'])}: "
            f"reward {_number(reward['first'])} -> {_number(reward['last'])}, "
            f"{_number(result['samples_per_s'], '.3g')} samples/s, {_number(result['tokens_per_s'], '.4g')} tokens/s"
        )
        if figures := _mode_figures(result):
            report.text(figures)
        if reward["curve"]:
            width = min(_SUMMARY_WIDTH, report.out_terminal.width)
            unicode = report.out_terminal.unicode
            report.text("\n" + format_curve(reward["curve"], title="reward by step", width=width, unicode=unicode))
        # A run that another release finished may have none.
        if tasks := result.get("tasks"):
            rows = [
                [name, str(found["prompts"]), *(_number(found["reward"][side]) for side in ("first", "last"))]
                for name, found in tasks.items()
            ]
            report.text("")
            report.table(["task", "prompts", "reward first", "last"], rows)
        evaluation = result["eval"]
        if evaluation["after"] is not None:
            rows = [["all", evaluation["before"], evaluation["after"]]]
            rows += [[label, side["before"], side["after"]] for label, side in evaluation["by_label"].items()]
            report.text("")
            report.table(
                ["held-out accuracy", "before", "after"], [[name, *map(_number, sides)] for name, *sides in rows]
            )
        report.text(f"\nrun folder: {result['run_dir']}")
        if commands:
            report.text("next:\n" + "".join(f"  {line}\n" for line in commands))

    def __enter__(self) -> Self:
        if self._report.moving:
            self._panel = self._report.panel().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._panel is not None:
            self._panel.__exit__(kind, error, trace)
            self._panel = None
        if not self._said:
            # The panel is gone, or the last line was long ago: say where the run ended.
            self._report.line(self._line)
            self._said = True

    def _picture(self, step: int, figures: Sequence[tuple[str, str]], left: float) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        terminal = self._report.err_terminal
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(max(1, self._steps), step, width=30)
        head.add_row("step    ", f"{step}/{self._steps}", bar, f"{format_duration(left)} left")
        spark = format_sparkline(self._rewards, width=max(10, terminal.width - 20), unicode=terminal.unicode)
        return Group(head, *(Text(f"{name:<8} {value}") for name, value in [*figures, ("course", spark)]))


def step_figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return what to show of a step's metrics, as pairs of label and text; what is not known is left out."""
    figures = [
        (label, shape.format(metrics[key])) for key, (label, shape) in _FIGURES.items() if metrics.get(key) is not None
    ]
    for key, value in metrics.items():
        if key.startswith(_TASKS) and key.endswith("/reward"):
            figures.append((key[len(_TASKS) :].removesuffix("/reward"), f"{value:.3f}"))
    spent = {key.removeprefix("seconds_"): value for key, value in metrics.items() if key.startswith("seconds_")}
    total = sum(spent.values())
    shares = [f"{name} {value / total:.0%}" for name, value in spent.items() if total and value / total >= _MIN_SHARE]
    return [*figures, ("time", " ".join(shares))] if shares else figures


def _mode_figures(result: Mapping[str, Any]) -> str:
    """Return the line on staleness, bubbles and syncs; empty for a run that another release finished."""
    if "staleness" not in result:
        return ""
    stale, bubble, sync = result["staleness"], result["bubble"], result["sync"]
    return (
        f"{result['mode']}: staleness {_number(stale['mean'], '.2f')} (at most {_number(stale['max'], '.0f')}), "
        f"idle: trainer {_number(bubble['trainer'], '.0%')}, rollout {_number(bubble['rollout'], '.0%')}, "
        f"{sync['count']} syncs in {format_duration(sync['seconds'])} "
        f"(rollouts stood still for {format_duration(sync['stall_seconds'])})"
    )


def _number(value: float | None, shape: str = ".3f") -> str:
    return "-" if value is None else format(value, shape)
