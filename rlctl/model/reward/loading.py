"""Loading a reward model: a sequence classifier with one output, or one of several that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl.errors import UsageError
from rlctl.model.descriptions import check_outputs
from rlctl.model.loading import loading_errors, quiet_transformers

WHERE = "reward_model.path"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_classifier(source: str, *, dtype: str, output: int | None, trust_remote_code: bool) -> Any:
    """Load a transformers sequence classifier on the CPU, in ``dtype``, frozen.

    Raises:
        UsageError: the folder does not load as one, lacks its head, or has several outputs and none is named.
    """
    from transformers import AutoModelForSequenceClassification

    quiet_transformers()
    with loading_errors("sequence classifier", source, WHERE):
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise UsageError(
            f"{source} has no weights for {', '.join(missing[:3])}: scores would be random",
            where=WHERE,
            fix="give a model that was trained and saved as a sequence classifier (...ForSequenceClassification)",
        )
    check_outputs(model.config.num_labels, output)
    return model.requires_grad_(False).eval()


def load_config(source: str, *, trust_remote_code: bool) -> Any:
    """Return the (inner) configuration of a reward model: its vocabulary and positions. Raises UsageError."""
    from transformers import AutoConfig

    with loading_errors("configuration", source, WHERE):
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()


def load_tokenizer(source: str, *, trust_remote_code: bool) -> Any | None:
    """Return the reward model's own tokenizer, None where its folder brings none. Raises UsageError."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        # transformers would make up one with an empty vocabulary.
        return None
    quiet_transformers()
    with loading_errors("tokenizer", source, WHERE):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
