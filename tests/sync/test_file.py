"""Weights through a folder: what is there at any moment, who may read it, and what is done about damage."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.errors import UsageError
from rlctl.sync.backends.file import FileEngine
from rlctl.sync.calls import call
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import CorruptedError, DeadlineError, MismatchError, PeerLostError, TransferError, WrongBaseError
from rlctl.sync.pulling import Puller
from rlctl.sync.shared_memory import FOLDER
from rlctl.sync.version_manifest import ForeignError
from tests.sync.delta_cases import drifting, larger_blank
from tests.sync.wire_cases import assert_same, bits, blank, hard_tensors

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "versions"


@pytest.fixture
def trainer(folder: Path) -> FileEngine:
    return FileEngine(Member("trainer", 0, 1), options(folder))


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".writer")


def test_last_versions_are_kept_and_pulled_exactly(folder: Path, trainer: FileEngine) -> None:
    for version in (5, 6, 9):
        publish(trainer, version, content=version)
    assert listing(folder) == ["0000000001-v6", "0000000002-v9"]
    with Puller(folder, RUN) as puller:
        assert puller.versions() == [6, 9]
        for version, expected in ((None, 9), (6, 6)):
            targets = blank(0)
            pulled = puller.pull(targets, version)
            assert pulled.version == expected
            assert pulled.report.complete
            assert_same(hard_tensors(0, expected), targets)
        with puller.open(6) as reader:
            assert {n: bits(t) for n, t in reader.tensors()} == {n: bits(t) for n, t in hard_tensors(0, 6).items()}
        with pytest.raises(TransferError, match=r"(?s)version 5 is not there.*\[6, 9\]"):
            puller.pull(blank(0), 5)
    assert trainer.extra_nbytes == sum(p.stat().st_size for p in folder.glob("*/*"))


def test_files_are_plain_safetensors_for_their_owner_alone(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 3)
    (version,) = folder.glob("*-v3")
    assert listing(version) == ["manifest.json", "shard-0-0.safetensors"]
    loaded = load_file(version / "shard-0-0.safetensors")
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in hard_tensors(0).items()}
    assert folder.stat().st_mode & 0o777 == version.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in version.iterdir()} == {0o600}
    assert json.loads((version / "manifest.json").read_text())["content"]["version"] == 3


def test_more_names_than_a_header_holds_go_into_several_files(folder: Path, trainer: FileEngine) -> None:
    weights = {f"{'layer.' * 30}{i}": torch.full((2,), i, dtype=torch.bfloat16) for i in range(1500)}
    connect(trainer)
    trainer.send_weights(weights.items(), 1)
    trainer.finalize()
    assert len(list(folder.glob("*/shard-*"))) == 2
    targets = {name: torch.zeros_like(t) for name, t in weights.items()}
    with Puller(folder, RUN) as puller:
        puller.pull(targets)
    assert_same(weights, targets)


def test_version_that_goes_while_it_is_read_is_read_to_its_end(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1, content=1)
    targets = blank(0)
    with Puller(folder, RUN) as puller, puller.open() as reader:
        for version in (2, 3, 4):
            publish(trainer, version)
        assert puller.versions() == [3, 4]
        reader.into(targets)
    assert_same(hard_tensors(0, 1), targets)


def test_readers_beside_a_writer_never_see_half_a_version(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 0)
    ended = threading.Event()

    def read() -> int:
        count = 0
        with Puller(folder, RUN) as puller:
            while not ended.is_set() or not count:
                targets = blank(0)
                version = puller.pull(targets).version
                assert_same(hard_tensors(0, version), targets)
                count += 1
        return count

    reading = call(read, "reader")
    for version in range(1, 13):
        publish(trainer, version, content=version)
    ended.set()
    assert reading.result(timeout=20) > 0


def test_same_version_again_takes_the_place_of_the_first(folder: Path, trainer: FileEngine) -> None:
    for content in (1, 2):
        publish(trainer, 7, content=content)
    assert listing(folder) == ["0000000001-v7"]
    targets = blank(0)
    with Puller(folder, RUN) as puller:
        puller.pull(targets)
    assert_same(hard_tensors(0, 2), targets)


@pytest.mark.parametrize("senders", [1, 2])
def test_changes_are_kept_and_pulled_back_to_a_whole_version(folder: Path, senders: int) -> None:
    given = options(folder, anchor_every=4, delta=True, senders=senders)
    engines = [FileEngine(Member("trainer", rank, senders), given) for rank in range(senders)]
    for version in range(8):
        connect(*engines)
        weights = drifting(0, version).items()
        send = partial(FileEngine.send_weights, stream=weights, version=version, base_version=version - 1)
        for future in [call(partial(send, engine), "send") for engine in engines]:
            future.result(20)
        for engine in engines:
            engine.settle(version)
            engine.finalize()
        targets = larger_blank(0)
        with Puller(folder, RUN) as puller:
            assert puller.versions() == list(range(version - max(version % 4, 1) if version else 0, version + 1))
            pulled = puller.pull(targets)
            assert (pulled.version, pulled.report.complete) == (version, True)
            assert_same(drifting(0, version), {n: targets[n] for n in drifting(0)})
            with puller.open() as whole:
                assert whole.version == version // 4 * 4
            if version % 4:
                with pytest.raises(WrongBaseError, match=f"changes against version {version - 1}"):
                    puller.open(version)
                puller.pull(larger_blank(0), version - 1)
    anchor = next(p for p in folder.iterdir() if p.name.endswith("-v4"))
    anchor.rename(folder / "elsewhere")
    with Puller(folder, RUN) as puller, pytest.raises(WrongBaseError, match="against version 4, which is gone"):
        puller.pull(larger_blank(0), 7)
    for engine in engines:
        engine.close()


def test_without_the_token_nobody_publishes_or_reads(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1)
    trainer.close()
    stranger = FileEngine(Member("trainer", 0, 1), options(folder, "a guess"))
    publish(stranger, 2)
    stranger.close()
    with Puller(folder, RUN) as puller:
        assert puller.pull(blank(0)).version == 1
        with pytest.raises(ForeignError, match="not written by this run"):
            puller.pull(blank(0), 2)
    rollout = FileEngine(Member("rollout", 0, 1), options(folder, "another"))
    fresh = FileEngine(Member("trainer", 0, 1), options(folder))
    connect(fresh, rollout)
    fresh.send_weights(hard_tensors(0).items(), 3)
    with pytest.raises(ForeignError):
        rollout.receive_into(3, blank(0))


def test_earlier_version_under_a_later_name_is_refused(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1)
    (folder / "0000000000-v1").rename(folder / "0000000005-v8")
    with (
        Puller(folder, RUN) as puller,
        pytest.raises(CorruptedError, match="its manifest is that of '0000000000-v1'"),
    ):
        puller.pull(blank(0))


def _rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _flip(data: bytearray) -> None:
    data[-1] ^= 1


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda p: os.truncate(p, p.stat().st_size - 1), r"bytes, and \d+ were written"),
    "too long": (lambda p: _rewrite(p, lambda d: d.extend(b"x")), r"bytes, and \d+ were written"),
    "a bit": (lambda p: _rewrite(p, _flip), "its digest differs"),
    "header length": (lambda p: _rewrite(p, lambda d: d.__setitem__(slice(0, 8), b"\xff" * 8)), "its header would"),
    "header text": (lambda p: _rewrite(p, lambda d: d.__setitem__(slice(8, 12), b"rm -")), "header"),
    "a dtype": (
        lambda p: _rewrite(p, lambda d: d.__setitem__(slice(0, len(d)), bytes(d).replace(b'"BF16"', b'"F16" '))),
        "is not there as the manifest says",
    ),
    "gone": (lambda p: p.unlink(), "cannot be opened"),
    "a link": (lambda p: (p.rename(p.with_name("other")), p.symlink_to("other")), "is a link"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "bytes, and"),
    "manifest": (
        lambda p: _rewrite(p.with_name("manifest.json"), lambda d: d.__setitem__(40, d[40] ^ 1)),
        "by this run",
    ),
    "no manifest text": (lambda p: p.with_name("manifest.json").write_text("[1]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(folder: Path, trainer: FileEngine, damage: str) -> None:
    publish(trainer, 1)
    act, message = DAMAGES[damage]
    act(folder / "0000000000-v1" / "shard-0-0.safetensors")
    with Puller(folder, RUN) as puller, pytest.raises(CorruptedError, match=message) as caught:
        puller.pull(blank(0))
    assert "0000000000-v1" in str(caught.value)


def test_link_in_a_versions_place_is_not_followed(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1)
    (folder / "0000000000-v1").rename(folder.parent / "elsewhere")
    (folder / "0000000000-v1").symlink_to(folder.parent / "elsewhere")
    with Puller(folder, RUN) as puller, pytest.raises(CorruptedError, match="it is no folder"):
        puller.pull(blank(0))


def test_what_killed_writers_left_goes_and_strangers_files_stay(folder: Path, trainer: FileEngine) -> None:
    connect(trainer)
    (left,) = folder.glob(".writing-*")
    (left / "shard-0-0.safetensors").write_bytes(b"half")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (left / "link").symlink_to(outside)
    for name in ("notes.txt", "0000000003-v", "v3"):
        (folder / name).touch()
    trainer._writing = None  # as when it is killed here
    trainer.close()
    publish(FileEngine(Member("trainer", 0, 1), options(folder)), 1)
    assert listing(folder) == ["0000000000-v1", "0000000003-v", "notes.txt", "v3"]
    assert (outside / "precious").exists()


def test_second_writer_and_folders_of_others_are_refused(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1)
    with pytest.raises(TransferError, match="another run writes into this folder"):
        FileEngine(Member("trainer", 0, 1), options(folder)).prepare()
    trainer.close()
    folder.chmod(0o777)
    with pytest.raises(TransferError, match="others may write into it"):
        FileEngine(Member("trainer", 0, 1), options(folder)).prepare()
    with pytest.raises(TransferError, match="others may write into it"):
        Puller(folder, RUN)


def test_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(TransferError, match=r"(?s)^/proc/rlctl-versions: .*another folder"):
        FileEngine(Member("trainer", 0, 1), options(Path("/proc/rlctl-versions"))).prepare()


def test_no_room_leaves_nothing_behind_and_the_next_sync_works(folder: Path, trainer: FileEngine) -> None:
    publish(trainer, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limit[1]))  # the system's own error, as of a full disk
    try:
        connect(trainer)
        with pytest.raises(TransferError, match="make room, keep fewer versions"):
            trainer.send_weights([("big", torch.zeros(1 << 20))], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    trainer.finalize()
    assert listing(folder) == ["0000000000-v1"]
    publish(trainer, 3)


def test_failed_sender_ends_the_waits_of_all_others_at_once(folder: Path) -> None:
    engines = [FileEngine(Member("trainer", rank, 2), options(folder, senders=2)) for rank in range(2)]
    rollout = FileEngine(Member("rollout", 0, 1), options(folder, senders=2))
    connect(*engines, rollout)

    def broken() -> object:
        yield "a", torch.zeros(3)
        yield "b", torch.zeros(3)
        raise TransferError("the gather failed")

    receiving = call(lambda: rollout.receive_into(1, {}), "receive")
    leading = call(lambda: engines[0].send_weights([("a", torch.zeros(3)), ("b", torch.zeros(3))], 1), "send")
    with pytest.raises(TransferError, match="the gather failed"):
        engines[1].send_weights(broken(), 1)  # type: ignore[arg-type]
    with pytest.raises(PeerLostError, match="trainer 1 has given up"):
        leading.result(timeout=5)
    with pytest.raises(PeerLostError, match="trainer 0 has given up"):
        receiving.result(timeout=5)
    for engine in (*engines, rollout):
        engine.finalize()
    assert listing(folder) == []


def test_partitioned_parameter_is_named(folder: Path, trainer: FileEngine) -> None:
    partitioned = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    partitioned.ds_shape = torch.Size([4096, 4096])  # type: ignore[attr-defined]
    connect(trainer)
    with pytest.raises(MismatchError, match="tensor w has 0 bytes on this rank, and all of it takes 33554432"):
        trainer.send_weights([("w", partitioned)], 1)
    trainer.finalize()
    assert listing(folder) == []


def test_waits_end_by_the_deadline_and_by_cancel(folder: Path, trainer: FileEngine) -> None:
    rollout = FileEngine(Member("rollout", 0, 1), options(folder, timeout=0.3))
    connect(trainer, rollout)
    with pytest.raises(DeadlineError, match=r"trainer 0 to publish.*no answer within 300 ms"):
        rollout.receive_into(1, {})
    trainer.finalize()
    rollout = FileEngine(Member("rollout", 0, 1), options(folder))
    connect(trainer, rollout)
    receiving = call(lambda: rollout.receive_into(1, {}), "receive")
    rollout.cancel()
    with pytest.raises(TransferError, match="was given up"):
        receiving.result(timeout=5)


def test_keep_must_be_a_number_of_versions(folder: Path) -> None:
    for keep in (0, "3", True, 1.5):
        with pytest.raises(UsageError, match="cannot be kept"):
            FileEngine(Member("trainer", 0, 1), options(folder, keep=keep))
    one = FileEngine(Member("trainer", 0, 1), options(folder, keep=1))
    for version in (1, 2):
        publish(one, version)
    assert listing(folder) == ["0000000001-v2"]


def test_default_folder_is_private_and_goes_with_the_engine() -> None:
    engine = FileEngine(Member("trainer", 0, 1), EngineOptions(token=RUN))
    publish(engine, 1)
    assert engine._folder is not None
    path = engine._folder.path
    assert path.parent == FOLDER
    assert path.stat().st_mode & 0o777 == 0o700
    engine.close()
    assert not path.exists()
