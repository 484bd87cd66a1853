"""A model and prompts for a measurement: of the sizes that a run would have, with values that mean nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset_config, preset_of_hub_name
from rlctl.keys.shapes import tensor_shapes
from rlctl.keys.shard_layout import TensorShape, plan_shards
from rlctl.keys.shard_writer import ShardWriter
from rlctl.tasks.builtin_models import builtin_model_path

PROMPTS = 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
_SCALE = 0.02


def measurable_model(path: str, into: Path) -> str:
    """Return a folder that ``from_pretrained`` loads for ``model.path``.

    A folder with weights, and the built-in model, are taken as they are. A config.json, a folder with no more than
    that, or a preset becomes a model of random weights in ``into``, with the built-in tokenizer.

    Raises UsageError when the model is not known, or smaller than the tokenizer.
    """
    builtin = builtin_model_path(path)
    if builtin is not None:
        return str(builtin)
    given = Path(path).expanduser()
    if given.is_dir() and any(given.glob("*.safetensors")):
        return str(given)
    config = _config(given, path)
    _write(into, config, ModelSpec.from_config(config, where=path))
    return str(into)


def _config(given: Path, path: str) -> dict[str, Any]:
    file = given / "config.json" if given.is_dir() else given
    if file.is_file():
        found = json.loads(file.read_text())
        assert isinstance(found, dict)  # the spec was read from it before
        return found
    return preset_config(preset_of_hub_name(path) or path)


def _write(folder: Path, config: dict[str, Any], spec: ModelSpec) -> None:
    import torch

    tokenizer = builtin_model_path("cycle-tiny")
    assert tokenizer is not None
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    tokens = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    if spec.vocab < tokens:
        raise UsageError(f"the model has {spec.vocab} token ids, the tokenizer {tokens}", where="--model")
    (folder / "config.json").write_text(json.dumps(config))
    layout = plan_shards(TensorShape(name, "F32", shape) for name, shape in tensor_shapes(spec).items())
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, layout) as writer:
        for name, placed in layout.placed.items():
            values = torch.ones(placed.tensor.shape)
            if "norm" not in name:
                values = torch.randn(placed.tensor.shape, generator=generator) * _SCALE
            writer.write(name, values)
        writer.finish()


def write_prompts(file: Path, model: str, tokens: int) -> None:
    """Write ``PROMPTS`` different prompts of ``tokens`` tokens each under the tokenizer of ``model``, as JSONL."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = [word for word in (tokenizer.decode([i]) for i in range(min(len(tokenizer), 4096))) if word.strip()]
    with file.open("w") as out:
        for number in range(PROMPTS):
            text = ""
            for place in range(8 * tokens):
                longer = text + words[(number * 31 + place * (number + 7)) % len(words)]
                if len(tokenizer(longer)["input_ids"]) > tokens:
                    break
                text = longer
            out.write(json.dumps({"prompt": text, "answer": "1"}) + "\n")
