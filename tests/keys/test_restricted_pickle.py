"""Pickles are read as data: plain values come back exactly, and nothing that a pickle asks for is ever run."""

import builtins
import functools
import io
import os
import pickle
import subprocess
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.keys.dcp import open_dcp
from rlctl.keys.pickled import PickleError, Record, record
from rlctl.keys.restricted_pickle import load_pickle
from rlctl.keys.tensor_file import TensorFileError
from rlctl.keys.torch_file import FOREIGN, read_torch_file

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    PLAIN | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.sets(st.integers()),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(4, 5))
def test_plain_values(value: Any, protocol: int) -> None:
    assert load_pickle(pickle.dumps(value, protocol), {}, where="x") == value


@settings(max_examples=40, deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20))
def test_plain_values_of_old_protocols(value: Any) -> None:
    # bytes and sets were calls of functions then, which stay refused
    for protocol in (2, 3):
        assert load_pickle(pickle.dumps(value, protocol), {}, where="x") == value


def test_containers_that_hold_themselves() -> None:
    loop: list[Any] = []
    loop.append(loop)
    read = load_pickle(pickle.dumps(loop), {}, where="x")
    assert read[0] is read


class Evil:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.parts


def attacks(flag: Path) -> dict[str, Any]:
    import numpy as np

    touch = f"touch {flag}"
    return {
        "os.system": Evil(os.system, touch),
        "eval": Evil(eval, f"open({str(flag)!r}, 'w')"),
        "exec": Evil(exec, f"open({str(flag)!r}, 'w')"),
        "Popen": Evil(subprocess.Popen, ["touch", str(flag)]),
        "open": Evil(open, str(flag), "w"),
        "import": Evil(builtins.__import__, "os"),
        "getattr": Evil(getattr, "x", "upper"),
        "partial": Evil(functools.partial, os.system, touch),
        "numpy": np.arange(3),
        "numpy load": Evil(np.load, str(flag)),
        "torch.load": Evil(torch.load, str(flag)),
        "jit": Evil(torch.jit.load, str(flag)),
        "state": Evil(Evil, os.system, state={"x": 1}),
        "bytearray": bytearray(b"x"),
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
@pytest.mark.parametrize("inside", ["bare", "dict", "torch file", "dcp"])
def test_attack_is_refused_by_name_and_not_run(name: str, inside: str, tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    evil = attacks(flag)[name]
    with pytest.raises(PickleError, match=r"is not allowed|calls something"):
        if inside == "torch file":
            torch.save({"w": torch.ones(2), "x": evil}, tmp_path / "x.pt")
            read_torch_file(tmp_path / "x.pt")
        elif inside == "dcp":
            (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
            open_dcp(tmp_path)
        else:
            load_pickle(pickle.dumps({"a": [evil]} if inside == "dict" else evil, 2), {}, where="x")
    assert not flag.exists()


def test_foreign_classes_stay_inert(tmp_path: Path) -> None:
    """Where a framework's own classes are let in, they are records: even numpy's constructors do not run."""
    import numpy as np

    class Touch:
        def __reduce__(self) -> Any:
            return (np.savetxt, (str(tmp_path / "ran"), [1.0]))

    torch.save({"x": Touch()}, tmp_path / "x.pt")
    value = read_torch_file(tmp_path / "x.pt", foreign=FOREIGN)
    assert isinstance(value["x"], Record)
    assert not (tmp_path / "ran").exists()


def hand(*parts: bytes) -> bytes:
    return b"".join(parts)


def nested_tuple_key(depth: int) -> bytes:
    # t0 = ("x", "x"), t1 = (t0, t0), ...: 2^depth leaves out of a few bytes each, as the key of a dict
    out = b"\x80\x02}X\x01\x00\x00\x00xq\x00h\x00\x86q\x00"
    return out + b"h\x00\x86q\x00" * depth + b"Ns."


HOSTILE = {
    "empty": (b"", "truncated"),
    "no stop": (b"\x80\x02N", "truncated"),
    "stop in the middle": (b"\x80\x02(N.", "ends in the middle"),
    "nothing to return": (b"\x80\x02.", "ends in the middle"),
    "unknown instruction": (b"\x80\x02\xff.", "0xff is not allowed"),
    "text instructions": (b"I01\n.", "0x49 is not allowed"),
    "old global call": (b"(S'touch x'\nios\nsystem\n.", "is not allowed"),  # INST
    "obj": (b"(cos\nsystem\nS'x'\no.", "is not allowed"),
    "extension registry": (b"\x82\x01.", "0x82 is not allowed"),
    "global": (b"cos\nsystem\n.", "'os.system', which is not allowed"),
    "global without end": (b"c" + b"o" * 5000, "truncated"),
    "huge string": (b"\x80\x02X\xff\xff\xff\x7fabc.", "truncated"),
    "huge string 8": (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "truncated"),
    "huge long": (b"\x80\x02\x8b\xff\xff\xff\x7fabc.", "truncated"),
    "not utf-8": (b"\x80\x02X\x01\x00\x00\x00\xff.", "truncated or damaged"),
    "memo far away": (b"\x80\x02Nr\xff\xff\xff\x7f0j\xfe\xff\xff\x7f.", "refers to nothing"),
    "too many marks": (b"\x80\x02" + b"(" * 2000 + b".", "nested too deeply"),
    "key is a list": (b"\x80\x02}]Ns.", "no plain value"),
    "key of nested tuples": (nested_tuple_key(60), "nested values"),
    "items of a list": (b"\x80\x02](NNu.", "no dict"),
    "odd items": (b"\x80\x02}(Nu.", "no dict"),
    "append to a dict": (b"\x80\x02}Na.", "no list"),
    "set of lists": (b"\x80\x04\x8f(]\x90.", "no plain value"),
    "call of a number": (b"\x80\x02K\x01)R.", "no allowed class"),
    "state of a number": (b"\x80\x02K\x01K\x01b.", "has none"),
    "persistent": (b"\x80\x02NQ.", "outside itself"),
    "keyword arguments": (b"\x80\x04NN)}(NNu\x92.", "keyword arguments"),
    "pop nothing": (b"\x80\x020.", "truncated"),
    "tuple of nothing": (b"\x80\x02\x87.", "truncated"),
    "global without a name": (b"\x80\x04NN\x93.", "without a name"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(10)
def test_hostile_stream(name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(PickleError) as caught:
        load_pickle(data, {}, where="bad")
    assert message in str(caught.value)
    assert str(caught.value).startswith("bad: ")


def test_deep_nesting_and_shared_parts_cost_no_more_than_their_bytes() -> None:
    start = time.process_time()
    deep = load_pickle(b"\x80\x02])" + b"\x85" * 100_000 + b"0.", {}, where="x")
    assert deep == []
    load_pickle(b"\x80\x02)" + b"q\x00h\x00\x86" * 100_000 + b"0N.", {}, where="x")
    assert time.process_time() - start < 5


def test_every_truncation_is_an_error() -> None:
    data = pickle.dumps({"a": [1, 2.5, "x", b"y", None, True, (1, 2)], "b": {"c": 2**70}}, 4)
    for length in range(len(data)):
        with pytest.raises(PickleError):
            load_pickle(data[:length], {}, where="x")


def test_records_keep_what_they_were_told() -> None:
    allowed = {"argparse.Namespace": record("args"), "collections.OrderedDict": dict}
    import argparse

    value = load_pickle(pickle.dumps(argparse.Namespace(lr=1)), allowed, where="x")
    assert (value.name, value.get("lr"), value.get("none", 3)) == ("args", 1, 3)
    assert load_pickle(pickle.dumps(OrderedDict(a=1)), allowed, where="x") == {"a": 1}
    with pytest.raises(PickleError, match="unusable arguments"):
        load_pickle(b"ccollections\nOrderedDict\n(K\x01tR.", allowed, where="x")


@pytest.mark.parametrize(
    "identity",
    ["x", ("storage",), ("other", torch.FloatStorage, "0", "cpu", 1), ("storage", "class", "0", "cpu", 1),
     ("storage", torch.FloatStorage, 0, "cpu", 1), ("storage", torch.FloatStorage, "0", "cpu", -1),
     ("storage", torch.FloatStorage, "9", "cpu", 1), ("storage", torch.float32, "0", "cpu", 1)],
)  # fmt: skip
def test_hostile_storage_references(identity: Any, tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return identity if isinstance(obj, io.BytesIO) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": io.BytesIO()})
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/data.pkl", buffer.getvalue())
        archive.writestr("a/data/0", bytes(4))
    with pytest.raises(PickleError, match="storage"):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "arguments",
    [("nothing", 0, (1,), (1,)), (None, 0, (1,), (1,)), (0, "0", (1,), (1,)), (0, -1, (1,), (1,)), (0, 0, 5, 5),
     (0, 0, (1, 1), (1,)), (0, 0, (-1,), (1,)), (0, 0, (1,), (-1,)), (0, 0, (2**40, 2**40), (1, 1)), (0, 0, (9,), (1,)),
     (0, 0, (True,), (1,)), (0, 3, (1,), (1,)), (0, 0, (1,) * 65, (1,) * 65), (0,)],
)  # fmt: skip
def test_hostile_tensors(arguments: Any, tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 2) if isinstance(obj, io.BytesIO) else None

    def rebuilt(*args: Any) -> Any:
        return Evil(torch._utils._rebuild_tensor_v2, *args)

    buffer = io.BytesIO()
    first = io.BytesIO() if arguments[0] == 0 else arguments[0]
    Pickler(buffer, 2).dump(rebuilt(first, *arguments[1:]))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/data.pkl", buffer.getvalue())
        archive.writestr("a/data/0", bytes(8))
    with pytest.raises(TensorFileError):
        read_torch_file(tmp_path / "x.pt")
