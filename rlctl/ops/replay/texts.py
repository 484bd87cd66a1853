"""Token ids as text again, by the run's own tokenizer, without its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.model.locate import find_model
from rlctl.ops.replay.history import History
from rlctl.tasks.builtin_models import builtin_model_path

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


def decoder_of(history: History) -> Decode | None:
    """Return what decodes a run's tokens, special ones shown; None where its tokenizer is not at hand."""
    for folder in _folders(history):
        file = folder / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # noqa: BLE001 - it raises nothing more precise
                log.warning("%s: not a tokenizer: %s; the rest is used", file, error)
                continue
            return lambda ids: str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))
    return None


def _folders(history: History) -> list[Path]:
    folders = [history.path / "final"]
    path = history.resolved.config.model.path
    try:
        source = find_model(path, builtin_model_path(path), ask_hub=False)
    except RlctlError:  # it is gone, or on another machine: ids are shown as numbers
        return folders
    if Path(source).is_dir():
        return [*folders, Path(source)]
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, "tokenizer.json")
    return [*folders, Path(cached).parent] if isinstance(cached, str) else folders
