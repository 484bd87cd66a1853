"""Sharded checkpoints that torch itself wrote, read without torch's own loaders and compared bit by bit."""

import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rlctl.errors import EXIT_CHECK, UsageError
from rlctl.keys.boxes import Span
from rlctl.keys.checkpoint import CheckpointError
from rlctl.keys.dcp import open_dcp
from rlctl.keys.pickled import PickleError, Record
from rlctl.keys.pieces import check_pieces
from rlctl.keys.placements import Placement, PlacementError, local_box
from rlctl.keys.rank_files import open_rank_files, open_torch_file, rank_files
from rlctl.keys.stored_tensor import read_stored
from rlctl.keys.tensor_file import OpenFiles, TensorFileError
from rlctl.keys.tensor_source import open_tensors
from rlctl.keys.torch_file import FOREIGN, read_torch_file, tensors_in
from tests.warm_starts import run_module


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    done = run_module("tests.keys.save_sharded", [str(folder)], timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def full(saved: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(saved / "full.pt", weights_only=True)
    return state


def check_equal(source: Any, expected: dict[str, torch.Tensor]) -> None:
    source.check()
    assert source.entries.keys() == expected.keys()
    for name, value in expected.items():
        entry = source.entries[name]
        assert (entry.shape, entry.nbytes) == (value.shape, value.numel() * value.element_size())
        read = source.tensor(name)
        assert read.dtype == value.dtype
        assert torch.equal(read, value)
        out = torch.empty_like(value)
        assert source.tensor(name, out) is out
        assert torch.equal(out, value)
    source.close()


def test_dcp_of_two_fsdp2_ranks(saved: Path, full: dict[str, torch.Tensor]) -> None:
    source = open_dcp(saved / "dcp2")
    assert source.objects == ["step"]
    assert len(source.entries["model.up.weight"].pieces) == 2
    check_equal(source, {f"model.{name}": value for name, value in full.items()})


def test_rank_files_of_two_fsdp2_ranks(saved: Path, full: dict[str, torch.Tensor]) -> None:
    source = open_tensors(saved)
    assert source.kind == "rank-files"
    check_equal(source, full)


def test_rank_files_of_fsdp2_and_tensor_parallelism(saved: Path, full: dict[str, torch.Tensor]) -> None:
    # up is cut by tensor parallelism first and by FSDP2 after it, which torch calls a strided shard
    shard = dict(tensors_in(read_torch_file(saved / "mesh" / "rank1.pt"), where="x"))["up.weight"]
    assert shard.placements == (Placement("shard", 0, 2), Placement("shard", 0))  # type: ignore[union-attr]
    assert shard.mesh_names == ("dp", "tp")  # type: ignore[union-attr]
    check_equal(open_tensors(saved / "mesh"), full)


def test_full_file(saved: Path, full: dict[str, torch.Tensor]) -> None:
    check_equal(open_tensors(saved / "full.pt"), full)


def test_missing_rank_is_found(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "mesh" / "rank0.pt", tmp_path / "rank0.pt")
    shutil.copy(saved / "mesh" / "rank3.pt", tmp_path / "rank3.pt")
    source = open_rank_files(rank_files(tmp_path), tmp_path)
    assert any("up.weight" in str(f) and "a part is missing" in str(f) for f in source.findings)
    with pytest.raises(CheckpointError) as caught:
        source.check()
    assert caught.value.exit_code == EXIT_CHECK


def test_dcp_faults_are_found(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree(saved / "dcp2", folder)
    data = folder / "__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)
    assert any("behind the end of '__0_0.distcp'" in str(f) for f in open_dcp(folder).findings)
    data.unlink()
    data.symlink_to(saved / "dcp2" / "__0_0.distcp")
    assert any("is not inside the folder" in str(f) for f in open_dcp(folder).findings)
    data.unlink()
    findings = open_dcp(folder).findings
    assert any("No such file" in str(f) for f in findings)
    assert any("a part is missing" in str(f) for f in findings)
    (folder / ".metadata").unlink()
    with pytest.raises(UsageError, match=r"\.metadata is missing"):
        open_dcp(folder)


def test_dcp_of_one_process(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 4), "b": {"c": torch.ones(2, dtype=torch.float8_e4m3fn), "n": 5},
        "list": [torch.zeros(2), torch.zeros(0, 4)], "scalar": torch.tensor(2.5), "text": "x", "t": torch.randn(4, 3).T,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    source = open_tensors(tmp_path / "d")
    assert set(source.objects) == {"b.n", "text"}  # type: ignore[attr-defined]
    assert source.entries["list.1"].shape == (0, 4)
    source.check()
    for name, value in {"a": state["a"], "scalar": state["scalar"], "t": state["t"]}.items():
        assert torch.equal(source.tensor(name), value)  # type: ignore[arg-type]
    assert source.tensor("b.c").dtype == torch.float8_e4m3fn


def save(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def test_torch_files(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "plain": base, "view": base[1:3], "column": base[:, 2], "transposed": base.T, "scalar": torch.tensor(1),
        "empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(base.clone()), "bool": torch.tensor([True]),
        "nested": OrderedDict(x=[torch.ones(1, dtype=torch.bfloat16)]), "f8": torch.zeros(2, dtype=torch.float8_e5m2),
        "u16": torch.ones(2, dtype=torch.uint16),
    }  # fmt: skip
    path = save({**state, "step": 3, "lr": 1e-5, "name": "run", "done": None}, tmp_path / "x.pt")
    value = read_torch_file(path)
    assert (value["step"], value["lr"], value["name"], value["done"]) == (3, 1e-5, "run", None)
    source = open_torch_file(path)
    source.check()
    expected = {**state, "nested.x.0": state["nested"]["x"][0]}  # type: ignore[index]
    del expected["nested"]
    assert source.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        read = source.tensor(name)
        assert read.dtype == tensor.dtype  # type: ignore[attr-defined]
        assert torch.equal(read.float(), tensor.detach().float())  # type: ignore[attr-defined]


def test_strided_tensors_are_read_into_a_buffer(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    stored = read_torch_file(save(base.T, tmp_path / "x.pt"))
    assert not stored.contiguous
    out = torch.empty(6, 4)
    with OpenFiles() as files:
        assert torch.equal(read_stored(files, "x", stored, out), base.T)
    assert torch.equal(out, base.T)


def test_expanded_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PickleError, match="cannot hold"):
        read_torch_file(save(torch.ones(1).expand(1000), tmp_path / "x.pt"))


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def test_files_of_training_frameworks_hold_foreign_classes(tmp_path: Path) -> None:
    import argparse

    import numpy as np

    state = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1, kind="x"), "rng": np.random.get_state()}
    path = save(state, tmp_path / "x.pt")
    with pytest.raises(PickleError, match="numpy"):
        read_torch_file(path)
    value = read_torch_file(path, foreign=FOREIGN)
    assert isinstance(value["args"], Record)
    assert value["args"].get("lr") == 1
    assert [name for name, _ in tensors_in(value, where="x")] == ["model.w"]


def zip_of(path: Path, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"other": b""}, "no data.pkl"),
        ({"a/data.pkl": b"N.", "b/data.pkl": b"N."}, "no data.pkl"),
        ({"a/data.pkl": b"N.", "a/byteorder": b"big"}, "big-endian"),
        ({"a/data.pkl": b"N"}, "truncated"),
    ],
)
def test_damaged_torch_files(records: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError) as caught:
        read_torch_file(zip_of(tmp_path / "x.pt", records))
    assert message in str(caught.value)


