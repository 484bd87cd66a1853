"""Versions in a folder: published, and what is there then."""

from __future__ import annotations

from pathlib import Path

from rlctl.sync.backends.file import FileEngine
from rlctl.sync.engine import EngineOptions
from tests.sync.wire_cases import hard_tensors

RUN = "only this run"


def options(folder: Path, run: str = RUN, **more: object) -> EngineOptions:
    extras = {"folder": str(folder), **{k: more.pop(k) for k in ("keep", "anchor_every") if k in more}}
    return EngineOptions(**{"timeout": 10.0, "token": run, "extras": extras, **more})  # type: ignore[arg-type]


def connect(*engines: FileEngine) -> None:
    metadata = [engine.prepare() for engine in engines]
    trainers = sum(engine.member.role == "trainer" for engine in engines)
    for engine, kwargs in zip(
        engines, FileEngine.build_topology(trainers, len(engines) - trainers, metadata), strict=True
    ):
        engine.init_process_group(**kwargs)


def publish(engine: FileEngine, version: int, content: int = 0, base_version: int | None = None) -> None:
    connect(engine)
    engine.send_weights(hard_tensors(0, content).items(), version, base_version=base_version)
    engine.finalize()


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".writer")
