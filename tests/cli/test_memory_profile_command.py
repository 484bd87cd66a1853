"""``rlctl memory-profile`` as people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.root import main
from rlctl.config import list_profiles
from rlctl.report.memory import memory_chart
from rlctl.report.plots import can_plot


def document(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["memory-profile", "--json", *words]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_run_that_does_not_fit_exits_4_and_says_what_would_help(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "8xH100-colocate", "--model", "llama-3.1-70b")
    found = document(capfd, *words, code=4)
    assert found["fits"] is False
    assert found["peak"]["bytes"] > found["limit_bytes"] == 80 * 10**9
    saved = [item["saved_bytes"] for item in found["advice"]]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 0
    change = found["advice"][0]["change"]
    better = document(capfd, *words, *change.split(), code=4)
    assert found["peak"]["bytes"] - better["peak"]["bytes"] == saved[0]


def test_a_run_that_fits(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "--profile", "8xH100-colocate", "--model", "qwen3-0.6b", "rollout.max_new_tokens=1024")
    assert found["fits"] is True
    assert found["advice"] == []
    assert len(found["ranks"]) == 8
    for phase in found["phases"]:
        assert sum(phase["parts"].values()) == phase["predicted_bytes"]
    largest = {item["key"]: item for item in found["largest"]}
    tokens = largest["rollout.max_new_tokens"]
    assert tokens["most"] > tokens["now"] == 1024
    # Beyond it the longest sequence no longer fits into the largest micro-batch.
    more = f"rollout.max_new_tokens={int(tokens['most'] * 1.02)}"
    found = document(capfd, "--profile", "8xH100-colocate", "--model", "qwen3-0.6b", more, code=2)
    assert "cannot hold the longest sequence" in str(found["error"])


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000, '{"model_type": "qwen3", "model_type": 1}', "\x00"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_model_folder_exits_2_with_a_remedy(
    name: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    error = document(capfd, "--model", str(tmp_path), code=2)["error"]
    assert str(tmp_path / name) in str(error)
    assert "download it again" in str(error)


def test_a_profile_that_suits_the_machine_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "--profile", "auto", "--model", "cycle-tiny")
    assert found["profile"] in {info.name for info in list_profiles()}


@pytest.mark.parametrize("info", list_profiles(), ids=lambda info: str(info.name))
def test_every_profile_and_its_chart(info: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory-profile", "--profile", info.name, "--model", "qwen3-0.6b"]) in (0, 4)
    text = capfd.readouterr().out
    assert "\x1b" not in text
    lines = text.splitlines()
    legend = next(number for number, line in enumerate(lines) if line.startswith("W trainer weights"))
    assert max(map(len, lines[2 : legend + 2])) <= 80
    assert any(line.startswith("  forward backward") for line in lines[2:legend])


def test_more_ranks_than_kv_heads_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "64xH100-separate", "--model", "qwen2.5-0.5b", "placement.replica_tp=7")
    assert main(["memory-profile", *words]) == 2  # 2 kv heads do not go into 7 ranks
    capfd.readouterr()
    words = ("--profile", "16xH100-separate", "--model", "qwen3-8b", "placement.replica_tp=8", "placement.replicas=1")
    found = document(capfd, *words, "rollout.max_new_tokens=512")
    assert not any("times" in note for note in found["notes"])
    words = (
        "--profile",
        "16xH100-separate",
        "--model",
        "llama-3.1-70b",
        "placement.replica_tp=16",
        "cluster.devices_per_node=16",
    )
    found = document(capfd, *words, "placement.replicas=1", code=4)
    assert any("kept 2 times" in note for note in found["notes"])


def test_a_model_that_is_not_known_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "--model", "someone/unheard-of", code=2)
    assert "qwen3-8b" in found["error"]["fix"]


def test_it_is_quick_and_loads_no_torch() -> None:
    program = (
        "import sys, time; from rlctl.cli.root import main; begin = time.process_time();"
        "code = main(['memory-profile', '--profile', '8xH100-colocate', '--model', 'qwen3-8b', '--json']);"
        "print(code, time.process_time() - begin, [m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    code, seconds, loaded = done.stdout.splitlines()[-1].split(maxsplit=2)
    assert (code, loaded) == ("0", "[]")
    assert float(seconds) < 3


def test_the_picture(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "memory.png"
    code = main(["memory-profile", "--plot", str(file)])
    if can_plot():
        assert code == 0
        assert file.read_bytes().startswith(b"\x89PNG")
    else:
        assert code == 3
    capfd.readouterr()


def test_a_bar_is_as_long_as_its_sum() -> None:
    from rlctl.memory.estimate import Estimate, PhaseMemory

    parts = {"trainer_weights": 30, "optimizer": 1, "gradients": 1, "logits": 68}
    phases = (PhaseMemory("one", "shared", 0, 100, parts), PhaseMemory("two", "shared", 0, 50, {"kv_cache": 50}))
    first, second = memory_chart(Estimate((), phases, 0), width=80).splitlines()[1:3]
    assert len(first) == 80 - 1
    assert first.count("W") == round(first.count("L") * 30 / 68) == 13
    assert second.count("K") == pytest.approx((first.count("W") + first.count("L")) / 2, abs=1)


def test_a_picture_takes_no_other_files_place(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link.png"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "picture.png")
    for path in (pipe, link):
        assert main(["memory-profile", "--plot", str(path)]) == (2 if can_plot() else 3)
    assert pipe.is_fifo()
    assert link.is_symlink()
    capfd.readouterr()
