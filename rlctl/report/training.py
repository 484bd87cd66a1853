"""What a training run shows while it runs and when it has ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlctl.report.curve import format_curve, format_sparkline
from rlctl.report.output import Report
from rlctl.report.panel import Panel
from rlctl.report.progress import Pace
from rlctl.units import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_SUMMARY_WIDTH = 80


class TrainingView:
    """One training run on the screen: a live panel on a terminal, now and then a line elsewhere.

    Used in a ``with`` statement around the run. The run calls :meth:`step` after each step and :meth:`event` for
    what happens besides; the command calls :meth:`summary` at the end.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._pace = Pace()
        self._panel: Panel | None = None
        self._rewards: list[float] = []
        self._first_step = 1
        self._last: Mapping[str, Any] = {}
        self._said = True

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one step.

        Args:
            metrics: ``step`` (from 1) and ``steps``; and where known ``reward`` (mean of the batch), ``length`` (mean
                tokens of a response), ``logprob_gap`` (between rollout and trainer), ``gen_tokens_per_s``,
                ``train_tokens_per_s``, ``time`` (phase -> seconds of this step), ``eta_s``.
        """
        if not self._rewards:
            self._first_step = int(metrics["step"])
        self._rewards.append(float(metrics.get("reward", math.nan)))
        self._last = metrics
        first = len(self._rewards) == 1
        if self._panel is not None:
            self._panel.draw(self._picture())
            self._said = False
        elif self._pace.due(metrics["step"] / max(1, metrics["steps"])) or first or self._report.verbosity > 0:
            self._report.line(describe_step(metrics))
            self._said = True
        else:
            self._said = False

    def event(self, text: str) -> None:
        """Say what happened besides the steps: a checkpoint, an evaluation, a rollout replica lost."""
        self._report.line(text)

    def summary(self, result: Mapping[str, Any]) -> None:
        """Print the end of a run for people (nothing under ``--json``; the document is the command's to print).

        Args:
            result: ``steps``, ``seconds``, ``reward`` ({"first", "last"}: means of the first and last steps),
                ``samples_per_s``, ``tokens_per_s``, ``run_dir``; and where known ``eval`` ({"before", "after"}: each
                a number, or {"overall": number, "groups": {name: number}}), ``rewards`` (of every step, also those
                before a resume; else the steps seen here), ``notes`` (lines) and ``next`` (useful command lines).
        """
        report = self._report
        reward = result["reward"]
        report.text(
            f"\n{result['steps']} steps in {format_duration(result['seconds'])}: "
            f"reward {_number(reward['first'])} -> {_number(reward['last'])}, "
            f"{result['samples_per_s']:.3g} samples/s, {result['tokens_per_s']:.4g} tokens/s"
        )
        rewards: Sequence[float] = result.get("rewards") or self._rewards
        if rewards:
            first = 1 if result.get("rewards") else self._first_step
            width = min(_SUMMARY_WIDTH, report.out_terminal.width)
            unicode = report.out_terminal.unicode
            report.text("\n" + format_curve(rewards, title="reward by step", first=first, width=width, unicode=unicode))
        evaluation = result.get("eval") or {}
        rows = _evaluation_rows(evaluation.get("before"), evaluation.get("after"))
        if rows:
            report.text("")
            report.table(["held-out accuracy", "before", "after"], rows)
        report.text("")
        for note in result.get("notes", ()):
            report.text(note)
        report.text(f"run folder: {result['run_dir']}")
        commands = result.get("next", ())
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
            # The panel is gone and the last line may be long ago: say where the run ended.
            self._report.line(describe_step(self._last))
            self._said = True

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        metrics, terminal = self._last, self._report.err_terminal
        head = Table.grid(padding=(0, 1))
        eta = f"{format_duration(metrics['eta_s'])} left" if metrics.get("eta_s") is not None else ""
        step, steps = metrics["step"], metrics["steps"]
        head.add_row("step", f"{step}/{steps}", ProgressBar(max(1, steps), step, width=30), eta)
        lines = [Text(f"{name:<8} {value}") for name, value in _figures(metrics)]
        spark = format_sparkline(self._rewards, width=max(10, terminal.width - 20), unicode=terminal.unicode)
        return Group(head, Text(f"{'course':<8} {spark}"), *lines)


def describe_step(metrics: Mapping[str, Any]) -> str:
    """Return one line about a step: ``step 12/60  reward 0.412  ...``; what is not known is left out."""
    parts = [f"step {metrics['step']}/{metrics['steps']}"]
    parts += [f"{name} {value}" for name, value in _figures(metrics)]
    if metrics.get("eta_s") is not None:
        parts.append(f"eta {format_duration(metrics['eta_s'])}")
    return "  ".join(parts)


def _figures(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    formats = {
        "reward": ("reward", "{:.3f}"),
        "length": ("length", "{:.1f}"),
        "logprob_gap": ("gap", "{:.1e}"),
        "gen_tokens_per_s": ("gen", "{:.0f} tok/s"),
        "train_tokens_per_s": ("train", "{:.0f} tok/s"),
    }
    figures = [
        (label, shape.format(metrics[key])) for key, (label, shape) in formats.items() if metrics.get(key) is not None
    ]
    spent: Mapping[str, float] = metrics.get("time") or {}
    total = sum(spent.values())
    if total > 0:
        figures.append(("time", " ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in spent.items())))
    return figures


def _evaluation_rows(before: Any, after: Any) -> list[list[object]]:
    if before is None and after is None:
        return []
    sides = [side if isinstance(side, Mapping) else {"overall": side} for side in (before, after)]
    groups = dict.fromkeys(group for side in sides for group in side.get("groups") or {})
    rows: list[list[object]] = [["overall", *(_number(side.get("overall")) for side in sides)]]
    rows += [[str(group), *(_number((side.get("groups") or {}).get(group)) for side in sides)] for group in groups]
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