def test_compressed_and_foreign_archives(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="is compressed"):
        read_torch_file(zip_of(tmp_path / "x.pt", {"a/data.pkl": bytes(100)}, zipfile.ZIP_DEFLATED))
    (tmp_path / "y.pt").write_bytes(pickle.dumps({"old": 1}))
    with pytest.raises(TensorFileError, match=r"not a file that torch\.save wrote"):
        read_torch_file(tmp_path / "y.pt")
    whole = save(torch.ones(3), tmp_path / "z.pt").read_bytes()
    for length in range(0, len(whole), 41):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(TensorFileError):
            read_torch_file(tmp_path / "cut.pt")


def test_storage_out_of_bounds(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(4.0), buffer)
    with zipfile.ZipFile(buffer) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(n for n in records if n.endswith("data.pkl"))
    storage = next(n for n in records if n.endswith("data/0"))
    assert read_torch_file(zip_of(tmp_path / "ok.pt", records)).shape == (4,)
    cut = {**records, storage: records[storage][:8]}
    with pytest.raises(PickleError, match="cannot hold"):
        read_torch_file(zip_of(tmp_path / "a.pt", cut))
    del cut[storage]
    with pytest.raises(PickleError, match="is not in the archive"):
        read_torch_file(zip_of(tmp_path / "b.pt", cut))
    far = {**records, pickled: records[pickled].replace(b"K\x00K\x04", b"K\x01K\x04")}
    assert far != records
    with pytest.raises(PickleError, match="ends after its storage"):
        read_torch_file(zip_of(tmp_path / "c.pt", far))


@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (2, 5), (1, 1)])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (4, 1)])
def test_shards_of_every_rank_make_the_whole(shape: tuple[int, int], mesh: tuple[int, int]) -> None:
    cases = [
        (Placement("shard", 0), Placement("shard", 0)),
        (Placement("shard", 0, mesh[1]), Placement("shard", 0)),
        (Placement("shard", 0), Placement("shard", 1)),
        (Placement("shard", 1), Placement("replicate")),
    ]
    for placements in cases:
        ranks = [(i, j) for i in range(mesh[0]) for j in range(mesh[1])]
        if placements[1].kind == "replicate":
            ranks = [r for r in ranks if r[1] == 0]
        check_pieces("x", shape, [local_box(shape, placements, mesh, rank) for rank in ranks], where="test")


def test_unexplained_placements() -> None:
    with pytest.raises(PlacementError, match="strided split by 2"):
        local_box((8,), [Placement("shard", 0, 2)], [2], [0])
    with pytest.raises(PlacementError, match="partial sums"):
        local_box((8,), [Placement("partial")], [2], [0])
    with pytest.raises(PlacementError, match="dimension 3"):
        local_box((8,), [Placement("shard", 3)], [2], [0])


def test_pieces_that_do_not_fit() -> None:
    def box(*spans: tuple[int, int]) -> tuple[Span, ...]:
        return tuple(Span(*s) for s in spans)

    left, right, top = box((0, 4), (0, 2)), box((0, 4), (2, 2)), box((0, 2), (0, 4))
    check_pieces("x", (4, 4), [left, right], where="t")
    check_pieces("x", (), [()], where="t")
    check_pieces("x", (0, 4), [], where="t")
    with pytest.raises(TensorFileError, match="a part is missing"):
        check_pieces("x", (4, 4), [left], where="t")
    with pytest.raises(TensorFileError, match="is there twice"):
        check_pieces("x", (4, 4), [left, right, right], where="t")
    with pytest.raises(TensorFileError, match="two of its pieces overlap"):
        check_pieces("x", (4, 4), [left, top], where="t")
    with pytest.raises(TensorFileError, match="outside its shape"):
        check_pieces("x", (4, 3), [left, right], where="t")
