"""The generated references are fresh, and the JSON Schema agrees with the loader."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlctl.config import load_config
from rlctl.config.keytable import key_table
from rlctl.config.profiles import profile_names
from rlctl.config.reference import REFERENCE, SCHEMA, key_reference, render_reference, render_schema
from rlctl.errors import FindingsError

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(json.loads((ROOT / SCHEMA).read_text()))


def test_generated_files_are_fresh() -> None:
    text = (ROOT / REFERENCE).read_text()
    assert text == render_reference(text), "run: python -m rlctl.config.reference"
    assert (ROOT / SCHEMA).read_text() == render_schema(), "run: python -m rlctl.config.reference"


def test_every_key_is_explained() -> None:
    text = key_reference()
    for path, spec in key_table().items():
        assert f"| `{path}` |" in text
        assert len(spec.doc) > 10
        assert spec.doc.endswith(".")


def test_the_schema_is_a_schema_and_takes_every_profile() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    for name in profile_names():
        VALIDATOR.validate(yaml.safe_load(files("rlctl.profiles").joinpath(f"{name}.yaml").read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "run: {steps: 3}",
        "run: {steps: '${run.seed}'}",
        "run:",
        "trainer: {optimizer: {lr: 1e-5}}",
        "trainer: {mini_batch_prompts: null}",
        "sync: {bucket_size: 512MiB, timeout: 1h30m, commit: staged}",
        "task: {verifier: null}",
        "run: {deterministic: on}",
        "model: {lora: {target_modules: [a, b]}}",
        "run: {setps: 3}",
        "runn: {steps: 3}",
        "run: {steps: eight}",
        "run: {steps: -3}",
        "rollout: {top_p: 0}",
        "rollout: {top_p: 2.0}",
        "sync: {bucket_size: 3 parsec}",
        "sync: {commit: stagd}",
        "run: {deterministic: perhaps}",
        "model: {lora: {target_modules: a}}",
        "run: 3",
    ],
)
def test_the_schema_and_the_loader_agree(text: str, tmp_path: Path) -> None:
    document: Any = yaml.safe_load(text)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    try:
        load_config(files=[str(file)], env={})
        accepted = True
    except FindingsError:
        accepted = False
    assert VALIDATOR.is_valid(document) == accepted


def test_the_examples_in_the_documentation_load(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / REFERENCE).read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        file = tmp_path / "example.yaml"
        file.write_text(block)
        load_config(files=[str(file)], env={})
