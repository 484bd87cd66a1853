"""What a folder of versions must not be trusted with: damage, links, other writers, leftovers, and no room."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlctl.sync.backends.file import FileEngine
from rlctl.sync.engine import Member
from rlctl.sync.errors import CorruptedError, TransferError
from rlctl.sync.pulling import Puller
from tests.sync.file.published import RUN, connect, listing, options, publish
from tests.sync.wire_cases import blank


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
