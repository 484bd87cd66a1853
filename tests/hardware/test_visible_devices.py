"""CUDA_VISIBLE_DEVICES: read as PyTorch reads it, resolved to devices, handed on to children."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlctl.hardware.link_graph import Gpu, MigDevice
from rlctl.hardware.rules.devices import child_devices, visible_devices
from rlctl.hardware.topo_dump import parse_topo
from rlctl.hardware.visible_devices import child_value, parse_visible, resolve_visible

GPUS = tuple(
    Gpu(f"GPU{i}", uuid=f"GPU-{u}") for i, u in enumerate(("5d5b", "5d7a", "e3b0", "0a11", "c4", "c5", "c6", "c7"))
)
MIG = parse_topo((Path(__file__).parent / "dumps" / "a100_2gpu_mig.txt").read_text()).gpus

PIECES = ["0", "1", "2", "7", "10", "63", "-1", "+1", "+", "", " ", "0 ", " 3", "1gpu2", "2ampere", "x", "GPU-",
          "GPU-5d", "GPU-5d5b", "GPU-e3b0", "MIG-", "MIG-GPU-5d/1/0", "MIG-c6d4", "all", "None", "0-3", "0;1", "0x1",
          "1e1", "'0'", "GPU-5D5B", "gpu-5d", "99999999999999999999", "\t1", "GPU-c4 "]  # fmt: skip


def test_random_values_agree_with_torchs_own_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    seed, compared = 4949, 0
    rng = random.Random(seed)
    while compared < 200:
        text = ",".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))
        if rng.random() < 0.3:
            text = "".join(rng.choice("0123,,GPUMIG-+ ax") for _ in range(rng.randint(0, 12)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        mine = parse_visible(text).entries
        try:
            theirs = torch.cuda._parse_visible_devices()
        except ValueError:
            assert "+" in text or "-" in text  # its reader fails on a sign alone
            continue
        compared += 1
        assert list(mine or ()) == theirs, (seed, text)
        if theirs and isinstance(theirs[0], str) and theirs[0].startswith("GPU-"):
            uuids = [str(gpu.uuid) for gpu in GPUS]
            ordinals = torch.cuda._transform_uuid_to_ordinals(theirs, uuids)
            assert resolve_visible(parse_visible(text), GPUS) == [uuids[i] for i in ordinals], (seed, text)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert parse_visible(None).entries is None


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("4,5", [4, 5]),
        ("8,0", []),
        ("0,9,1", [0]),
        ("GPU-e3", [2]),
        ("GPU-5d", []),
        ("GPU-5d5,GPU-5d7", [0, 1]),
        ("GPU-c4,GPU-c", [4]),
        ("GPU-c4,GPU-c4b", [4]),
    ],
)
def test_values_are_resolved_to_devices(text: str | None, seen: list[int]) -> None:
    assert resolve_visible(parse_visible(text), GPUS) == [GPUS[i].uuid for i in seen]


def test_mig_devices_by_id_by_prefix_and_in_the_old_form() -> None:
    first = MIG[0].mig[0].uuid
    assert resolve_visible(parse_visible(first[:8]), MIG) == [first]
    assert resolve_visible(parse_visible("MIG-"), MIG) == []
    old = f"MIG-{MIG[0].uuid}/1/0"
    assert resolve_visible(parse_visible(old), MIG) == [old]
    assert resolve_visible(parse_visible("MIG-GPU-none/1/0"), MIG) == []


@pytest.mark.parametrize(
    ("parent", "local", "value"),
    [
        ("4,5,6,7", range(4), "4,5,6,7"),
        ("4,5,6,7", [2, 3], "6,7"),
        ("GPU-c4,GPU-c7", [1], "GPU-c7"),
        (None, [0, 1], "0,1"),
        ("4,5", range(4), None),
        ("", [0], None),
    ],
)
def test_a_child_gets_entries_of_its_parents_list(parent: str | None, local: list[int], value: str | None) -> None:
    assert child_value(parent, local) == value


@pytest.mark.parametrize("gpus", [(), GPUS])
def test_a_child_that_counts_from_zero_lands_on_other_gpus(gpus: tuple[Gpu, ...]) -> None:
    wrong = child_devices("4,5,6,7", "0,1,2,3", gpus)
    assert wrong.status == "fail"
    assert "not the parent's" in wrong.message
    assert wrong.fix == "set 4,5,6,7: local number i is entry i of the parent's list"
    right = child_devices("4,5,6,7", "4,5,6,7", gpus)
    assert (right.status, "the same devices" in right.message) == ("ok", True)
    part = child_devices("4,5,6,7", "6", gpus)
    assert (part.status, "1 of the parent's 4" in part.message) == ("ok", True)


def test_a_child_by_ids_is_compared_by_ids() -> None:
    same = child_devices("4,5,6,7", "GPU-c7,GPU-c6,GPU-c5,GPU-c4", GPUS)
    assert (same.status, "the same devices" in same.message) == ("ok", True)
    assert child_devices("4,5", "GPU-5d5b", GPUS).status == "fail"
    assert child_devices("4,5", "GPU-5d5b", ()).status == "skipped"
    assert child_devices("4,5", "x", GPUS).status == "fail"
    assert child_devices(None, "3", GPUS).status == "ok"


@pytest.mark.parametrize(
    ("text", "status", "message", "fix"),
    [
        ("0,1", "ok", "shows 2 GPUs", ""),
        ("", "fail", "it is empty, which hides every device", "write 0,1,2"),
        ("all", "fail", "'all' is no number of a device", "NVIDIA_VISIBLE_DEVICES"),
        ("0-3", "fail", "'0-3' is read as 0; lists are written with commas", "write 0,1,2"),
        ("0;1", "fail", "'0;1' is read as 0; lists", "write"),
        ("1gpu", "warn", "'1gpu' is read as 1", "write"),
        ("0,0", "fail", "0 comes twice, which hides every device", "write"),
        ("'0,1'", "fail", '"\'0" is no number of a device: it and what is behind it (2 of 2 entries)', "write"),
        ("0,GPU-c4", "fail", "'GPU-c4' is no number of a device: it and what is behind it (1 of 2", "write"),
        ("GPU-c4,0", "fail", "'0' is no GPU-... id", "write"),
        ("GPU-c4, GPU-c5", "fail", "'GPU-c5' is no GPU-... id", "write"),
        ("0,8", "fail", "8 names no device or a second time one; 1 of 2 are seen; there are 8 GPUs", "nvidia-smi -L"),
        ("GPU-c", "fail", "the beginning of exactly one id", "nvidia-smi -L"),
    ],
)
def test_odd_values_are_pointed_out(text: str, status: str, message: str, fix: str) -> None:
    outcome = visible_devices({"CUDA_VISIBLE_DEVICES": text}, GPUS)[0]
    assert outcome.status == status, outcome
    assert message in outcome.message, outcome
    assert fix in (outcome.fix or ""), outcome


def test_too_few_devices_several_mig_devices_and_mixed_gpus() -> None:
    few = visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, GPUS, needed=4)
    assert "a node of the run takes 4" in few[0].message
    ids = ",".join(part.uuid for part in MIG[0].mig)
    assert "one MIG device" in visible_devices({"CUDA_VISIBLE_DEVICES": ids}, MIG)[0].message
    mixed = (Gpu("GPU0", name="NVIDIA A100"), Gpu("GPU1", name="NVIDIA T4"))
    assert [o.rule for o in visible_devices({}, mixed)] == ["visible-devices", "device-order"]
    assert [o.rule for o in visible_devices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, mixed)] == ["visible-devices"]
    assert MigDevice("1g.5gb", "MIG-1") not in MIG[0].mig


def test_a_number_of_thousands_of_digits_names_no_device() -> None:
    seen = parse_visible("9" * 5000 + ",0")
    assert seen.entries is not None
    assert seen.entries[0] == int("9" * 4000)
