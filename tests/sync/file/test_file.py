"""Weights through a folder: what is there at any moment, who may read it, and what is done about damage."""

from __future__ import annotations

import json
import threading
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
from tests.sync.file.published import RUN, connect, listing, options, publish
from tests.sync.wire_cases import assert_same, bits, blank, hard_tensors


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
