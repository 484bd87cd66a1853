"""The files beside the weights that a converted model needs too: configuration, tokenizer, generation, code."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from rlctl.keys.byte_copy import copy_range
from rlctl.keys.json_file import read_object
from rlctl.keys.model_spec import CONFIG_BYTES
from rlctl.keys.tensor_file import TensorFileError, leaves_folder, open_regular

MAX_BYTES = 1 << 30
CARRIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template*", "*preprocessor_config.json",
    "processor_config.json", "*.py", "LICENSE*", "NOTICE*", "README.md",
)  # fmt: skip


def carried_files(source: Path) -> list[Path]:
    """Return the files at the top of folder ``source`` that go along with its weights, sorted by name."""
    return sorted(p for p in source.iterdir() if p.is_file() and any(fnmatchcase(p.name, w) for w in CARRIED))


def carry_files(source: Path, target: Path, *, skip: frozenset[str] = frozenset()) -> list[str]:
    """Copy ``carried_files(source)`` into folder ``target`` except the names in ``skip``; return the copied names.

    Links are followed and copied as files. Raises TensorFileError for a link out of the folder or a huge file.
    """
    copied = []
    for path in carried_files(source):
        if path.name in skip:
            continue
        if leaves_folder(path, source):
            raise TensorFileError("is a link out of its folder", where=str(path), fix="replace the link by the file")
        _copy(path, target / path.name)
        copied.append(path.name)
    return copied


def carry_model_files(source: Path, target: Path, *, untied: bool = False) -> list[str]:
    """Copy configuration, tokenizer and the like; with ``untied`` the configuration says that the head is no longer
    the embedding. Return the names. Raises what ``carry_files`` does, JsonError for a damaged configuration."""
    if not untied:
        return carry_files(source, target)
    config = read_object(source / "config.json", limit=CONFIG_BYTES)
    text = json.dumps({**config, "tie_word_embeddings": False}, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    return sorted(["config.json", *carry_files(source, target, skip=frozenset({"config.json"}))])


def _copy(path: Path, target: Path) -> None:
    source, size = open_regular(path)
    try:
        if size > MAX_BYTES:
            raise TensorFileError(f"{size} bytes are too many for a file beside the weights", where=str(path))
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            copy_range(source, 0, out, 0, size, where=str(path))
        finally:
            os.close(out)
    finally:
        os.close(source)
