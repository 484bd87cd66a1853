"""NIXL's Python package: found, loaded without disturbing this process, and told what to listen on."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil

from rlctl.errors import UnavailableError, UsageError

# The first chooses by the CUDA that it finds, and refuses where that has no package; the others run on CPUs as well.
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
# What goes wrong is told by rlctl's errors. UCX takes SIGHUP for a debugger's otherwise.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_DEBUG_SIGNO": "0"}
# Everything but UCX's own shared memory: its sockets are open to the machine, and it is not used for what is read.
_TRANSPORTS = "^posix,sysv"


@cache
def library() -> Any:
    """Return NIXL's Python API. Raises UnavailableError when no package of it is there and loads."""
    reasons = []
    with _environment(_QUIET, over=False):
        for package in _PACKAGES:
            try:
                found = importlib.import_module(f"{package}._api")
            except (ImportError, OSError) as error:  # the latter: a library of the system that it needs
                reasons.append(f"{package}: {error}")
                continue
            log = logging.getLogger("nixl")
            for handler in list(log.handlers):  # it writes to the standard output, where only results belong
                log.removeHandler(handler)
            log.setLevel(logging.ERROR)
            return found
    missing = all("No module named" in reason for reason in reasons)
    message = "NIXL is not installed" if missing else f"NIXL does not load ({'; '.join(reasons)})"
    raise UnavailableError(message, fix="pip install 'rlctl[nixl]'")


def errors() -> tuple[type[Exception], ...]:
    """Return what NIXL raises."""
    bindings = library().nixlBind
    return tuple(value for name, value in vars(bindings).items() if name.endswith("Error"))


def make_agent(name: str, host: str, devices: str | None, transports: str | None) -> Any:
    """Return a NIXL agent with UCX below it and no thread of its own.

    Args:
        name: that no other agent has.
        host: address of the interface that it listens on, unless ``devices`` says so.
        devices: UCX's names of network devices (``UCX_NET_DEVICES``): ``mlx5_0:1,eth0``.
        transports: UCX's transports (``UCX_TLS``).
    """
    api = library()
    # UCX reads its settings when it is made, from the environment alone; nobody else is to find them there.
    settings = {"UCX_NET_DEVICES": devices or _device_of(host), "UCX_TLS": transports or _TRANSPORTS}
    with _environment(_QUIET, over=False), _environment(settings, over=True):
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        try:
            agent.create_backend("UCX", {})
        except errors() as error:
            told = " ".join(f"{key}={value}" for key, value in settings.items())
            raise UnavailableError(
                f"UCX does not start with {told}: {error}", fix="choose others with the options devices and transports"
            ) from error
    return agent


def _device_of(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == host for found in addresses):
            return name
    raise UsageError(f"no network interface has the address {host}")


@contextmanager
def _environment(settings: Mapping[str, str], *, over: bool) -> Iterator[None]:
    """Have ``settings`` in the environment for a moment; ``over`` what the user set there, or under it."""
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update({key: value for key, value in settings.items() if over or before[key] is None})
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
