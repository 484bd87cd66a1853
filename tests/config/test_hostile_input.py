"""Bytes, structures, variables and arguments that nobody should write: an error for users or success, never a crash."""

import random
import string
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config import Layer, from_json, load_config, show_config
from rlctl.config.keytable import key_table, sections
from rlctl.errors import RlctlError, UsageError

KEYS = [*key_table(), *sections()]
PIECES = [
    "run:", "steps:", "trainer", "lr", "1e-5", "{", "}", "[", "]", ",", "\n", "\n  ", "&a ", "*a", "<<: ", "? ", "- ",
    "|", ">", "!!int ", "'", "\"", "#", "\t", "---", "...", "%YAML 1.1\n", "null", "~", "${run.steps}", "${", "\\",
    "\u0000", "\ufeff", "\u00e9", "0x10", ".inf", ": ",
]  # fmt: skip


def survives(**sources: Any) -> None:
    """Load; whatever happens must be an error for users, soon."""
    begin = time.process_time()
    try:
        show_config(load_config(**({"env": {}} | sources)))
    except RlctlError as error:
        assert isinstance(error, UsageError)
        assert str(error)
        assert len(str(error)) < 200_000
    assert time.process_time() - begin < 5


def seeded_text(seed: int) -> bytes:
    rng = random.Random(seed)
    if seed % 3 == 0:
        return rng.randbytes(rng.randint(0, 200))
    if seed % 3 == 1:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 60))).encode("utf-8", "surrogatepass")
    base = Path(__file__).parents[2] / "profiles" / "16xH100-separate.yaml"
    data = bytearray(base.read_bytes())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 4)] = rng.choice(
            [b"", b":", b"\n", b" ", b"{", b"*", b"\xff", b"1e9", b"- ", b"'"]
        )
    return bytes(data)


def test_files_of_random_bytes_pieces_and_damaged_profiles(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for seed in range(600):
        file.write_bytes(seeded_text(seed))
        try:
            survives(files=[str(file)])
            survives(profile=str(file))
        except BaseException:
            print("seed", seed, seeded_text(seed))
            raise


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TREES = st.dictionaries(
    st.sampled_from([*(s for s in sections() if "." not in s), "zz"]),
    st.dictionaries(st.sampled_from(sorted({k.rpartition(".")[2] for k in KEYS})), VALUES, max_size=4) | VALUES,
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(tree=TREES)
def test_any_structure(tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    survives(layers=[Layer("a layer", tree)])
    file = tmp_path_factory.getbasetemp() / "structure.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), "utf-8", errors="surrogatepass")
    survives(files=[str(file)])
    try:
        from_json({"schema": "rlctl.config/1", "config": tree}, "config.json")
    except UsageError as error:
        assert str(error)


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from(KEYS) | st.text(max_size=30),
    value=st.text(max_size=40)
    | st.sampled_from(["[" * 5000, "9" * 5000, "1e" + "9" * 50, "${" * 400, "[a, *b]", "\udcff"]),
)
def test_any_argument_and_variable(key: str, value: str) -> None:
    survives(overrides=[f"{key}={value}", key])
    survives(env={f"RLCTL_{key.upper().replace('.', '__')}": value, f"RLCTL_{key}": value})
    survives(flags={"--steps": value, "--model": value})
    survives(profile=value or "x")


def test_long_chains_of_references_do_not_grow(tmp_path: Path) -> None:
    texts = [key for key, spec in key_table().items() if spec.kind == "str"]
    overrides = [f"{texts[0]}={'x' * 4000}"]
    overrides += [f"{key}={f'${{{before}}}' * 200}" for before, key in pairwise(texts)]
    survives(overrides=overrides)


def test_a_key_of_any_length_is_answered_quickly() -> None:
    for key in ("a" * 100_000, ".".join(["run"] * 2000), "run." + "s" * 100_000, string.printable):
        survives(overrides=[f"{key}=1"])
        survives(layers=[Layer("a layer", {key: 1})])
