"""What a stream is taken to be able to show."""

from __future__ import annotations

import io

import pytest

from rlctl.report.terminal import Terminal


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Pipe(Tty):
    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("stream", "environment", "color", "moving"),
    [
        (Tty(), {"TERM": "xterm"}, True, True),
        (Tty(), {}, True, True),
        (Tty(), {"TERM": "dumb"}, False, False),
        (Tty(), {"NO_COLOR": "1"}, False, True),
        (Tty(), {"NO_COLOR": ""}, True, True),
        (Tty(), {"CI": "true"}, True, False),
        (Tty(), {"CI": "1", "NO_COLOR": "1"}, False, False),
        (Tty(), {"CI": "false"}, True, True),
        (Tty(), {"TERM": "dumb", "FORCE_COLOR": "1"}, True, False),
        (Pipe(), {"TERM": "xterm"}, False, False),
        (Pipe(), {"FORCE_COLOR": "1"}, True, False),
        (Pipe(), {"FORCE_COLOR": "0"}, False, False),
        (Pipe(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        (Pipe(), {"GITHUB_ACTIONS": "true", "CI": "true"}, False, False),
    ],
)
def test_color_and_motion(stream: io.StringIO, environment: dict[str, str], color: bool, moving: bool) -> None:
    terminal = Terminal.of(stream, "auto", environment)
    assert (terminal.color, terminal.moving) == (color, moving)


def test_the_flag_wins_over_the_environment() -> None:
    assert Terminal.of(Pipe(), "always", {"NO_COLOR": "1"}).color
    assert not Terminal.of(Tty(), "never", {"FORCE_COLOR": "1"}).color
    assert not Terminal.of(Pipe(), "always", {}).moving


def test_paint_and_characters() -> None:
    assert Terminal.of(Pipe(), "always", {}).paint("x", "red", "bold") == "\x1b[31;1mx\x1b[0m"
    assert Terminal.of(Pipe(), "never", {}).paint("x", "red") == "x"
    for encoding, known in (("utf-8", True), ("ascii", False), ("latin-1", False), (None, False), ("odd", False)):
        stream = Pipe()
        stream.encoding = encoding  # type: ignore[assignment]
        assert Terminal.of(stream, "auto", {}).unicode is known
