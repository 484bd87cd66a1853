"""A configuration survives being shown, saved and read again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.config import Resolved, from_json, load_config, read_saved, show_config, to_json
from rlctl.config.interpolation import escape
from rlctl.config.keytable import KeySpec, flatten, key_table, set_value
from rlctl.config.values import from_python
from rlctl.errors import FindingsError, UsageError
from rlctl.schema import Config

TEXTS = [
    "", " ", "null", "~", "no", "true", "1e-5", "a b", "#x", "a: b", "- x", "'q'", "\"", "\\", "${a}", "\\${a}",
    "\\\\${b} \\", "$", "\u00e9", "\u65e5\u672c", "😀", "\n", "\t", "\u0007", "\u0085", "\u2028", "\ufeff", "[a]", "{",
    "*x", "&x", "!t", "%", "@", "`", "???", "---", "x" * 4000,
]  # fmt: skip


def random_value(spec: KeySpec, rng: random.Random) -> Any:
    if spec.optional and rng.random() < 0.3:
        return None
    if spec.kind == "choice":
        return rng.choice(spec.choices)
    if spec.kind == "bool":
        return rng.random() < 0.5
    if spec.kind == "str":
        return rng.choice(TEXTS)
    if spec.record is not None:
        return [
            spec.record(**{field.path: random_value(field, rng) for field in spec.fields})
            for _ in range(rng.randint(0, 3))
        ]
    if spec.kind == "list":
        return [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))]
    low = max(spec.low if spec.low is not None else -1e6, spec.above if spec.above is not None else -1e6)
    high = spec.high if spec.high is not None else 10.0 ** rng.randint(1, 15)
    if spec.kind == "int":
        large = [number for number in (1 << 30, 1 << 42) if spec.high is None or number <= spec.high]
        return rng.choice([int(low) + (spec.above is not None), rng.randint(int(low) + 1, int(high)), *large])
    value = low + (high - low) * rng.random() * 10.0 ** -rng.randint(0, 12)
    return value if value > low or spec.above is None else high


@pytest.mark.parametrize("seed", range(40))
def test_show_and_save_round_trip_any_configuration(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    config = Config()
    for path, spec in key_table().items():
        set_value(config, path, random_value(spec, rng))
    origins = {path: rng.choice(["default", "--steps", "a\nb\udcff", "config.yaml:3"]) for path in key_table()}
    shown = show_config(Resolved(config, origins, "mine"))
    file = tmp_path / "shown.yaml"
    file.write_text(shown, "utf-8")
    again = load_config(files=[str(file)], env={})
    assert flatten(again.config) == flatten(config)
    assert all(
        type(a) is type(b) for a, b in zip(flatten(again.config).values(), flatten(config).values(), strict=True)
    )
    assert (
        again.origin("run.steps")
        == f"{file}:{1 + next(i for i, x in enumerate(shown.splitlines()) if '  steps:' in x)}"
    )

    (tmp_path / "config.json").write_text(json.dumps(to_json(again)))
    saved = read_saved(tmp_path / "config.json")
    assert flatten(saved.config) == flatten(config)
    assert dict(saved.origins) == dict(again.origins)
    assert saved.notes == ()


def test_other_readers_of_yaml_see_the_same_numbers() -> None:
    shown = yaml.safe_load(show_config(load_config(env={}, overrides=["trainer.optimizer.lr=1e-5"])))
    assert shown["trainer"]["optimizer"]["lr"] == 1e-5
    assert shown["trainer"]["optimizer"]["eps"] == 1e-8
    assert shown["sync"] == {
        "backend": "naive", "bucket_size": "512MiB", "timeout": "300s", "commit": "inplace", "verify": "full",
        "delta": False,
    }  # fmt: skip


def test_show_names_the_origin_of_each_value() -> None:
    lines = show_config(load_config("cpu-quickstart", env={}, overrides=["run.seed=7"])).splitlines()
    assert any(x.startswith("  seed: 7 ") and x.endswith("# argument run.seed=7") for x in lines)
    assert any(x.startswith("  device: cpu ") and "# profile cpu-quickstart (cpu-quickstart.yaml:" in x for x in lines)
    assert any(x.startswith("  steps: 60 ") and x.endswith("# default") for x in lines)


def test_saved_configuration_of_another_release() -> None:
    document = to_json(load_config("cpu-quickstart", env={}, overrides=["run.steps=9"]))
    document["config"]["run"]["retired"] = 3
    document["config"]["gone"] = {"a": {"b": 1}}
    del document["config"]["task"]
    document["origins"] = None
    read = from_json(document, "config.json")
    assert read.config.run.steps == 9
    assert read.config.task == Config().task
    assert [str(note) for note in read.notes] == [
        "config.json: run.retired: not a key of this release; left out",
        "config.json: gone.a.b: not a key of this release; left out",
    ]
    document["config"]["run"]["steps"] = "many"
    document["config"]["sync"]["commit"] = None
    with pytest.raises(FindingsError) as caught:
        from_json(document, "config.json")
    assert len(caught.value.findings) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": "rlctl.config/2", "config": {}}', '{"schema": "rlctl.config/1", "config": 3}'],
)
def test_files_that_are_no_saved_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_saved(tmp_path / "config.json")
    with pytest.raises(UsageError):
        read_saved(tmp_path / "gone.json")


def test_escaping_is_undone_by_interpolation(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice(["\\", "$", "{", "}", "a", "${", " "]) for _ in range(rng.randint(0, 8)))
        resolved = load_config(env={}, overrides=[f"task.name='{escape(text)}'"])
        assert resolved.config.task.name == text


def test_nothing_but_plain_values_becomes_a_node() -> None:
    with pytest.raises(TypeError, match="set cannot be a configuration value"):
        from_python({1})
