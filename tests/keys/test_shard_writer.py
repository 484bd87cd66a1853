import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlctl.errors import UsageError
from rlctl.keys import byte_copy
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.shard_layout import ShardLayout, TensorShape, plan_groups, plan_shards
from rlctl.keys.shard_writer import ShardWriter
from rlctl.keys.tensor_file import TensorFileError
from rlctl.keys.tensor_values import shape_of, tensor_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def random_tensors(rng: random.Random, count: int) -> dict[str, torch.Tensor]:
    made = {}
    for i in range(count):
        shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        raw = torch.randint(0, 2, (*shape, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        made[f"t{i}"] = raw[..., 0].to(rng.choice(DTYPES)).contiguous()
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(tensor_bytes(a)) == bytes(tensor_bytes(b))


def write_all(folder: Path, layout: ShardLayout, tensors: dict[str, torch.Tensor]) -> None:
    with ShardWriter(folder, layout) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


@pytest.mark.parametrize("seed", range(12))
def test_written_checkpoints_load_with_the_reference_and_with_ours(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tensors = random_tensors(rng, rng.randint(0, 12))
    layout = plan_shards((shape_of(n, t) for n, t in tensors.items()), max_shard_bytes=rng.choice([1, 40, 10**6]))
    items = list(tensors.items())
    rng.shuffle(items)  # any order of writing
    write_all(tmp_path, layout, dict(items))
    loaded: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        loaded |= load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[n], tensors[n]) for n in tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check()
        assert all(same(checkpoint.tensor(n), tensors[n]) for n in tensors)
        assert checkpoint.metadata == {"format": "pt"}
    if layout.index:
        index = json.loads((tmp_path / layout.index).read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())


def test_shards_split_at_the_limit_and_large_tensors_stand_alone() -> None:
    tensors = [TensorShape(f"t{i}", "U8", (n,)) for i, n in enumerate([4, 4, 3, 20, 1, 0])]
    layout = plan_shards(tensors, max_shard_bytes=10)
    assert [[p.tensor.name for p in s.tensors] for s in layout.shards] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert layout.shards[0].file == "model-00001-of-00004.safetensors"
    assert all(s.nbytes == len(s.header) + sum(p.nbytes for p in s.tensors) for s in layout.shards)
    assert plan_shards(tensors).index is None


def test_sizes_of_partitioned_and_empty_tensors() -> None:
    # A ZeRO-3 parameter's local part is empty; what counts is its full shape.
    partitioned = torch.empty(0, dtype=torch.bfloat16)
    partitioned.ds_shape = torch.Size([4096, 4096])  # type: ignore[attr-defined]
    tensors = [TensorShape("s", "U8", (1,)), shape_of("big", partitioned), shape_of("empty", torch.zeros(0, 4))]
    assert [t.nbytes for t in tensors] == [1, 32 << 20, 0]
    layout = plan_shards(tensors, max_shard_bytes=8 << 20)
    assert [[p.tensor.name for p in s.tensors] for s in layout.shards] == [["s"], ["big"], ["empty"]]
    assert layout.placed["empty"].tensor.shape == (0, 4)


def test_order_is_kept_unless_elements_would_straddle() -> None:
    aligned = [TensorShape("a", "F32", (2,)), TensorShape("b", "BF16", (3,)), TensorShape("c", "U8", (3,))]
    straddling = [TensorShape("a", "U8", (3,)), TensorShape("b", "F32", (2,)), TensorShape("c", "U8", (1,))]
    assert [p.tensor.name for p in plan_groups([aligned]).shards[0].tensors] == ["a", "b", "c"]
    assert [p.tensor.name for p in plan_groups([straddling]).shards[0].tensors] == ["b", "a", "c"]


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(UsageError, match="two tensors would be named 'a'"):
        plan_groups([[TensorShape("a", "U8", (1,))], [TensorShape("a", "U8", (2,))]])
    with pytest.raises(UsageError, match="__metadata__"):
        plan_groups([[TensorShape("__metadata__", "U8", (1,))]])
    with pytest.raises(UsageError, match="can hold nothing"):
        plan_shards([], max_shard_bytes=0)


def test_what_the_reference_writer_refuses(tmp_path: Path) -> None:
    t = torch.arange(12.0).reshape(3, 4)
    for tensors in ({"a": t, "b": t}, {"a": t, "b": t[:2]}, {"a": t.T}):
        with pytest.raises((RuntimeError, ValueError, SafetensorError)):
            save_file(tensors, tmp_path / "x.safetensors")
    for number, tensors in enumerate(
        ({"a": t, "b": t}, {"a": t, "b": t[:2]}, {"a": t.T}, {"a": torch.zeros(0, 4)}, {"a": torch.tensor(2.5)})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_all(folder, plan_groups([[shape_of(n, v) for n, v in tensors.items()]]), tensors)
        loaded = load_file(folder / "model.safetensors")
        assert {n: v.shape for n, v in loaded.items()} == {n: v.shape for n, v in tensors.items()}
        assert all(torch.equal(loaded[n], v) for n, v in tensors.items())


def renamed_copy(source: Path, target: Path) -> tuple[Checkpoint, ShardLayout]:
    checkpoint = Checkpoint.open(source)
    groups: dict[Path, list[TensorShape]] = {}
    for e in checkpoint.entries.values():
        groups.setdefault(e.file, []).append(TensorShape("new." + e.name, e.dtype, e.shape))
    layout = plan_groups(list(groups.values()))
    target.mkdir()
    with ShardWriter(target, layout) as writer:
        writer.copy(("new." + name, e) for name, e in checkpoint.entries.items())
    return checkpoint, layout


def source_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    tensors = random_tensors(random.Random(5), 30)
    folder.mkdir()
    layout = plan_shards((shape_of(n, t) for n, t in tensors.items()), max_shard_bytes=40)
    assert len(layout.shards) > 2
    write_all(folder, layout, tensors)
    return tensors


def check_renamed(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    with Checkpoint.open(target) as checkpoint:
        checkpoint.check()
        assert checkpoint.entries.keys() == {"new." + n for n in tensors}
        assert all(same(checkpoint.tensor("new." + n), t) for n, t in tensors.items())


def test_a_rename_copies_each_shard_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = source_checkpoint(tmp_path / "a")
    calls: Counter[int] = Counter()
    real = os.copy_file_range

    def counting(src: int, dst: int, *args: Any) -> int:
        calls[dst] += 1
        return real(src, dst, *args)

    monkeypatch.setattr(os, "copy_file_range", counting)
    _, layout = renamed_copy(tmp_path / "a", tmp_path / "b")
    assert sum(calls.values()) == len(layout.shards)
    check_renamed(tmp_path / "b", tensors)


@pytest.mark.parametrize("error", [18, 22, 38])  # EXDEV, EINVAL, ENOSYS
def test_copy_without_kernel_support(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = source_checkpoint(tmp_path / "a")

    def unable(*args: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", unable)
    monkeypatch.setattr(byte_copy, "_BUFFER_BYTES", 64)
    renamed_copy(tmp_path / "a", tmp_path / "b")
    check_renamed(tmp_path / "b", tensors)


def test_copies_between_file_systems(tmp_path: Path) -> None:
    shared = Path("/dev/shm")  # noqa: S108
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("only one file system here")
    folder = shared / f"rlctl-test-{os.getpid()}"
    tensors = source_checkpoint(tmp_path / "a")
    try:
        renamed_copy(tmp_path / "a", folder)
        check_renamed(folder, tensors)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_regrouped_and_reordered_copies(tmp_path: Path) -> None:
    tensors = source_checkpoint(tmp_path / "a")
    checkpoint = Checkpoint.open(tmp_path / "a")
    names = list(checkpoint.entries)
    random.Random(1).shuffle(names)
    shapes = [TensorShape(n, checkpoint.entries[n].dtype, checkpoint.entries[n].shape) for n in names]
    (tmp_path / "b").mkdir()
    with ShardWriter(tmp_path / "b", plan_shards(shapes, max_shard_bytes=70)) as writer:
        writer.copy((n, checkpoint.entries[n]) for n in names)
    with Checkpoint.open(tmp_path / "b") as copied:
        copied.check()
        assert all(same(copied.tensor(n), t) for n, t in tensors.items())


@pytest.mark.parametrize("kernel", [True, False])
def test_source_cut_short_while_copying(kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range")
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    entry = Checkpoint.open(tmp_path).entries["a"]
    os.truncate(tmp_path / "model.safetensors", entry.offset + 17)
    (tmp_path / "b").mkdir()
    writer = ShardWriter(tmp_path / "b", plan_groups([[TensorShape("a", "F32", (100,))]]))
    with pytest.raises(TensorFileError, match="tensor 'a': the file ends at byte"):
        writer.copy([("a", entry)])
    writer.close()


def test_bytes_of_tensors_that_only_just_count_as_contiguous() -> None:
    assert bytes(tensor_bytes(torch.arange(16, dtype=torch.int16)[5::16])) == b"\x05\x00"
    assert bytes(tensor_bytes(torch.ones(0, 3).T)) == b""
    assert bytes(tensor_bytes(torch.tensor(True))) == b"\x01"
    with pytest.raises(UsageError, match="contiguous CPU tensor"):
        tensor_bytes(torch.ones(2, 3).T)
    with pytest.raises(UsageError, match="not meta"):
        tensor_bytes(torch.ones(2, device="meta"))


def test_wrong_use_is_an_assertion(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, plan_groups([[TensorShape("a", "F32", (2,)), TensorShape("b", "F32", (2,))]]))
    with pytest.raises(AssertionError):
        writer.write("a", torch.zeros(3))
    (tmp_path / "x").mkdir()
    writer = ShardWriter(tmp_path / "x", plan_groups([[TensorShape("a", "F32", (2,)), TensorShape("b", "F32", (2,))]]))
    writer.write("a", torch.zeros(2))
    with pytest.raises(AssertionError, match="written already"):
        writer.write("a", torch.zeros(2))
    with pytest.raises(AssertionError, match="'b'"):
        writer.finish()
    writer.close()
