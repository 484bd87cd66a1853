"""Documents of a configuration: those that are refused, and those that are fine."""

from pathlib import Path

import pytest

from rlctl.config import load_config
from rlctl.errors import FindingsError
from tests.config.loading import faults, load


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("run:\n  seed: 1\n  steps: 2\n  seed: 3", "config.yaml:4: key 'seed' appears twice, on lines 2 and 4"),
        ("[1, 2]", "config.yaml:1: expected sections with keys, got a list of 2"),
        ("just text", "expected sections with keys, got str 'just text'"),
        ("run: {steps: 1}\n---\nrun: {steps: 2}", "config.yaml:2: a second document starts here"),
        ("run: {steps: 1", "config.yaml:1: not valid YAML"),
        ("run:\n\tsteps: 1", "config.yaml:2: not valid YAML"),
        ("run: &r\n  steps: *r", "config.yaml:2: alias *r stands inside its own anchor"),
        ("run: *gone", "alias *gone has no anchor above it"),
        ("run: !!python/object/apply:os.system ['true']", "config.yaml:1: tag"),
        ("run: {? [a] : 1}", "a key must be a word"),
        ("run: " + "[" * 30 + "]" * 30, "nested deeper than 16 levels"),
        ("run: {<<: 3}", "<< takes a mapping"),
    ],
)
def test_documents_that_are_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in faults(tmp_path, text)[0]


def test_documents_that_are_fine(tmp_path: Path) -> None:
    defaults = load_config(env={}).config
    for text in ("", "# nothing\n", "---\n", "run:\n", "\ufeffrun: {}", "run: null"):
        assert load(tmp_path, text).config == defaults
    text = "run: {steps: &n 7, seed: *n}\nrollout: {<<: {top_k: 3, top_p: 0.5}, top_p: 0.9}"
    config = load(tmp_path, text).config
    assert (config.run.steps, config.run.seed, config.rollout.top_k, config.rollout.top_p) == (7, 7, 3, 0.9)


def test_a_growing_document_is_bounded(tmp_path: Path) -> None:
    laughs = "a0: &a0 {x: 1, y: 2}\n" + "".join(
        f"a{i}: &a{i} {{" + ", ".join(f"k{j}: *a{i - 1}" for j in range(9)) + "}\n" for i in range(1, 14)
    )
    assert 1 <= len(faults(tmp_path, laughs)) <= 14 * 20
    merges = "a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(500)) + "}\n"
    merges += "".join(f"a{i}: {{<<: *a0}}\n" for i in range(1, 60))
    assert "more than 20000 values" in "\n".join(faults(tmp_path, merges))
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 20 | 1))
    assert "larger than 1 MiB" in faults(tmp_path, "", profile=str(tmp_path / "big.yaml"))[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    with pytest.raises(FindingsError) as caught:
        load_config(files=[str(tmp_path), str(tmp_path / "gone.yaml"), str(tmp_path / "latin.yaml"), "\0"], env={})
    texts = [f.message for f in caught.value.findings]
    assert texts[0] == "cannot be read: Is a directory"
    assert texts[1] == "cannot be read: No such file or directory"
    assert texts[2] == "not UTF-8 text (byte 12)"
    assert len(texts) == 4
