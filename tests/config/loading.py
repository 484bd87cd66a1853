"""Configurations of documents in a test."""

from pathlib import Path

import pytest

from rlctl.config import Resolved, load_config
from rlctl.errors import EXIT_USAGE, FindingsError


def load(
    tmp_path: Path, text: str = "", *, env: dict[str, str] | None = None, profile: str | None = None, **kwargs: object
) -> Resolved:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(profile, files=[str(file)], env=env or {}, **kwargs)  # type: ignore[arg-type]


def faults(tmp_path: Path, text: str = "", **kwargs: object) -> list[str]:
    with pytest.raises(FindingsError) as caught:
        load(tmp_path, text, **kwargs)  # type: ignore[arg-type]
    assert caught.value.exit_code == EXIT_USAGE
    return [str(finding).replace(str(tmp_path) + "/", "") for finding in caught.value.findings]
