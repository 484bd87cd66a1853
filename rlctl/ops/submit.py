"""Handing a run to a Ray cluster from a machine that is not part of it, by Ray's job API."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlctl.errors import RlctlError, UsageError
from rlctl.runtime.launch.ray_cluster import carried, require_ray

_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_PORT = 8265
_CONNECT_SECONDS = 5.0


def job_server(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the URL of the cluster's job server: ``given``, or what Ray's variables say.

    Raises:
        UsageError: nobody says it, or it is the address of something else.
    """
    where, address = "--ray-address", given
    for name in _VARIABLES:
        if address is None and environ.get(name):
            where, address = name, environ[name]
    fix = f"such as --ray-address http://HEAD:{_PORT}, the address of the cluster's dashboard"
    if address is None:
        raise UsageError("--submit wants the address of a cluster", where="--ray-address", fix=fix)
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{address} is not the address of a job server", where=where, fix=fix)
    return url.rstrip("/")


def entrypoint(words: Sequence[str], folder: Path) -> str:
    """Return the command of the job: ``rlctl train`` with these words, in this folder, which all nodes see."""
    return f"cd {shlex.quote(str(folder))} && exec rlctl train {shlex.join(words)}"


def submit(address: str, words: Sequence[str], *, folder: Path | None = None) -> dict[str, Any]:
    """Submit ``rlctl train`` with these words and return the job's id, where it is, and its command.

    Args:
        address: of the job server, from :func:`job_server`.
        words: arguments of the command.
        folder: where it runs; None for the working directory.

    Raises:
        UnavailableError: Ray is not installed here.
        RlctlError: nobody answers at the address, or the cluster refuses.
    """
    require_ray()
    _require_reachable(address)
    from ray.job_submission import JobSubmissionClient

    command = entrypoint(words, folder or Path.cwd())
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=command, runtime_env={"env_vars": carried(os.environ)})
    except (RuntimeError, ValueError, OSError) as error:
        raise RlctlError(
            f"the cluster does not take the job: {str(error).strip().splitlines()[0]}",
            where=address,
            fix="is it the address of the dashboard, of a cluster of the same version of Ray?",
        ) from error
    return {"job_id": job, "address": address, "entrypoint": command}


def _require_reachable(address: str) -> None:
    parts = urlsplit(address)
    assert parts.hostname is not None
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise RlctlError(
            f"no Ray job server answers: {error.strerror or error}",
            where=address,
            fix=f"give the dashboard's address (port {_PORT}) by --ray-address; "
            "the head needs it: ray start --head --dashboard-host=0.0.0.0, with ray[default] installed",
        ) from error
