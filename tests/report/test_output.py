"""The report: which stream gets what, and the JSON document."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.report import Report
from rlctl.report.documents import plain


def report_on(*, json: bool = False, verbosity: int = 0) -> tuple[Report, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Report("replay", json=json, verbosity=verbosity, color="never", out=out, err=err), out, err


def tell_everything(report: Report) -> None:
    report.line("line")
    report.detail("detail")
    report.warn("careful")
    report.text("text")
    report.table(["a"], [[1]])
    report.document({"steps": 3})


def test_people_get_tables_and_scripts_one_document() -> None:
    report, out, err = report_on()
    tell_everything(report)
    assert out.getvalue() == "text\na\n1\n"
    assert err.getvalue() == "line\nwarning: careful\n"

    report, out, err = report_on(json=True)
    tell_everything(report)
    document = json.loads(out.getvalue())
    assert document["schema"] == "rlctl.replay/1"
    assert document["steps"] == 3
    assert {"rlctl_version", "host", "time"} <= set(document)
    assert err.getvalue() == "line\nwarning: careful\n"


def test_quiet_and_verbose() -> None:
    for verbosity, said in ((-1, "warning: careful\n"), (1, "line\ndetail\nwarning: careful\n")):
        report, _, err = report_on(verbosity=verbosity)
        tell_everything(report)
        assert err.getvalue() == said
    report, _, err = report_on(verbosity=-1)
    with report.progress("x", 3) as progress:
        progress.advance(3)
    assert err.getvalue() == ""


def test_values_that_json_has_no_word_for() -> None:
    @dataclass
    class Point:
        x: float
        where: Path

    odd = {"p": Point(math.nan, Path("a/b")), "t": (1, math.inf), 3: None, "s": "\udcff", "b": True}
    assert plain(odd) == {"p": {"x": None, "where": "a/b"}, "t": [1, None], "3": None, "s": "\udcff", "b": True}
    report, out, _ = report_on(json=True)
    report.document(odd)
    assert out.getvalue().isascii()
    assert "NaN" not in out.getvalue()
    with pytest.raises(TypeError, match="object has no place"):
        plain({"o": object()})


def test_errors_have_a_document_with_every_finding() -> None:
    report, out, err = report_on(json=True)
    report.error(FindingsError("config", [Finding("bad", where="a.yaml:3", fix="mend"), Finding("worse")]), 2)
    document = json.loads(out.getvalue())
    assert document["schema"] == "rlctl.error/1"
    assert document["exit_code"] == 2
    assert document["error"]["findings"] == [
        {"message": "bad", "where": "a.yaml:3", "fix": "mend"},
        {"message": "worse", "where": None, "fix": None},
    ]
    assert err.getvalue() == "error: config: 2 faults\n  a.yaml:3: bad; mend\n  worse\n"

    report, out, _ = report_on(json=True)
    report.document({})
    report.error(UsageError("late"), 2)
    assert json.loads(out.getvalue())["schema"] == "rlctl.replay/1"


SCRIPT = """
import os, subprocess, sys
from rlctl.report import Report
from rlctl.report.output import own_stdout
with own_stdout() as out:
    report = Report("replay", json=True, out=out)
    print("from python")
    os.write(1, b"from C\\n")
    subprocess.run(["echo", "from a child"], check=True)
    report.document({})
print("after")
"""


def test_strangers_do_not_reach_stdout() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    document, _, rest = done.stdout.rpartition("}")
    assert json.loads(document + "}")["schema"] == "rlctl.replay/1"
    assert rest == "\nafter\n"
    assert done.stderr == "from python\nfrom C\nfrom a child\n"


def test_bars_of_other_libraries_are_off() -> None:
    script = (
        "from rlctl.report import Report\nfrom rlctl.report.logs import logs_to\n"
        "with logs_to(Report('train')):\n    from tqdm import tqdm\n    print(sum(tqdm(range(5))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("10\n", "")
