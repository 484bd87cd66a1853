"""What of the weight sync only a GPU can show: handles between two processes, digests, the rate beside a plain copy.

    PYTHONPATH=. python benchmarks/gpu_check_sync.py

One GPU and four minutes do; with two, ``nccl`` and ``kimi`` run as well. Prints one JSON document. Exit 0 when every
check held, 4 when one did not, 3 without a GPU. ``--device cpu`` takes the same steps over shared memory of the host:
it shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rlctl.errors import EXIT_CHECK, EXIT_UNAVAILABLE, RlctlError
from rlctl.process import run_token
from rlctl.sync.deadline import Deadline
from rlctl.sync.digest import Verify
from rlctl.sync.engine import EngineOptions, Role
from rlctl.sync.local import LocalMember, LocalMembers
from rlctl.sync.manager import SyncManager
from rlctl.sync.member import MemberHost, described
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import Group
from rlctl.sync.report import SyncReport
from rlctl.sync.states import Commit

MEMBER, WEIGHTS = "rlctl.sync.member:serve", "benchmarks.gpu_check_sync:weights"
TENSOR = 64 << 20
# What all steps together may take.
SECONDS = 230.0
TIMEOUT = 30.0


def weights(mib: int, version: int, device: str) -> dict[str, torch.Tensor]:
    """Return ``mib`` of tensors of 64 MiB, a few odd ones, the same bits on every device."""
    made: dict[str, torch.Tensor] = {}
    for i in range(max(mib // (TENSOR >> 20), 1)):
        numbers = torch.arange(min(mib << 20, TENSOR) // 8, dtype=torch.int64)
        numbers.mul_(6364136223846793005).add_(1000003 * version + i)
        made[f"layer.{i}"] = numbers.view(torch.bfloat16)
    odd = torch.arange(version, version + 301, dtype=torch.uint8)
    made |= {"empty": torch.empty(0, 4), "scalar": odd[0].clone(), "odd": odd, "transposed": odd[:300].view(20, 15).t()}
    return {name: tensor.to(device) for name, tensor in made.items()}


class Quiet:
    """A replica without requests."""

    def __init__(self, replica: str) -> None:
        self.replica = replica

    def interrupt(self, how: str, version: int, deadline: Deadline) -> None: ...
    def release_kv(self, deadline: Deadline) -> None: ...
    def restore_kv(self, deadline: Deadline) -> None: ...
    def resume(self, version: int, deadline: Deadline) -> None: ...
    def fence(self, reason: str) -> None: ...


class Pair:
    """A trainer and a rollout worker; each a process, or both in this one."""

    def __init__(
        self,
        backend: str,
        device: str,
        mib: int,
        *,
        verify: Verify = "full",
        commit: Commit = "inplace",
        env: Sequence[Mapping[str, str]] = ({}, {}),
        here: bool = False,
    ) -> None:
        self.mib, self.device, self.version = mib, device, 0
        options = EngineOptions(bucket_size=128 << 20, timeout=TIMEOUT, token=run_token(), verify=verify, device=device)
        self.sides: list[Group] = []
        self.members: list[MemberProcess] = []
        roles: tuple[Role, Role] = ("trainer", "rollout")
        for role, its_env in zip(roles, env, strict=True):
            replica = "rollout 0" if role == "rollout" else ""
            if here:
                host = MemberHost()
                host.open(backend, role, 0, 1, asdict(options))
                self.sides.append(LocalMembers([LocalMember(f"{role} 0", host, replica)]))
                continue
            held = role == "rollout"
            member = MemberProcess(f"{role} 0", MEMBER, replica=replica, holds_weights=held, restart=True, env=its_env)
            group = MemberProcesses(role, [member], backend, options)
            group.open(90)
            self.members.append(member)
            self.sides.append(group)
        self._load(1, 0)
        self.manager = SyncManager(
            self.sides[0],
            self.sides[1],
            [Quiet("rollout 0")],
            engine=backend,
            policy=SyncPolicy(timeout=TIMEOUT, commit=commit),
        )

    def sync(self, *, check: bool = True) -> SyncReport:
        """Bring the next version; compare what arrived with what the host makes of it."""
        self.version += 1
        if check or self.version == 1:
            self._load(0, self.version)
        report = self.manager.sync(self.version)
        if check:
            expected = {n: described(n, t) for n, t in weights(self.mib, self.version, "cpu").items()}
            assert self._ask(1, "digest") == expected, f"version {self.version} arrived with other bits"
        return report

    def close(self) -> None:
        """End the processes, or close the engines that are here."""
        for side in self.sides:
            if isinstance(side, MemberProcesses):
                side.close()
            else:
                side.start("close", {0: {}}, Deadline(5))[0].result()

    def _load(self, side: int, version: int) -> None:
        arguments = {"mib": self.mib, "version": version, "device": self.device}
        self._ask(side, "load", factory=WEIGHTS, arguments=arguments)

    def _ask(self, side: int, command: str, **arguments: Any) -> Any:
        return self.sides[side].start(command, {0: arguments}, Deadline(60))[0].result()


def copy_seconds(device: str, nbytes: int) -> float:
    """Return what a copy of ``nbytes`` inside the device's memory takes, the least of five."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return min(_timed(lambda: target.copy_(source), device) for _ in range(5))


