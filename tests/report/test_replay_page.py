"""The page of a recorded run."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlctl.experience.records.columns import SegmentSpan
from rlctl.experience.records.reading import Round
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.ops.replay.history import read_history
from rlctl.ops.replay.samples import recorded_samples
from rlctl.ops.replay.showing import Shown, show_run
from rlctl.report.replay_page import page, save_page
from tests.ops.replay.told import write_run

EVIL = (
    "<script>document.title='run'</script><img src=http://canary.invalid/x onerror=alert(1)>&amp;</pre>"
    "\"'\u202e\x1b[31m"
)


def shown_with(folder: Path, prompt: str, response: str) -> Shown:
    """Return a run whose last step holds a sample with these texts."""
    history = read_history(write_run(folder))
    shown = show_run(history, [3, 4], 2)
    tokens = [0, 1, 2]
    row = Row(
        RequestKey(4, 0, 0), 4, [7], tokens, 1.0, np.array([-0.5, -0.1, -2.0], np.float32), np.array([2, 2, 3]),
        train_logprobs=np.array([-0.5, -0.3, -2.0], np.float32), advantages=np.ones(3, np.float32),
    )  # fmt: skip
    spans = [SegmentSpan(0, 2, 2, EVIL), SegmentSpan(2, 3, 3, "0")]
    one = Round([row], [1.0], None, [False], [spans], [], [[0]], [], {}, 0.0, 0.0)
    texts = {7: prompt, 0: response, 1: "b", 2: "c"}
    samples = recorded_samples(4, one, {}, lambda ids: "".join(texts[i] for i in ids))
    return replace(shown, steps=[shown.steps[0], replace(shown.steps[1], samples=list(samples))])


class Seen(HTMLParser):
    """What stands in a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_texts_of_the_run_stay_text_and_nothing_is_fetched(tmp_path: Path) -> None:
    seen = Seen()
    seen.feed("".join(page(shown_with(tmp_path / EVIL.replace("/", ""), EVIL, EVIL))))
    assert not {"script", "img", "iframe", "object", "form"} & set(seen.tags)
    assert "".join(seen.texts).count("<script>document.title='run'</script>") == 3
    fetched = {"src", "href", "srcset", "action", "data"}
    assert [value for name, value in seen.attributes if name in fetched] == ["data:,"]
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    policy = next(value for name, value in seen.attributes if name == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_each_token_has_its_version_and_gap(tmp_path: Path) -> None:
    text = "".join(page(shown_with(tmp_path / "run", "p", "r")))
    titles = re.findall(r"class='t' style='([^']*)' title='([^']*)'", text)
    assert [title for _, title in titles][1] == (
        "token 1, id 1, version 2, 1 old, rollout -0.100000, trainer -0.300000, gap -2.00e-01"
    )
    assert ["rgba" in style for style, _ in titles] == [False, True, False]
    assert len({style.split(";")[0] for style, _ in titles}) == 2


def test_the_page_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    shown = shown_with(tmp_path / "run", "p", "r")
    target = tmp_path / "page.html"
    assert save_page(target, shown) == target.stat().st_size
    before = target.read_bytes()
    broken = replace(shown, steps=[replace(shown.steps[0], source=None)])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        save_page(target, broken)
    assert target.read_bytes() == before
    assert not list(tmp_path.glob(".page*"))


def test_a_browser_opens_it_without_errors_and_without_network(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    file = tmp_path / "page.html"
    save_page(file, shown_with(tmp_path / "run", EVIL, EVIL))
    log = tmp_path / "net.json"
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--disable-background-networking", "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<title>run</title>" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<script>" not in done.stdout
    assert "&lt;script&gt;document.title=" in done.stdout
    # The browser has requests of its own; none is the page's.
    assert "canary" not in log.read_text()
    assert '"initiator":"file' not in log.read_text()
