"""Connecting to a Ray cluster, or having one for the time of a run. It prints nothing and changes no signal handler."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.process import run_token
from rlctl.runtime.launch.run_folder import RunFolder

_CONNECT_SECONDS = 5.0
# The least that Ray takes; nothing of ours goes through it.
_OBJECT_STORE = 80 << 20
# What processes on other nodes are given of the run's environment.
_CARRIED = (
    "RLCTL_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "SGLANG_", "TORCH", "PYTORCH_", "NCCL_",
    "GLOO_", "HCCL_", "UCX_", "CUBLAS_", "PYTHONHASHSEED",
)  # fmt: skip
_OF_THIS_MACHINE = ("RLCTL_RUN_FOLDER",)
# Nodes have their own; Ray would show these to whoever sees its dashboard.
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def require_ray() -> None:
    """Raise UnavailableError where Ray is not installed; it is not imported yet."""
    if find_spec("ray") is None:
        raise UnavailableError("Ray is not installed here", where="cluster.launcher", fix="pip install 'rlctl[ray]'")


def cluster_address(configured: str | None, environ: Mapping[str, str]) -> str | None:
    """Return ``HOST:PORT`` of the running cluster that is asked for, or "auto"; None for one of the run's own.

    Raises:
        UsageError: it is the address of something else.
    """
    where = "cluster.ray_address" if configured else "RAY_ADDRESS"
    address = configured or environ.get("RAY_ADDRESS") or None
    if address in (None, "local"):
        return None
    if address == "auto":
        return address
    if "://" in address:
        raise UsageError(
            f"{address} is not a node of a cluster",
            where=where,
            fix="give HOST:PORT of the head (ray start prints it) on one of its nodes; "
            "from elsewhere use --submit --ray-address http://HEAD:8265",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{address!r} is no HOST:PORT", where=where, fix="such as --ray-address 10.0.0.1:6379")
    return address


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what processes on other nodes are given of an environment; no secrets."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_CARRIED) and not name.endswith(_SECRET) and name not in _OF_THIS_MACHINE
    }


def connect(address: str | None, *, cores: int, folder: RunFolder, stack: ExitStack) -> tuple[ModuleType, str]:
    """Connect to the cluster at ``address``, or start one; closing ``stack`` undoes it. Return Ray's module and the
    cluster's address.

    Args:
        address: None to start one on this machine.
        cores: those that one of its own says it has.
        folder: where one of its own keeps its files.

    Raises:
        RlctlError: it cannot be reached, or refuses.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if address is None:
        stack.enter_context(_settings(_of_own_cluster(folder)))
        quiet |= {
            "num_cpus": cores,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE,
            "_temp_dir": str(folder.path),
        }
    elif address != "auto":
        _require_reachable(address)
    import ray

    _read_again()
    try:
        with _signals_kept():
            context = ray.init(address or "local", **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RlctlError(
            f"Ray does not {'start' if address is None else 'connect'}: {str(error).strip().splitlines()[0]}",
            where=address or "cluster.launcher",
            fix="is the cluster up (ray status), of the same version of Ray and Python, and its token at hand?"
            if address
            else "free memory or disk, or set cluster.launcher=processes",
        ) from error
    stack.callback(ray.shutdown)
    # Or it prints on standard output, in colour, that a worker died, whatever `log_to_driver` says.
    ray._private.worker._worker_logs_enabled = False  # noqa: SLF001
    return ray, str(context.address_info["address"])


def _of_own_cluster(folder: RunFolder) -> dict[str, str]:
    """Return the environment of a cluster of the run's own.

    It listens on every interface, so it wants a token; what is in the environment is this user's alone to read.
    """
    return {
        **folder.env,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": sha256(f"ray {run_token()}".encode()).hexdigest(),
        # It would kill the host of processes that are not its own.
        "RAY_memory_monitor_refresh_ms": "0",
        # Its own is 15: whatever else runs on the machine would go first.
        "RAY_worker_niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
    }


def _require_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise RlctlError(
            f"no Ray cluster answers: {error.strerror or error}",
            where=address,
            fix="start one (ray start --head), give the address that it prints by --ray-address, or unset RAY_ADDRESS",
        ) from error


@contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Have Ray read these variables in place of those that are set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    # It keeps what was set when it was imported, which another package may have done, or when it last connected.
    from ray._raylet import Config

    Config.initialize("")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the handlers that Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # one that Python did not set
                signal.signal(number, handler)
