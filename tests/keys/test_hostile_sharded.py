"""Forged descriptions of sharded tensors: DCP metadata, DTensor states, rank files that contradict each other."""

import copyreg
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlctl.errors import UsageError
from rlctl.keys.boxes import Span
from rlctl.keys.dcp import open_dcp
from rlctl.keys.pickled import Global, PickleError, Record, record
from rlctl.keys.placements import Placement, dtensor_shard
from rlctl.keys.rank_files import open_rank_files, open_torch_file, rank_files
from rlctl.keys.stored_tensor import StoredTensor
from rlctl.keys.tensor_file import TensorFileError
from rlctl.keys.tensor_source import open_tensors

INFO = MetadataIndex("w", torch.Size([0, 0]), 0)


def metadata() -> Metadata:
    """A valid description of one tensor ``w`` (4, 2) in one piece."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 2]), [chunk])
    return Metadata({"w": tensor}, None, {INFO: _StorageInfo("__0_0.distcp", 0, 10)})


def opened(folder: Path, described: Any) -> Any:
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    (folder / "__0_0.distcp").write_bytes(bytes(20))
    return open_dcp(folder)


def tensor(found: Metadata) -> TensorStorageMetadata:
    described = found.state_dict_metadata["w"]
    assert isinstance(described, TensorStorageMetadata)
    return described


def test_the_description_that_is_changed_below_is_valid(tmp_path: Path) -> None:
    source = opened(tmp_path, metadata())
    assert source.findings == []
    assert source.entries["w"].pieces[0].box == (Span(0, 4), Span(0, 2))
    with pytest.raises(TensorFileError, match="not a file that torch"):
        source.tensor("w")


def pickled_by_name(described: Any, members: tuple[type, ...]) -> bytes:
    """Return a pickle in which members of enumerations are ``getattr(class, name)``, as Python 3.11.2 writes them."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    by_name = {kind: lambda member: (getattr, (type(member), member.name)) for kind in members}
    pickler.dispatch_table = {**copyreg.dispatch_table, **by_name}
    pickler.dump(described)
    return file.getvalue()


def test_members_of_enumerations_by_name(tmp_path: Path) -> None:
    data = pickled_by_name(metadata(), (_MEM_FORMAT_ENCODING,))
    assert b"getattr" in data
    (tmp_path / "__0_0.distcp").write_bytes(bytes(20))
    (tmp_path / ".metadata").write_bytes(data)
    source = open_dcp(tmp_path)
    assert source.findings == []
    assert source.entries["w"].shape == (4, 2)


