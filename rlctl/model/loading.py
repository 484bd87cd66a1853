"""Loading a causal LM with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from rlctl.errors import UsageError
from rlctl.model_making import ONE_AT_A_TIME


@dataclass
class LoadedModel:
    """A model in float32 on the CPU, with its tokenizer, and what both were loaded from."""

    model: Any
    tokenizer: Any
    source: str


def load_model(source: str, *, trust_remote_code: bool, where: str = "model.path", head: bool = True) -> LoadedModel:
    """Load a causal LM and its tokenizer.

    Args:
        source: folder or hub name.
        trust_remote_code: let the folder run its own code.
        where: key that it stands under, for messages.
        head: whether the head on top is needed too, not the body alone.

    Raises:
        UsageError: the folder cannot be read as one, or lacks weights that are needed.
    """
    from transformers import AutoTokenizer

    quiet_transformers()
    with loading_errors("tokenizer", source, where):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = load_weights(source, trust_remote_code=trust_remote_code, where=where, head=head)
    return LoadedModel(model=model, tokenizer=tokenizer, source=source)


def load_weights(source: str, *, trust_remote_code: bool, where: str = "model.path", head: bool = True) -> Any:
    """Load a causal LM in float32 on the CPU; see ``load_model``."""
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    with loading_errors("causal language model", source, where):
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = [name for name in sorted(found["missing_keys"]) if head or name.startswith(model.base_model_prefix + ".")]
    if missing:
        raise UsageError(
            f"{source} has no weights for {', '.join(missing[:3])}: they would be random",
            where=where,
            fix="give a model that was saved as a causal language model (...ForCausalLM)",
        )
    return model


def load_shapes(source: str, *, trust_remote_code: bool, where: str = "model.path") -> Any:
    """Load a causal LM without its weights, on the meta device; see ``load_model``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    with loading_errors("causal language model", source, where):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        with ONE_AT_A_TIME, torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def stop_tokens(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the ids that end a response: the generation config's, else the tokenizer's end of sequence."""
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def quiet_transformers() -> None:
    """Keep transformers' bars and hints from landing in the middle of the run's own lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def loading_errors(what: str, source: str, where: str) -> Iterator[None]:
    """Turn what ``from_pretrained`` may raise into a UsageError that says ``what`` of ``source`` does not load. One
    thread at a time is let in."""
    try:
        with ONE_AT_A_TIME:
            yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        # Some of these go on over several lines: the first says what, the others what one might install.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"the {what} of {source} does not load: {reason[:400]}", where=where) from error
