"""Which folder a run lives in, and what it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.runtime.checkpoint_names import checkpoint_steps, is_checkpoint_name
from rlctl.runtime.run_directory import new_run_path

RUNS = Path("runs")


@dataclass(frozen=True)
class RunPath:
    """Where to run.

    Attributes:
        path: the run folder.
        resume: go on with what the folder holds (its checkpoints, if there are any).
        fork_from: a checkpoint of another run to start from, or None.
        saved_config: the configuration that the earlier attempt ran with, or None.
        fresh: ``path`` is a suggestion, for a folder that nobody else uses.
        newest: step of the newest checkpoint, where ``fork_from`` is an older one of the same folder: it can be
            looked at, and not trained from.
    """

    path: Path
    resume: bool
    fork_from: Path | None = None
    saved_config: Path | None = None
    fresh: bool = False
    newest: int | None = None

    def require_trainable(self) -> None:
        """Raise UsageError when training from the checkpoint would go back in the run's own folder."""
        if self.newest is not None:
            raise UsageError(
                f"{self.fork_from} is not the newest checkpoint of its run (step_{self.newest} is)",
                where="--resume",
                fix="give --run-dir NEW to fork from it",
            )


def choose_run_path(run_dir: Path | None, resume: str | None, *, name: str, root: Path = RUNS) -> RunPath:
    """Decide from ``--run-dir`` and ``--resume``.

    ``--resume auto`` goes on with ``--run-dir`` when it holds a run, else with the newest unfinished run under
    ``root``, else starts anew. ``--resume RUN`` goes on with that run. ``--resume RUN/ckpt/step_N`` goes on from that
    step: in RUN itself when it is the newest checkpoint, else in the ``--run-dir`` given, as a fork; without one it
    can only be evaluated.

    Raises:
        UsageError: nothing to resume at the path given.
    """
    anew = RunPath(new_run_path(root, name), resume=False, fresh=True)
    if resume is None:
        return RunPath(run_dir, resume=False) if run_dir else anew
    if resume == "auto":
        found = run_dir or _newest_unfinished(root)
        if found is None:
            return anew
        return RunPath(found, resume=True, saved_config=_config_of(found))
    return _explicit(Path(resume), run_dir)


def _explicit(path: Path, run_dir: Path | None) -> RunPath:
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a folder", where="--resume", fix="give a run folder, one of its checkpoints, or auto"
        )
    if not is_checkpoint_name(path.name):
        if _config_of(path) is None:
            raise UsageError(f"{path} is not a run folder: it has no config.json", where="--resume")
        if run_dir is not None and run_dir.resolve() != path.resolve():
            raise UsageError(
                f"--run-dir {run_dir} and --resume {path} name two runs",
                where="--resume",
                fix="leave --run-dir out, or give a checkpoint (RUN/ckpt/step_N) to fork from",
            )
        return RunPath(path, resume=True, saved_config=_config_of(path))
    run = path.resolve().parent.parent
    steps = checkpoint_steps(path.parent)
    if run_dir is not None and run_dir.resolve() != run:
        return RunPath(run_dir, resume=False, fork_from=path, saved_config=_config_of(run))
    if steps[-1] != int(path.name.removeprefix("step_")):
        return RunPath(run, resume=False, fork_from=path, saved_config=_config_of(run), newest=steps[-1])
    return RunPath(run, resume=True, saved_config=_config_of(run))


def _newest_unfinished(root: Path) -> Path | None:
    if not root.is_dir():
        return None
    runs = [p for p in root.iterdir() if (p / "config.json").exists() and not (p / "result.json").exists()]
    return max(runs, key=lambda p: p.name, default=None)


def _config_of(run: Path) -> Path | None:
    file = run / "config.json"
    return file if file.exists() else None