class Reached:
    """Pickles as an attribute of a class that is on the list and no enumeration."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("reached", [Reached(Metadata, "__init__"), Reached(torch.device, "type"), Reached("x", "join"),
                                     Reached(_MEM_FORMAT_ENCODING, 3)])  # fmt: skip
def test_no_other_attribute_is_looked_up(reached: Reached, tmp_path: Path) -> None:
    described = metadata()
    described.planner_data = reached
    with pytest.raises(PickleError, match=r"getattr.*is not allowed"):
        opened(tmp_path, described)


REFUSED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "no metadata": (lambda m: {"w": 1}, "does not describe"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "does not list"),
    "no storage": (lambda m: setattr(m, "storage_data", [1]), "does not list"),
    "name": (lambda m: m.state_dict_metadata.update({3: 4}), "without name or description"),  # type: ignore[dict-item]
    "piece index": (lambda m: m.storage_data.update({"x": 3}), "without index or place"),
    "piece place": (lambda m: m.storage_data.update({INFO: _StorageInfo(3, 0, 1)}), "without name, file or range"),  # type: ignore[arg-type]
    "piece range": (lambda m: m.storage_data.update({INFO: _StorageInfo("x", -1, 1)}), "without name, file or range"),
    "compressed": (lambda m: m.storage_data.update({INFO: _StorageInfo("x", 0, 1, ["zstd"])}), "are compressed"),
    "chunks": (lambda m: setattr(tensor(m), "chunks", 3), "without element type or pieces"),
    "chunk": (lambda m: setattr(tensor(m), "chunks", [3]), "has a piece that is none"),
    "dtype": (lambda m: setattr(tensor(m).properties, "dtype", "float32"), "without a known element type"),
    "size": (lambda m: setattr(tensor(m), "size", (4, -2)), "no list of whole numbers"),
    "size kind": (lambda m: setattr(tensor(m), "size", 8), "no list of whole numbers"),
    "absurd": (lambda m: setattr(tensor(m), "size", (2**40, 2**40)), "more than 2^62"),
    "dimensions": (lambda m: setattr(tensor(m), "size", (8,)), "piece of other dimensions"),
    "offsets": (lambda m: setattr(tensor(m).chunks[0], "offsets", (0.0, 0)), "no list of whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dcp_metadata_that_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    described = metadata()
    replaced = change(described)
    with pytest.raises(PickleError) as caught:
        opened(tmp_path, replaced if isinstance(replaced, dict) else described)
    assert message in str(caught.value)


FOUND: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "too large": (lambda m: setattr(tensor(m), "size", (2**30, 2**30)), "a part is missing"),
    "outside": (lambda m: setattr(tensor(m), "size", (2, 2)), "lies outside its shape"),
    "no file": (lambda m: m.storage_data.clear(), "no file for its piece"),
    "traversal": (lambda m: m.storage_data.update({INFO: _StorageInfo("../x", 0, 1)}), "is not inside the folder"),
    "behind": (lambda m: m.storage_data.update({INFO: _StorageInfo("__0_0.distcp", 15, 10)}), "behind the end"),
    "absent": (lambda m: m.storage_data.update({INFO: _StorageInfo("other", 0, 1)}), "No such file"),
    "twice": (lambda m: tensor(m).chunks.append(tensor(m).chunks[0]), "is there twice"),
}


@pytest.mark.parametrize("name", FOUND)
def test_dcp_faults_that_are_found(name: str, tmp_path: Path) -> None:
    change, message = FOUND[name]
    described = metadata()
    change(described)
    assert message in " / ".join(str(f) for f in opened(tmp_path, described).findings)


def test_file_that_holds_another_tensor_than_the_metadata_says(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, 4), tmp_path / "__0_0.distcp")
    described = metadata()
    length = (tmp_path / "__0_0.distcp").stat().st_size
    described.storage_data[INFO] = _StorageInfo("__0_0.distcp", 0, length)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(TensorFileError, match=r"a piece is F32 \[2, 4\], not F32 \[4, 2\]"):
        open_dcp(tmp_path).tensor("w")
    torch.save({"x": 1}, tmp_path / "__0_0.distcp")
    described.storage_data[INFO] = _StorageInfo("__0_0.distcp", 0, (tmp_path / "__0_0.distcp").stat().st_size)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(TensorFileError, match="hold no tensor"):
        open_dcp(tmp_path).tensor("w")


LOCAL = StoredTensor("F32", (2, 3), (3, 1), Path("x"), 0)
ARGUMENTS = (None, None, (4, 3))


def named(name: str, **state: Any) -> Record:
    return Record(f"torch.distributed.tensor.{name}", (), state)


def dtensor(mesh: Record, *placements: Any, local: Any = LOCAL, **spec: Any) -> Any:
    described = named("DTensorSpec", mesh=mesh, placements=placements, **spec)
    return dtensor_shard(ARGUMENTS, (None, {"_local_tensor": local, "_spec": described}))


def mesh(**state: Any) -> Record:
    values = {"_layout": named("_MeshLayout", shape=(2,), stride=(1,)), "_coordinate_on_dim": (1,)}
    return named("DeviceMesh", **{**values, **state})


def test_every_way_in_which_torch_has_written_a_mesh() -> None:
    ranks = StoredTensor("I64", (2,), (1,), Path("x"), 0)
    axes = (named("_FlatLayout", shape=(2,), stride=(1,)),)
    for form in (
        mesh(),
        mesh(_layout=None, mesh=ranks),
        mesh(_layout=None, _mesh=ranks, _mesh_dim_names=("dp",)),
        mesh(_layout=named("_MeshLayout", axes=axes)),
        mesh(_layout=named("_MeshLayout", shape=((2, 1),))),
    ):
        shard = dtensor(form, named("Shard", dim=0), shard_order=(Record("ShardOrderEntry", (0, (0,))),))
        assert (shard.mesh, shard.placements) == ((2,), (Placement("shard", 0),))
        assert shard.box == (Span(2, 2), Span(0, 3))
    positional = Record("torch.distributed._tensor.placement_types.Shard", (1,))
    assert dtensor(mesh(), positional).placements == (Placement("shard", 1),)
    assert dtensor(mesh(), named("Partial", reduce_op="sum")).placements[0].kind == "partial"


@pytest.mark.parametrize(
    "make",
    [
        lambda: dtensor(mesh(), named("Shard", dim=0), local=None),
        lambda: dtensor(named("DeviceMesh"), named("Shard", dim=0)),
        lambda: dtensor(mesh(_coordinate_on_dim=None), named("Shard", dim=0)),
        lambda: dtensor(mesh(_coordinate_on_dim=(2,)), named("Shard", dim=0)),
        lambda: dtensor(mesh(_coordinate_on_dim=(-1,)), named("Shard", dim=0)),
        lambda: dtensor(mesh(_layout=named("L", shape=(2**30,))), named("Shard", dim=0)),
        lambda: dtensor(mesh(_layout=named("L", shape=())), named("Shard", dim=0)),
        lambda: dtensor(mesh(_layout=named("L", shape=("2",))), named("Shard", dim=0)),
        lambda: dtensor(mesh(), named("Shard", dim="0")),
        lambda: dtensor(mesh(), named("Shard", dim=2**70)),
        lambda: dtensor(mesh(), named("Other", dim=0)),
        lambda: dtensor(mesh(), 3),
        lambda: dtensor(mesh(), Global("torch.distributed.tensor.Shard", record("x"))),
        lambda: dtensor(mesh(), named("Shard", dim=0), named("Replicate")),
        lambda: dtensor(mesh(_mesh_dim_names=3), named("Shard", dim=0)),
        lambda: dtensor(mesh(_mesh_dim_names=(3,)), named("Shard", dim=0)),
        lambda: dtensor(mesh(), named("_StridedShard", dim=0)),
        lambda: dtensor(mesh(), named("Shard", dim=0), shard_order=(Record("ShardOrderEntry", (1, (0,))),)),
        lambda: dtensor(mesh(), named("Shard", dim=0), shard_order=(3,)),
        lambda: dtensor_shard(ARGUMENTS, {"_local_tensor": LOCAL}),
        lambda: dtensor_shard(ARGUMENTS, {"_local_tensor": LOCAL, "_spec": named("DTensorSpec")}),
        lambda: dtensor_shard((), {"_local_tensor": LOCAL, "_spec": named("DTensorSpec", mesh=mesh())}),
        lambda: dtensor_shard((None, None, "xy"), {"_local_tensor": LOCAL, "_spec": named("DTensorSpec", mesh=mesh())}),
    ],
)
def test_forged_dtensors(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()


def save(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def test_rank_files_that_contradict_each_other(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, tmp_path / "model_rank0.pt")
    save({"w": torch.zeros(3)}, tmp_path / "model_rank1.pt")
    source = open_rank_files(rank_files(tmp_path), tmp_path)
    assert "is F32 [3] here and other in another" in str(source.findings[0])
    assert source.nbytes == 8


def test_which_rank_files_are_taken(tmp_path: Path) -> None:
    for kind in ("optim", "extra_state"):
        for rank in range(12):
            save({"w": torch.zeros(2)}, tmp_path / f"{kind}_world_size_12_rank_{rank}.pt")
    with pytest.raises(UsageError, match="several kinds of rank files"):
        rank_files(tmp_path)
    for rank in range(12):
        save({"w": torch.zeros(2)}, tmp_path / f"model_world_size_12_rank_{rank}.pt")
    found = rank_files(tmp_path)
    assert [path.name for path in found] == [f"model_world_size_12_rank_{rank}.pt" for rank in range(12)]


def test_names_in_torch_files(tmp_path: Path) -> None:
    both = {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}
    with pytest.raises(TensorFileError, match=r"two tensors are named 'a\.b'"):
        open_torch_file(save(both, tmp_path / "x.pt"))
    loop: dict[str, Any] = {"w": torch.zeros(1)}
    loop["self"] = loop
    with pytest.raises(TensorFileError, match="nested too deeply"):
        open_torch_file(save(loop, tmp_path / "x.pt"))
    assert set(open_torch_file(save([torch.zeros(1), {2: torch.zeros(1)}], tmp_path / "x.pt")).entries) == {"0", "1.2"}
    with pytest.raises(UsageError, match="no such file"):
        open_tensors(tmp_path / "absent.pt")


def test_pytorch_model_bin_in_a_folder(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with open_tensors(tmp_path) as source:  # type: ignore[attr-defined]
        assert torch.equal(source.tensor("w"), torch.ones(2))
        with pytest.raises(UsageError, match="'w' is F32"):
            source.tensor("w", torch.ones(3))
