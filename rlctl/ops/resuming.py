"""The configuration of a run that goes on from an earlier attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlctl.config import DEFAULT_PROFILE, Layer, read_saved
from rlctl.config.keytable import flatten
from rlctl.errors import UsageError
from rlctl.ops.resolve import Resolution, resolve
from rlctl.ops.run_path import RunPath


def resolve_run(
    run: RunPath,
    *,
    profile: str | None = None,
    files: Sequence[str] = (),
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Resolution:
    """Resolve the configuration of ``run``: what it was saved with, if it was, stands in the place of the profile.

    Args:
        run: where to run and what to go on from.
        profile: as given; the default profile when None and nothing was saved.
        files, overrides, flags: as for :func:`rlctl.ops.resolve.resolve`.

    Raises:
        UsageError: another profile than the run began with.
        FindingsError: the configuration has faults.
    """
    if run.saved_config is None:
        return resolve(profile or DEFAULT_PROFILE, files=files, overrides=overrides, flags=flags)
    saved = read_saved(run.saved_config)
    if profile is not None and profile != saved.profile:
        raise UsageError(
            f"the run began with {saved.profile or 'no profile'}, not with {profile}",
            where="--profile",
            fix="leave --profile out, change single keys with key=value, or start another run",
        )
    layer = Layer(str(run.saved_config), flatten(saved.config))
    resolution = resolve(None, files=files, overrides=overrides, flags=flags, layers=[layer])
    return replace(resolution, resolved=replace(resolution.resolved, profile=saved.profile, notes=saved.notes))
