"""What vLLM finds of rlctl, whether or not vLLM is here."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from rlctl.rollout.vllm import names, plugin

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_the_plugin() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = declared["rlctl"].partition(":")
    assert getattr(import_module(module), function) is plugin.register


def test_it_is_light_and_never_raises() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None; from rlctl.rollout.vllm import plugin; "
        "assert 'torch' not in sys.modules; plugin.register(); plugin.register(); print(len(plugin.problems))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "4"
    assert "rlctl's vLLM plugin: engine core" in ran.stderr


def test_it_touches_only_engines_that_rlctl_updates() -> None:
    def config(backend: str | None, extension: str = "") -> SimpleNamespace:
        transfer = None if backend is None else SimpleNamespace(backend=backend)
        parallel = SimpleNamespace(worker_extension_cls=extension)
        return SimpleNamespace(weight_transfer_config=transfer, parallel_config=parallel)

    ours = [config("rlctl-gloo"), config(None, names.EXTENSION), config("nccl", names.EXTENSION)]
    others = [None, config(None), config("nccl"), config("gloo"), config(None, "another.Extension")]
    assert [names.updated_by_rlctl(c) for c in (*ours, *others)] == [True] * 3 + [False] * 5


def test_the_extension_is_where_its_name_says() -> None:
    module, _, attribute = names.EXTENSION.rpartition(".")
    extension = getattr(import_module(module), attribute)
    assert all(n.startswith("rlctl_") for n in dir(extension) if not n.startswith("__"))
