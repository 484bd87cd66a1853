import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlctl.errors import RlctlError
from rlctl.keys.dtypes import DTYPE_BITS, TORCH_NAMES, dtype_code, parse_dtype, torch_dtype
from rlctl.keys.safetensors_header import MAX_HEADER_BYTES, HeaderError, build_header, read_header
from rlctl.keys.tensor_file import TensorFileError


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("seed", range(20))
def test_headers_of_the_reference_writer_are_read(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    dtypes = [torch_dtype(code) for code in TORCH_NAMES if code not in ("F8_E8M0",)]
    tensors = {}
    for i in range(rng.randint(0, 9)):
        shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 4))]
        tensors[f"blöck.{i}.w"] = torch.zeros(shape, dtype=rng.choice(dtypes))
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "step": "3"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "step": "3"}
    assert {e.name: (e.dtype, e.shape) for e in header.entries} == {
        n: (dtype_code(t.dtype), tuple(t.shape)) for n, t in tensors.items()
    }
    assert sum(e.nbytes for e in header.entries) == path.stat().st_size - header.data_start


def test_our_headers_are_read_by_the_reference(tmp_path: Path) -> None:
    tensors = [
        ("a", "F32", (2, 3)),
        ("b.ü", "BF16", ()),
        ("c", "I64", (0, 4)),
        ("d", "F8_E4M3", (5,)),
        ("e", "BOOL", (1,)),
    ]
    header = build_header(tensors, {"format": "pt"})
    assert len(header) % 8 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(24 + 2 + 0 + 5 + 1))
    with safe_open(path, "pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    assert shapes == {name: shape for name, _, shape in tensors}
    assert [(e.name, e.dtype, e.shape) for e in read_header(path).entries] == tensors


HOSTILE: list[tuple[str, Any, bytes, str]] = [
    ("not json", b"{nope", b"", "not valid JSON"),
    ("array", b"[]", b"", "does not begin with '{'"),
    ("empty", b"", b"", "does not begin with '{'"),
    ("not utf-8", b'{"\xff":1}', b"", "not UTF-8"),
    ("nested", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "nested too deeply"),
    ("long number", b'{"a":' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    ("NaN", b'{"a":NaN}', b"", "NaN is not a JSON number"),
    ("duplicate name", b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "'a' appears twice"),
    ("duplicate field", b'{"a":{"dtype":"U8","dtype":"U8"}}', b"", "'dtype' appears twice"),
    ("lone surrogate", b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "not valid Unicode"),
    ("no object", {"a": 3}, b"", "not an object"),
    ("metadata numbers", {"__metadata__": {"a": 3}}, b"", "strings to strings"),
    ("metadata list", {"__metadata__": ["a"]}, b"", "strings to strings"),
    ("dtype", {"a": entry("F31")}, bytes(8), "unknown dtype 'F31'"),
    ("dtype object", {"a": entry(["F32"])}, bytes(8), "unknown dtype"),  # type: ignore[arg-type]
    ("shape negative", {"a": entry(shape=[-2])}, bytes(8), "not a list"),
    ("shape float", {"a": entry(shape=[2.0])}, bytes(8), "not a list"),
    ("shape bool", {"a": entry(shape=[True], offsets=[0, 4])}, bytes(4), "not a list"),
    ("shape text", {"a": entry(shape="2")}, bytes(8), "not a list"),
    ("shape deep", {"a": entry(shape=[1] * 65, offsets=[0, 4])}, bytes(4), "at most 64"),
    ("shape product", {"a": entry(shape=[2**40, 2**40])}, bytes(8), "more than 2^62"),
    ("shape product behind zero", {"a": entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}, b"", "more than 2^62"),
    ("packed", {"a": entry("F4", [3], [0, 2])}, bytes(2), "do not fill whole bytes"),
    ("offsets missing", {"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "not [begin, end]"),
    ("offsets one", {"a": entry(offsets=[0])}, bytes(8), "not [begin, end]"),
    ("offsets backwards", {"a": entry(offsets=[8, 0])}, bytes(8), "not [begin, end]"),
    ("offsets negative", {"a": entry(offsets=[-8, 0])}, bytes(8), "not [begin, end]"),
    ("wrong span", {"a": entry(offsets=[0, 12])}, bytes(12), "takes 8 bytes, its offsets span 12"),
    ("overlap", {"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "overlaps"),
    ("same bytes twice", {"a": entry(), "b": entry()}, bytes(8), "overlaps"),
    ("hole", {"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20), "follows a hole"),
    ("hole first", {"a": entry(offsets=[8, 16])}, bytes(16), "follows a hole"),
    ("past the end", {"a": entry()}, bytes(7), "truncated"),
    ("far past the end", {"a": entry("U8", [2**61], [0, 2**61])}, b"", "truncated"),
    ("bytes left over", {"a": entry()}, bytes(9), "belong to none"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "data", "message"), [case[1:] for case in HOSTILE], ids=[c[0] for c in HOSTILE])
def test_hostile_header(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("size", [0, 7])
def test_file_too_short(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(HeaderError, match="not a safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [9, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**64 - 1])
def test_header_length_that_lies_allocates_nothing(length: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(HeaderError, match=r"truncated|over the limit"):
        read_header(tmp_path / "x.safetensors")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, loop, folder, lambda path: None])
@pytest.mark.timeout(10)
def test_what_is_no_file_is_refused_and_not_waited_on(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x.safetensors")
    with pytest.raises(TensorFileError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_header_longer_than_the_limit_is_not_written() -> None:
    with pytest.raises(HeaderError, match="use more shards"):
        build_header([("n" * (MAX_HEADER_BYTES + 1), "U8", (0,))], {})


def test_dtype_names() -> None:
    for text in ("bf16", "bfloat16", "torch.bfloat16", "BF16", " BFloat16 "):
        assert parse_dtype(text) == "BF16"
    for code in TORCH_NAMES:
        assert dtype_code(torch_dtype(code)) == code
        assert torch_dtype(code).itemsize * 8 == DTYPE_BITS[code]
    with pytest.raises(RlctlError, match="did you mean 'bf16'"):
        parse_dtype("bf-16")
    with pytest.raises(RlctlError, match="copied, not computed"):
        torch_dtype("F4")
