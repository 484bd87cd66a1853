"""Pictures of a run, with the ``plots`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.ops.output_place import require_place, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOW = 10


def can_plot() -> bool:
    """Tell whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require_plot(path: Path | None, where: str = "--plot") -> None:
    """Raise what keeps a picture from being drawn at ``path``: before the work, not after it.

    Raises:
        UsageError: the name is not one of a picture, or no file can be written there.
        UnavailableError: matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"{path.name}: a picture is .svg or .png", where=where)
    if not can_plot():
        raise UnavailableError(f"{where} needs matplotlib", where=where, fix="pip install 'rlctl[plots]'")
    require_place(path, where)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, in the format of its name; it appears whole or not at all (RlctlError)."""
    try:
        with whole_file(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".").lower())
    except OSError as error:
        raise RlctlError(f"the picture cannot be written: {error.strerror}", where=str(path)) from error


def save_reward_plot(path: Path, rewards: Sequence[float], *, first_step: int = 1, title: str = "") -> None:
    """Draw the reward over steps, with the mean of the last ten steps as the thick line.

    Call it only where :func:`can_plot` holds.

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
    save_figure(figure, path)
