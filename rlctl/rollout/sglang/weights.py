"""How weights reach an SGLang server: as a folder of safetensors that it reads, in memory (/dev/shm) by default.

The checkpoint-engine worker beside the server hands over what it received, by whatever backend; this side checks and
names it, writes it once, and has the server load it. Nothing of a transfer that fails reaches the live weights.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from rlctl.errors import UsageError
from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.names import Part, parse_key
from rlctl.keys.model_spec import ModelSpec
from rlctl.rollout.sent_form import sent_form
from rlctl.rollout.sglang import requests
from rlctl.rollout.sglang.requests import Call
from rlctl.rollout.sglang.tensor_file import TensorFile
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import MismatchError
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.protocols import LoadReport
from rlctl.sync.shared_memory import FOLDER, segment_name
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype
from rlctl.sync.undertaker import Undertaker

Named = tuple[str, torch.Tensor]


class Asks(Protocol):
    """A connection to the server."""

    def ask(self, call: Call, deadline: Deadline) -> Any:
        """See SglangConnection."""


class FolderLoader:
    """A ``Loader``: one for a server, whatever the number of its ranks, each of which reads its part of the files.

    Args:
        server: the connection.
        spec: the model.
        dtype: of the server's weights, a safetensors code.
        token: the run's.
        folder: where the server can read; by default a private one in /dev/shm, for a server on this machine.
        adapter: of the adapters that will come, None when none will.
    """

    def __init__(
        self,
        server: Asks,
        spec: ModelSpec,
        dtype: str,
        *,
        token: str,
        folder: Path | None = None,
        adapter: AdapterConfig | None = None,
    ) -> None:
        self.adapter_name: str | None = None
        self._server = server
        self._form = sent_form(spec, dtype)
        self._dtype = torch_dtype(dtype)
        self._inlet = WeightInlet(token)
        self._adapter = adapter
        self._undertaker: Undertaker | None = None
        self._parent = folder
        self.whole = False  # the server holds a whole base

    def targets(self) -> Mapping[str, TensorMeta]:
        """See Loader: what a trainer sends, by arithmetic from the model's configuration."""
        return self._form.metas

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """See Loader."""
        return self.take(self._inlet.stream(order, deadline), order.version, deadline, cast=order.cast)

    def take(self, stream: Iterable[Named], version: int, deadline: Deadline, *, cast: bool = False) -> LoadReport:
        """Have the server load a base, or an adapter, or both, the base first. Raises when it does not take them.

        Unless the base is whole nothing is loaded: the server computes with what it had.
        """
        came = iter(stream)
        first = next(came, None)
        adapter: list[Named] = []
        reports = []
        with self._folder(version) as folder:
            if first is None or _is_base(first[0]):
                base = _until_adapter(came if first is None else chain([first], came), adapter)
                reports.append(self._write_base(base, folder / "base", cast or self._adapter is not None))
                if not reports[0].complete:
                    return reports[0]
                self.whole = False
                self._server.ask(requests.load_folder(str(folder / "base"), version), deadline)
                self.whole = True
                shutil.rmtree(folder / "base")
            elif self.whole:
                adapter.append(first)
            else:
                raise UsageError("an adapter came, and the server has no base to add it to", fix="send the base")
            if adapter:
                reports.append(self._load_adapter(chain(adapter, came), folder / "adapter", version, deadline))
        return LoadReport(
            [name for report in reports for name in report.loaded],
            [name for report in reports for name in report.unknown],
            [name for report in reports for name in report.untouched],
        )

    def forget(self) -> None:
        """The server has given up its weights."""
        self.whole = False

    def close(self) -> None:
        """Let go what syncs have mapped, and the folder."""
        self._inlet.close()
        if self._undertaker is not None:
            self._undertaker.close()
            self._undertaker = None

    def _write_base(self, stream: Iterable[Named], folder: Path, cast: bool) -> LoadReport:
        loaded, unknown, parts = [], [], set()
        with TensorFile(folder / "model.safetensors", self._form.single, self._dtype) as file:
            for name, tensor in stream:
                if name in self._form.aliases:
                    loaded.append(name)
                    continue
                if name not in self._form.metas and name not in self._form.single:
                    unknown.append(name)
                    continue
                if not cast:
                    require_same_dtype(TensorMeta.of(name, tensor), dtype_code(self._dtype))
                for single, part in self._form.split(name, tensor):
                    file.add(single, part)
                    parts.add(single)
                loaded.append(name)
        return LoadReport(loaded, unknown, self._form.untouched(parts))

    def _load_adapter(self, stream: Iterable[Named], folder: Path, version: int, deadline: Deadline) -> LoadReport:
        if self._adapter is None:
            raise UsageError("an adapter came, and the replica was started for none", fix="model.lora.sync=merged")
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in stream}
        base = [name for name in tensors if _is_base(name)]
        if base:
            raise MismatchError(f"tensor {base[0]} of the base came after the adapter")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        with TensorFile(folder / "adapter_model.safetensors", shapes, None) as file:
            for name, tensor in tensors.items():
                file.add(name, tensor)
        (folder / "adapter_config.json").write_text(json.dumps(self._adapter.to_dict()))
        # A request is bound to the adapter that it began with, so each version has a name of its own.
        name, before = f"rlctl-{version}", self.adapter_name
        if before is not None:
            self.adapter_name = None
            self._server.ask(requests.unload_adapter(before), deadline)
        self._server.ask(requests.load_adapter(name, str(folder)), deadline)
        self._server.ask(requests.name_version(version), deadline)
        self.adapter_name = name
        return LoadReport(list(tensors), [], [])

    @contextmanager
    def _folder(self, version: int) -> Iterator[Path]:
        """Make the folder of one version; it goes once the server has read it."""
        if self._parent is None:
            self._parent = FOLDER / segment_name(secrets.token_hex(8), "sglang")
            self._undertaker = Undertaker(self._parent)
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = self._parent / f"{version}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _is_base(name: str) -> bool:
    return parse_key(name).part is Part.BASE


def _until_adapter(stream: Iterator[Named], adapter: list[Named]) -> Iterator[Named]:
    """Yield the base's tensors; the adapter's first, if one comes, goes to ``adapter``."""
    for name, tensor in stream:
        if not _is_base(name):
            adapter.append((name, tensor.detach().to("cpu", copy=True)))
            return
        yield name, tensor
