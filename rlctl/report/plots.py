"""Pictures of a run, with the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_WINDOW = 10


def can_plot() -> bool:
    """Tell whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def save_reward_plot(path: Path, rewards: Sequence[float], *, first_step: int = 1, title: str = "") -> None:
    """Write a PNG of the reward over steps, with the mean of the last ten steps as the thick line.

    The file appears whole or not at all. Call it only where :func:`can_plot` holds.

    Args:
        path: the file.
        rewards: mean reward of each step, in order.
        first_step: number of the first of them.
    """
    # Not pyplot: it picks a display backend and keeps every figure alive.
    from matplotlib.figure import Figure

    steps = range(first_step, first_step + len(rewards))
    means = [sum(part) / len(part) for part in (rewards[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(rewards)))]
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="reward of a step")
    axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {_WINDOW} steps")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    unfinished = path.with_name(f".{path.name}.tmp")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)
