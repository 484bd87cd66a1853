"""Finding profiles: the shipped ones by name, a user's own by path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from rlctl.errors import UsageError
from rlctl.registry import suggest

DEFAULT_PROFILE = "cpu-quickstart"


@dataclass(frozen=True)
class ProfileInfo:
    """One shipped profile: its name and when to use it (the first comment of its file)."""

    name: str
    summary: str


def profile_names() -> list[str]:
    """Return the names of the shipped profiles, CPU ones first, then by number of devices."""
    found = [f.name.removesuffix(".yaml") for f in files("rlctl.profiles").iterdir() if f.name.endswith(".yaml")]
    return sorted(found, key=_by_size)


def _by_size(name: str) -> tuple[int, int, str]:
    digits = name.split("x")[0]
    return (1, int(digits), name) if digits.isdigit() else (0, 0 if name == DEFAULT_PROFILE else 1, name)


def list_profiles() -> list[ProfileInfo]:
    """Return every shipped profile with the sentence on when to use it."""
    return [ProfileInfo(name, _summary(read_profile(name))) for name in profile_names()]


def _summary(text: str) -> str:
    first = text.lstrip().splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def is_path(profile: str) -> bool:
    """Whether a ``--profile`` value names a file rather than a shipped profile."""
    return "/" in profile or profile.endswith((".yaml", ".yml"))


def read_profile(name: str) -> str:
    """Return the text of a shipped profile. Raises UsageError with a suggestion."""
    names = profile_names()
    if name not in names:
        near = suggest(name, names)
        hint = f"did you mean {near!r}? " if near else ""
        fix = f"{hint}shipped: {', '.join(names)}; or give a path: ./{name}.yaml"
        raise UsageError(f"unknown profile {name!r}", where="--profile", fix=fix)
    return files("rlctl.profiles").joinpath(f"{name}.yaml").read_text("utf-8")
