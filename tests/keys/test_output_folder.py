import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlctl.errors import RlctlError, UsageError
from rlctl.keys import output_folder
from rlctl.keys.carried_files import carry_files
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.output_folder import OutputError, OutputFolder
from rlctl.keys.owner_token import new_token, owner_is_dead
from rlctl.keys.shard_layout import TensorShape, plan_groups
from rlctl.keys.shard_writer import ShardWriter
from rlctl.keys.tensor_file import TensorFileError


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def checkpoint(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


def test_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with OutputFolder(target) as out:
        (out.path / "sub").mkdir()
        (out.path / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert names(target.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_nothing_is_left_after_an_exception(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), OutputFolder(tmp_path / "out") as out:
        (out.path / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_existing_target(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"), OutputFolder(target):
        raise AssertionError("not reached")
    with pytest.raises(ValueError, match="x"), OutputFolder(target, overwrite=True) as out:
        (out.path / "config.json").write_text("new")
        raise ValueError("x")
    assert (target / "config.json").read_text() == "old"
    with OutputFolder(target, overwrite=True) as out:
        (out.path / "config.json").write_text("new")
        assert (target / "config.json").read_text() == "old"
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_swap_without_rename_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "_exchange", lambda one, other: False)
    target = checkpoint(tmp_path / "out")
    with OutputFolder(target, overwrite=True) as out:
        (out.path / "config.json").write_text("new")
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]
    # The second rename fails: the old folder is put back.
    real = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if output_folder._NEW in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"), OutputFolder(target, overwrite=True):
        pass
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_empty_folder_is_used_and_foreign_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with OutputFolder(tmp_path / "empty") as out:
        (out.path / "a").write_text("x")
    assert names(tmp_path / "empty") == ["a"]
    with (
        pytest.raises(UsageError, match="does not look like a checkpoint"),
        OutputFolder(tmp_path / "empty", overwrite=True),
    ):
        pass
    (checkpoint(tmp_path / "work") / ".git").mkdir()
    with (
        pytest.raises(UsageError, match="does not look like a checkpoint"),
        OutputFolder(tmp_path / "work", overwrite=True),
    ):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is no folder"), OutputFolder(tmp_path / "file", overwrite=True):
        pass
    (tmp_path / "link").symlink_to("work")
    with pytest.raises(UsageError, match="is no folder"), OutputFolder(tmp_path / "link", overwrite=True):
        pass


def test_target_and_source_may_not_overlap(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a" / "src") if (tmp_path / "a").mkdir() is None else tmp_path
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "out", tmp_path / "a", tmp_path / "link"):
        with pytest.raises(UsageError, match="its own source"), OutputFolder(target, overwrite=True, sources=[source]):
            pass
    assert names(source) == ["config.json"]


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="are needed and"), OutputFolder(tmp_path / "out", expected_bytes=1 << 60):
        raise AssertionError("not reached")
    assert names(tmp_path) == []


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"), OutputFolder(tmp_path / "file" / "out"):
        raise AssertionError("not reached")


def test_file_size_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match="limit on file sizes"), OutputFolder(tmp_path / "out") as out:
            (out.path / "big").write_bytes(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="the disk is full"), OutputFolder(tmp_path / "out") as out:
        (out.path / "full").symlink_to("/dev/full")
        (out.path / "full").write_bytes(b"x")  # the device that always answers ENOSPC
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_fills_up_while_shards_are_written(small_disk: Path) -> None:
    source = checkpoint(small_disk.parent / "source", "{}")
    tensor = TensorShape("w", "U8", (4 << 20,))
    with ShardWriter(source, plan_groups([[tensor]])) as writer:
        writer.write("w", torch.ones(4 << 20, dtype=torch.uint8))
    entry = Checkpoint.open(source).entries["w"]
    layout = plan_groups([[tensor]])
    for fill in (lambda w: w.copy([("w", entry)]), lambda w: w.write("w", torch.ones(4 << 20, dtype=torch.uint8))):
        with (
            pytest.raises(OutputError, match="the disk is full"),
            OutputFolder(small_disk / "out") as out,
            ShardWriter(out.path, layout) as writer,
        ):
            fill(writer)
        assert names(small_disk) == []
    with (
        pytest.raises(OutputError, match="4 MiB are needed and"),
        OutputFolder(small_disk / "out", expected_bytes=layout.nbytes),
    ):
        raise AssertionError("not reached")
    assert names(small_disk) == []


SCRIPT = """
    import sys, time
    from pathlib import Path
    from rlctl.keys.output_folder import OutputFolder
    with OutputFolder(sys.argv[1], overwrite=True) as out:
        (out.path / "half").write_text("x")
        print("ready", flush=True)
        time.sleep(60)
"""


def start_writer(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "out")
    process = start_writer(target)
    assert len(names(tmp_path)) == 2
    process.send_signal(number)
    assert process.wait(20) != 0
    assert names(tmp_path) == ["out"]
    assert (target / "config.json").read_text() == "old"


def test_leftovers_of_a_killed_run_are_removed_and_of_a_living_one_kept(tmp_path: Path) -> None:
    target = tmp_path / "o[u]t*"
    killed, living = start_writer(target), start_writer(target)
    try:
        killed.kill()
        killed.wait(20)
        assert len(names(tmp_path)) == 2
        with OutputFolder(target) as out:
            (out.path / "config.json").write_text("x")
            assert sum(f".{living.pid}." in n for n in names(tmp_path)) == 1
            assert not any(f".{killed.pid}." in n for n in names(tmp_path))
    finally:
        living.kill()
        living.wait(20)


def test_target_moved_aside_by_a_killed_run_is_put_back(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "from rlctl.keys.owner_token import new_token; print(new_token())"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    aside = f".out.{output_folder._OLD}.{process.stdout.strip()}"
    checkpoint(tmp_path / aside)
    with pytest.raises(UsageError, match="exists already"), OutputFolder(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["out"]
    checkpoint(tmp_path / aside)  # now the target is there: the old copy is only in the way
    with OutputFolder(tmp_path / "out", overwrite=True):
        pass
    assert names(tmp_path) == ["out"]


def test_owner_tokens(tmp_path: Path) -> None:
    mine = new_token()
    host, space, pid, ticks, rest = mine.split(".")
    assert not owner_is_dead(mine)
    assert owner_is_dead(f"{host}.{space}.{pid}.{int(ticks) + 1}.{rest}")  # an earlier process of the same number
    assert not owner_is_dead(f"other-{host}.{space}.{pid}.{int(ticks) + 1}.{rest}")
    assert not owner_is_dead(f"{host}.{int(space) + 1}.{pid}.{int(ticks) + 1}.{rest}")
    assert not owner_is_dead("something else")


def test_a_program_with_its_own_handler_keeps_it(tmp_path: Path) -> None:
    seen: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with OutputFolder(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert seen == [signal.SIGTERM]
    assert names(tmp_path) == ["out"]


def test_carried_files(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    for folder in (source, target):
        folder.mkdir()
    kept = [
        "config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt", "vocab.json",
        "generation_config.json", "chat_template.jinja", "modeling_x.py", "special_tokens_map.json", "LICENSE",
    ]  # fmt: skip
    for name in [*kept, "model.safetensors", "pytorch_model.bin", "optimizer.pt", "events.out"]:
        (source / name).write_text(name)
    assert carry_files(source, target, skip=frozenset({"config.json"})) == sorted(set(kept) - {"config.json"})
    assert (target / "tokenizer.json").read_text() == "tokenizer.json"
    (source / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(TensorFileError, match="link out of its folder"):
        carry_files(source, tmp_path)


def test_errors_are_readable(tmp_path: Path) -> None:
    with pytest.raises(RlctlError) as caught, OutputFolder(tmp_path / "out") as out:
        (out.path / "absent" / "file").write_text("x")
    assert "cannot write: No such file or directory" in str(caught.value)
