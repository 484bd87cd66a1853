"""Weights & Biases: online where that can work without asking anybody, else offline."""

from __future__ import annotations

import netrc
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlctl.trackers.base import RunInfo, Tracker

_SERVER = "https://api.wandb.ai"
_CONNECT_SECONDS = 3.0
_QUIET = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}


class WandbTracker(Tracker):
    """One W&B run for a run folder; WANDB_MODE, WANDB_ENTITY, WANDB_PROJECT and WANDB_BASE_URL hold as usual."""

    packages: ClassVar[Mapping[str, str]] = {"wandb": "wandb"}

    def __init__(self, run: RunInfo) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        server = os.environ.get("WANDB_BASE_URL", _SERVER)
        mode, why = choose_mode(server)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.id,
            dir=run.folder,
            mode=mode,
            config=run.config,
            resume="allow" if mode == "online" else None,
        )
        # Steps that a later attempt does again are refused as W&B's own steps, not as an axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if why:
            where = shlex.quote(str(Path(self._run.dir).parent))
            self.notice = f"offline, since {why}; upload later with: wandb sync {where}"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand the figures to W&B's own process."""
        self._run.log({"step": step, **figures})

    def close(self, status: str) -> None:
        """Wait until W&B has written, or uploaded, everything."""
        self._run.finish(exit_code=0 if status == "done" else 1)


def choose_mode(server: str) -> tuple[str | None, str]:
    """Return W&B's mode, None where WANDB_MODE says it, and why it is offline, or "".

    Args:
        server: base address of the W&B server.
    """
    if os.environ.get("WANDB_MODE"):
        return None, ""
    host = urlsplit(server).hostname or ""
    if not has_key(host):
        return "offline", "there is no WANDB_API_KEY and no login"
    if not reachable(server):
        return "offline", f"{host} cannot be reached"
    return "online", ""


def has_key(host: str) -> bool:
    """Whether W&B finds an API key for ``host`` without asking: in its variable, or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not file.is_file():
        return False
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False  # W&B could not read it either


def reachable(server: str) -> bool:
    """Whether something listens where ``server``, or the proxy in front of it, should be."""
    url = urlsplit(server)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    if proxy:
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        with socket.create_connection((url.hostname or "", port), _CONNECT_SECONDS):
            return True
    except OSError:
        return False
