"""Loading a causal LM with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from rlctl.errors import UsageError


@dataclass
class LoadedModel:
    """A model in float32 on the CPU, with its tokenizer, and what both were loaded from."""

    model: Any
    tokenizer: Any
    source: str


def load_model(source: str, *, trust_remote_code: bool, where: str = "model.path") -> LoadedModel:
    """Load a causal LM and its tokenizer. Raises UsageError when the folder cannot be read as one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # Its bars and hints would land in the middle of the run's own lines.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    what = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        what = "causal language model"
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        # Some of these go on over several lines: the first says what, the others what one might install.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"the {what} of {source} does not load: {reason[:400]}", where=where) from error
    return LoadedModel(model=model, tokenizer=tokenizer, source=source)
