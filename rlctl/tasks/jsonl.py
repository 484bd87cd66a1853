"""A user's own data: one JSON object a line, with a prompt, an answer and a verifier by name or by reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.tasks.base import Message, Sample, Task, TaskOptions, is_held_out
from rlctl.tasks.verifiers import VERIFIERS, Verifier, check_reference, last_number, load_verifier

MAX_FINDINGS = 20


class JsonlTask(Task):
    """Prompts from a JSONL file. ``prompt`` is text or a list of chat messages; ``answer`` is text, or a value whose
    JSON is the text; ``group``, if given, is a label for broken-down evaluation. Blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, is empty, or has faults: the first 20 of all are listed.
    """

    def __init__(self, path: Path, options: TaskOptions) -> None:
        self.name = str(path)
        data = _read(path)
        self._verify, self.verifier = _resolve_verifier(options.verifier)
        rows = list(_rows(path, data, options))
        faults = [row for row in rows if isinstance(row, Finding)]
        if faults:
            raise FindingsError(f"{path} cannot be used", faults, limit=MAX_FINDINGS)
        samples = [row for row in rows if isinstance(row, Sample)]
        sides: tuple[list[Sample], list[Sample]] = ([], [])
        for sample in samples:
            side = sides[is_held_out(_identity(sample), options.held_out)]
            side.append(replace(sample, index=len(side)))
        self._train, self._held_out = sides
        if not self._train:
            what = f"all {len(samples)} prompts are held out" if samples else "the file has no prompts"
            raise UsageError(what, where=str(path), fix="add lines, or lower task.held_out" if samples else "add lines")
        key = (options.prompt_field, options.answer_field, options.held_out)
        self.digest = blake2b(data + repr(key).encode(), digest_size=16).hexdigest()

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> JsonlTask:
        """Read the file at path ``name``."""
        return cls(Path(name), options)

    @property
    def size(self) -> int:
        """Number of prompts that are not held out."""
        return len(self._train)

    def sample(self, index: int) -> Sample:
        """Return training prompt ``index``, 0 .. size - 1."""
        return self._train[index]

    def held_out(self, n: int) -> list[Sample]:
        """Return the first ``n`` held-out prompts."""
        return self._held_out[:n]

    def score(self, sample: Sample, response_text: str) -> float:
        """Return the reward, in this process; a user's function is imported here on the first call."""
        if self._verify is None:
            assert self.verifier is not None
            self._verify = load_verifier(self.verifier)
        return float(self._verify(sample.prompt, response_text, sample.answer))


def _resolve_verifier(name: str | None) -> tuple[Verifier | None, str | None]:
    """Return the function to call here, or the reference to run elsewhere."""
    if name is None:
        raise UsageError(
            "a data file needs a verifier",
            where="task.verifier",
            fix=f"one of {', '.join(VERIFIERS.names())}, or module:function, or file.py:function",
        )
    if ":" in name:
        return None, check_reference(name)
    verify = VERIFIERS.load(name, where="task.verifier")
    # A regular expression from a data file can take for ever, and nothing stops it but the end of its process.
    return (None, f"{verify.__module__}:{name}") if name == "regex" else (verify, None)


def _read(path: Path) -> bytes:
    if path.suffix != ".jsonl":
        raise UsageError(f"{path} is not a JSONL file", where="task.name", fix="one JSON object a line, named *.jsonl")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", where="task.name") from error


def _rows(path: Path, data: bytes, options: TaskOptions) -> Iterator[Sample | Finding]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield _sample(line, f"{path}:{number}", options)
        except ValueError as error:
            yield Finding(str(error), where=f"{path}:{number}")


def _sample(line: bytes, source: str, options: TaskOptions) -> Sample:
    """Return the sample in a line. Raises ValueError with the fault."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    missing = [f for f in (options.prompt_field, options.answer_field) if row.get(f) is None]
    if missing:
        fields = ", ".join(map(repr, missing))
        has = ", ".join(repr(name) for name, value in row.items() if value is not None)
        raise ValueError(f"no {fields} (the line has {has or ('only nulls' if row else 'no fields')})")
    prompt, messages = _prompt(row[options.prompt_field], options.prompt_field)
    answer = row[options.answer_field]
    if not isinstance(answer, str):
        answer = json.dumps(answer)
    if not answer and options.verifier in VERIFIERS.names():
        raise ValueError(f"{options.answer_field!r} is empty")
    if options.verifier == "numeric" and last_number(answer) is None:
        raise ValueError(f"the answer {answer!r} has no number in it, as the verifier 'numeric' needs")
    if options.verifier == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            raise ValueError(f"the answer {answer!r} is not a regular expression: {error}") from error
    group = row.get("group")
    return Sample(0, prompt, answer, "" if group is None else str(group), messages, source)


def _prompt(value: Any, field: str) -> tuple[str, list[Message] | None]:
    """Return the prompt as text and, if it is a chat, its messages."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{field!r} is empty")
        return value, None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field!r} is neither text nor a list of chat messages")
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"a message in {field!r} lacks 'role' and 'content' as text")
    return value[-1]["content"], value


def _identity(sample: Sample) -> str:
    return sample.prompt if sample.messages is None else json.dumps(sample.messages, sort_keys=True)
