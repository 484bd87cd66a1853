import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.errors import EXIT_CHECK, RlctlError, UsageError
from rlctl.keys.checkpoint import Checkpoint, CheckpointError
from rlctl.keys.json_file import JsonError
from rlctl.keys.tensor_file import TensorFileError


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))


def sharded(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str], **metadata: Any) -> Path:
    """A folder whose shards hold the named tensors, under an index that says ``weight_map``."""
    folder.mkdir(exist_ok=True)
    for file, names in shards.items():
        save_file({name: tensor(ord(name[0])) for name in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_sharded_folder_reads_bit_exact(tmp_path: Path) -> None:
    sharded(tmp_path, {A: ["a", "b"], B: ["c"]}, {"a": A, "b": A, "c": B}, total_size=3 * 24)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check()
        assert (checkpoint.kind, checkpoint.nbytes, checkpoint.metadata) == ("model", 72, {"format": "pt"})
        assert checkpoint.config == {"model_type": "llama"}
        out = torch.empty(3, 2)
        for name in "abc":
            assert torch.equal(checkpoint.tensor(name), tensor(ord(name)))
            assert checkpoint.tensor(name, out) is out
            assert torch.equal(out, tensor(ord(name)))
        part = bytearray(8)
        checkpoint.read_into("b", memoryview(part), start=16)
        assert bytes(part) == tensor(ord("b")).numpy().tobytes()[16:]
        with pytest.raises(UsageError, match="'a' is F32"):
            checkpoint.tensor("a", torch.empty(2, 3))
    with Checkpoint.open(tmp_path / "model.safetensors.index.json") as checkpoint:
        assert list(checkpoint.entries) == ["a", "b", "c"]


def test_single_file_and_special_shapes(tmp_path: Path) -> None:
    saved = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5), "bf": torch.ones(3, dtype=torch.bfloat16)}
    save_file(saved, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with Checkpoint.open(path) as checkpoint:
            for name, value in saved.items():
                read = checkpoint.tensor(name)
                assert read.dtype == value.dtype
                assert read.shape == value.shape
                assert torch.equal(read, value)


def test_adapter_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(UsageError, match=r"without adapter_model\.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="saved again with safetensors"):
        Checkpoint.open(tmp_path)
    save_file({"x.lora_A.weight": tensor(1)}, tmp_path / "adapter_model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert (checkpoint.kind, checkpoint.config) == ("adapter", {"r": 4})
        assert list(checkpoint.entries) == ["x.lora_A.weight"]


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    # Three shards are named; the second is empty, the third absent.
    files = {n: f"model-0000{i}-of-00003.safetensors" for i, n in enumerate("xyz", 1)}
    sharded(tmp_path, {files["x"]: ["x"], files["y"]: []}, files)
    checkpoint = Checkpoint.open(tmp_path)
    found = [str(f) for f in checkpoint.findings]
    assert len(found) == 2
    assert "file 'model-00003-of-00003.safetensors' of tensor 'z' is missing" in found[1]
    assert "tensor 'y' is not in 'model-00002-of-00003.safetensors'" in found[0]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check()
    assert caught.value.exit_code == EXIT_CHECK


def one_finding(folder: Path) -> str:
    findings = Checkpoint.open(folder).findings
    assert len(findings) == 1, findings
    return str(findings[0])


def test_each_index_fault_is_found(tmp_path: Path) -> None:
    make = iter(range(100))

    def case(shards: dict[str, list[str]], weight_map: dict[str, str], **metadata: Any) -> str:
        return one_finding(sharded(tmp_path / str(next(make)), shards, weight_map, **metadata))

    assert "tensor 'b' is not in the index" in case({A: ["a", "b"]}, {"a": A})
    assert "total_size is 25, the tensors take 24 bytes" in case({A: ["a"]}, {"a": A}, total_size=25)
    assert "total_size is not a number" in case({A: ["a"]}, {"a": A}, total_size="24")
    assert f"shard {B} is not in the index" in case({A: ["a"], B: ["b"]}, {"a": A})
    assert "is not inside the folder" in case({}, {"a": "../other.safetensors"})
    assert "is not inside the folder" in case({}, {"a": "/etc/passwd"})
    assert "is not inside the folder" in case({}, {"a": ""})
    assert "is not inside the folder" in case({}, {"a": "x\0y"})
    assert "header length" in case({A: ["a"]}, {"a": A, "b": "model.safetensors.index.json"})


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {A: ["a", "b"], B: ["b"]}, {"a": A, "b": B})
    found = " / ".join(str(f) for f in Checkpoint.open(tmp_path).findings)
    assert f"tensor 'b' is here, but the index says '{B}'" in found
    assert f"tensor 'b' is also in {A}" in found


def test_links(tmp_path: Path) -> None:
    outside = tmp_path / "secret.safetensors"
    save_file({"a": tensor(1)}, outside)
    folder = sharded(tmp_path / "m", {}, {"a": A})
    (folder / A).symlink_to(outside)
    assert "is not inside the folder" in one_finding(folder)
    (folder / A).unlink()
    (folder / A).symlink_to(A)
    assert "is not inside the folder" in one_finding(folder)  # a loop of links
    (folder / A).unlink()
    save_file({"a": tensor(1)}, folder / "real.safetensors")
    (folder / A).symlink_to("real.safetensors")
    assert Checkpoint.open(folder).findings == []


def test_hub_cache_snapshot_is_no_link_out(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"a": tensor(1)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshots").mkdir()
    folder = sharded(tmp_path / "snapshots" / "abc", {}, {"a": A})
    (folder / A).symlink_to("../../blobs/0123")
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.check()
        assert torch.equal(checkpoint.tensor("a"), tensor(1))


def test_shards_without_an_index(tmp_path: Path) -> None:
    save_file({"b": tensor(2)}, tmp_path / B)
    assert "no index, and shard 1 of 2 of 'model' is missing" in one_finding(tmp_path)
    save_file({"a": tensor(1)}, tmp_path / A)
    assert Checkpoint.open(tmp_path).findings == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map"'])
def test_unusable_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(JsonError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


def link_loop(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [link_loop, pipe])
@pytest.mark.timeout(10)
def test_index_that_is_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.safetensors.index.json")
    with pytest.raises(RlctlError):
        Checkpoint.open(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        Checkpoint.open(tmp_path)


def test_file_cut_while_open_names_file_and_tensor(tmp_path: Path) -> None:
    save_file({"a": tensor(1), "b": tensor(2)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", checkpoint.entries["b"].offset + 5)
        with pytest.raises(TensorFileError, match=r"model.safetensors: tensor 'b'"):
            checkpoint.tensor("b")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    count = 80
    names = {f"{i}": f"s{i}.safetensors" for i in range(count)}
    sharded(tmp_path, {file: [name] for name, file in names.items()}, names)
    with Checkpoint.open(tmp_path) as checkpoint:
        before = open_descriptors()
        for name in checkpoint.entries:
            checkpoint.tensor(name)
        assert open_descriptors() - before <= 64
    assert open_descriptors() <= before
