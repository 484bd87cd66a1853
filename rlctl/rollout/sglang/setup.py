"""An SGLang replica as its setup says: a server that is there already, or one of its own."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rlctl.errors import UsageError
from rlctl.keys.dtypes import parse_dtype
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.model_spec import ModelSpec
from rlctl.registry import suggest
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.sglang.connection import SglangConnection
from rlctl.rollout.sglang.requests import require_transfer
from rlctl.rollout.sglang.served import SglangServed
from rlctl.rollout.sglang.server import SglangServer, launch_command
from rlctl.rollout.sglang.weights import FolderLoader
from rlctl.sync.deadline import Deadline

# Name of an option -> what it says.
OPTIONS = {
    "url": "address of a server that runs already; none is started then",
    "key": "the API key of that server",
    "python": "the Python that SGLang is installed in; by default this one",
    "command": "words that start a server, in the place of python -m sglang.launch_server",
    "server": "further options of the server, by their names on its command line",
    "log": "file for the server's output",
    "transfer": "how weights are handed over: disk",
    "folder": "where they are written for the server to read; by default in /dev/shm",
    "start_timeout": "seconds until the server takes requests (600)",
    "request_timeout": "seconds within which every response must have ended (3600)",
}


def serve(setup: ReplicaSetup) -> SglangServed:
    """Return a replica, without weights, whose server takes requests. Raises UsageError for options that it has not,
    ReplicaLostError when its server does not start."""
    options = checked_options(setup.options)
    if setup.lockstep:
        raise UsageError("SGLang decodes by itself: it has no lockstep", where="run.deterministic")
    model = AutoConfig.from_pretrained(setup.source, trust_remote_code=setup.trust_remote_code)
    spec = ModelSpec.from_config(model.to_dict(), where=setup.source)
    adapter = setup.adapter
    with ExitStack() as undo:
        process = None
        if "url" in options:
            connection = SglangConnection(options["url"], options.get("key", ""))
        else:
            log = Path(options.get("log") or Path(tempfile.mkdtemp(prefix="rlctl-sglang-")) / "server.log")
            more: dict[str, Any] = dict(options.get("server", {}))
            if adapter is not None:
                more = {"enable-lora": True, "max-lora-rank": adapter["r"], "max-loaded-loras": 2, **more}
            process = SglangServer(setup, launch_command(options), more, log)
            undo.enter_context(process)
            connection = SglangConnection(process.url, process.key)
            process.await_ready(connection, Deadline(float(options.get("start_timeout", 600.0))))
        loader = FolderLoader(
            connection,
            spec,
            parse_dtype(setup.dtype),
            token=setup.token,
            folder=Path(options["folder"]) if "folder" in options else None,
            adapter=None if adapter is None else AdapterConfig.parse(adapter),
        )
        served = SglangServed(
            connection,
            loader,
            setup.replica,
            max_slots=setup.max_slots,
            max_length=setup.max_length,
            request_timeout=float(options.get("request_timeout", 3600.0)),
            process=process,
        )
        undo.pop_all()
    return served


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raises UsageError for a name that there is not, and for a transfer that is not used."""
    for name in options:
        if name not in OPTIONS:
            near = suggest(name, OPTIONS)
            hint = f"did you mean {near!r}? " if near else ""
            raise UsageError(
                f"SGLang replicas have no option {name!r}", where="rollout.options", fix=f"{hint}{', '.join(OPTIONS)}"
            )
    require_transfer(str(options.get("transfer", "disk")))
    return options
