"""The layout: commands/ and profiles/ are parts of the package, in the checkout and in what is installed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from rlctl.cli.root import COMMANDS

ROOT = Path(__file__).parents[2]
COMMAND_FILES = [f"rlctl/commands/{name.replace('-', '_')}.py" for name in COMMANDS]


def test_the_links_point_at_the_folders_beside_the_package() -> None:
    for name in ("commands", "profiles"):
        link = ROOT / "rlctl" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
    mode = subprocess.run(
        ["git", "ls-files", "--stage", "rlctl/commands", "rlctl/profiles"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    if mode.returncode == 0 and mode.stdout:
        assert [line.split()[0] for line in mode.stdout.splitlines()] == ["120000", "120000"]


def test_commands_are_known_by_one_name_only() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {[p[:-3].replace('/', '.') for p in COMMAND_FILES]!r}: importlib.import_module(name)\n"
        "assert 'commands' not in sys.modules and 'profiles' not in sys.modules\n"
        "from importlib.resources import files\n"
        "print(len([f for f in files('rlctl.profiles').iterdir() if f.name.endswith('.yaml')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == len(list((ROOT / "profiles").glob("*.yaml"))) > 0


def test_profiles_are_package_data() -> None:
    assert files("rlctl.profiles").joinpath("cpu-quickstart.yaml").read_text().startswith("#")


@pytest.mark.slow
def test_wheel_sdist_and_a_wheel_of_the_sdist_hold_the_same(tmp_path: Path) -> None:
    """Builds with the network's setuptools, as `pip install` does."""

    def build(kind: str, source: Path, folder: Path) -> Path:
        command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(folder), str(source)]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=300, check=True)
        (built,) = folder.iterdir()
        return built

    copy = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], timeout=60, check=True)
    wheel = build("wheel", copy, tmp_path / "wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {*COMMAND_FILES, "rlctl/py.typed", "rlctl/cli/__init__.py"}
    expected |= {f"rlctl/profiles/{path.name}" for path in (copy / "profiles").glob("*.yaml")}
    assets = copy / "rlctl/tasks/assets"
    expected |= {str(p.relative_to(copy)) for p in assets.rglob("*") if p.is_file()}
    assert assets.is_dir()
    assert expected <= names
    assert not [name for name in names if name.startswith(("commands/", "profiles/", "tests/"))]

    sdist = build("sdist", copy, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "again")
    assert set(zipfile.ZipFile(again).namelist()) == names

    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        timeout=300, check=True,
    )  # fmt: skip
    code = "import sys, rlctl; from rlctl.cli import main; print(rlctl.__file__); sys.exit(main(['train', '--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"{target}/rlctl/__init__.py\nTrain a language model")