def _timed(act: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    act()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def exact(backend: str, device: str, mib: int, **options: Any) -> dict[str, Any]:
    """Three syncs, every bit compared."""
    pair = Pair(backend, device, mib, **options)
    try:
        reports = [pair.sync() for _ in range(3)]
    finally:
        pair.close()
    return {"syncs": 3, "tensors": reports[0].tensors, "bytes": reports[0].bytes}


def rate(backend: str, device: str, mib: int, **options: Any) -> dict[str, Any]:
    """Nine syncs without verification, in turns with a copy inside the device."""
    pair = Pair(backend, device, mib, verify="off", **options)
    try:
        pair.sync()
        copies, syncs = list[float](), list[float]()
        for _ in range(9):
            copies.append(copy_seconds(device, mib << 20))
            report = pair.sync(check=False)
            syncs.append(report.phases["transfer"])
    finally:
        pair.close()
    copy_s, sync_s = statistics.median(copies), statistics.median(syncs)
    gib = report.bytes / (1 << 30)
    return {"sync_gib_per_s": gib / sync_s, "copy_gib_per_s": gib / copy_s, "ratio": copy_s / sync_s}


def killed(device: str, mib: int) -> dict[str, Any]:
    """A receiver that is killed between two syncs: the next one brings it everything, over a new handle."""
    pair = Pair("ipc", device, mib)
    try:
        pair.sync()
        os.kill(pair.members[1].pid, signal.SIGKILL)
        pair.manager.lost("rollout 0", "it was killed")
        return {"seconds": pair.sync().seconds}
    finally:
        pair.close()


def memory_left(act: Callable[[], object]) -> dict[str, Any]:
    """The device memory that other processes leave behind once they have ended."""
    act()
    time.sleep(1)
    before = torch.cuda.mem_get_info()[0]
    act()
    time.sleep(1)
    left = before - torch.cuda.mem_get_info()[0]
    assert left <= 64 << 20, f"{left} bytes of device memory were not given back"
    return {"bytes": left}


def steps(device: str, mib: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what is to be done, in order."""
    small = min(mib, 256)
    way: dict[str, Any] = {}
    plan: dict[str, Callable[[], dict[str, Any]]] = {
        "ipc exact": lambda: exact("ipc", device, small, **way),
        "ipc staged exact": lambda: exact("ipc", device, small, commit="staged"),
        "naive exact, one process": lambda: exact("naive", device, small, here=True),
        "ipc rate": lambda: rate("ipc", device, mib),
        "naive rate, one process": lambda: rate("naive", device, mib, here=True),
        "ipc receiver killed": lambda: killed(device, small),
    }
    if device == "cpu":
        return plan
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"}
    plan["ipc exact, expandable segments"] = lambda: exact("ipc", device, small, env=(expandable, expandable))
    plan["ipc memory given back"] = lambda: memory_left(lambda: exact("ipc", device, small))
    if torch.cuda.device_count() > 1:
        ids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(2)]
        apart = [{"CUDA_VISIBLE_DEVICES": one} for one in ids]
        turned = [{"CUDA_VISIBLE_DEVICES": ",".join(order)} for order in (ids, ids[::-1])]
        plan["ipc exact, devices numbered otherwise"] = lambda: exact(
            "ipc", "cuda:0", small, env=[turned[0], turned[0]]
        )
        for backend in ("nccl", "kimi"):
            plan[f"{backend} exact"] = lambda b=backend: exact(b, "cuda", small, env=apart)  # type: ignore[misc]
            plan[f"{backend} rate"] = lambda b=backend: rate(b, "cuda", mib, env=apart)  # type: ignore[misc]
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run every step; print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=2048, help="weights of the steps that measure")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("gpu_check_sync: no CUDA device is visible, so nothing was run", file=sys.stderr)
        return EXIT_UNAVAILABLE
    end = Deadline(SECONDS)
    results: dict[str, dict[str, Any]] = {}
    for name, step in steps(args.device, args.mib).items():
        begin = time.monotonic()
        if end.remaining < TIMEOUT:
            results[name] = {"ok": False, "error": f"not begun: {end.elapsed:.0f} s had passed"}
            continue
        try:
            results[name] = {"ok": True, **step()}
        except (RlctlError, AssertionError, RuntimeError) as error:  # the other steps still tell something
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["took_s"] = time.monotonic() - begin
    on_gpu = args.device != "cpu"
    document = {
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "mib": args.mib,
        "seconds": end.elapsed,
        "checks": results,
        "ok": all(result["ok"] for result in results.values()),
    }
    print(json.dumps(document, indent=1))
    return 0 if document["ok"] else EXIT_CHECK


if __name__ == "__main__":
    sys.exit(main())
