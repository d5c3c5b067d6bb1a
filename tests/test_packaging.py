"""What a user installs: a source distribution, the wheel made from it, and fxshard imported from there."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fxshard._version import __version__

ROOT = Path(__file__).parent.parent
PARTS = ("fxshard", "passes", "pyproject.toml", "README.md", "LICENSE")

# Asked by distribution: `find_spec("pip")` makes setuptools give up its own distutils in this process (Python 3.11),
# and then Inductor, which imports setuptools to find a compiler, fails.
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
pytestmark = pytest.mark.skipif(not {"setuptools", "pip"} <= INSTALLED, reason="needs setuptools and pip")


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a source distribution, and that beside the checkout, which stays clean."""
    folder = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            compiled = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=compiled)
        else:
            shutil.copy2(ROOT / part, folder)
    run("-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, unpacked)
    (source,) = unpacked.iterdir()
    run("-c", "from setuptools import build_meta; build_meta.build_wheel('dist')", cwd=source)
    (found,) = (source / "dist").glob("*.whl")
    return found


def test_wheel_has_everything_as_files(wheel: Path) -> None:
    """Also the passes, which the checkout reaches through a link."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    here = {f"fxshard/passes/{path.name}" for path in (ROOT / "passes").glob("*.py")}
    here |= {str(path.relative_to(ROOT)) for path in (ROOT / "fxshard").glob("*/*.py")}
    here |= {str(path.relative_to(ROOT)) for path in (ROOT / "fxshard").glob("kernels/measured/*.json")}
    assert here <= names
    assert {"fxshard/py.typed", "fxshard/schedule/page.html"} <= names
    assert not [name for name in names if name.startswith(("passes/", "tests/", "docs/"))]


@pytest.mark.thorough
def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run("-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target), str(wheel), cwd=tmp_path)
    assert not (target / "fxshard" / "passes").is_symlink()
    script = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import fxshard, importlib.metadata as about\n"
        "print(fxshard.__file__, fxshard.PASSES.own, about.version('fxshard'))\n"
        "from fxshard.cli.main import main; main(['--help'])\n"
    )
    shown = run("-P", "-c", script, cwd=tmp_path)
    assert shown.startswith(f"{target}/fxshard/__init__.py () {__version__}\n")
    assert "doctor" in shown


def test_version_is_in_one_place() -> None:
    """The rest asks for it."""
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    elsewhere = [
        path.relative_to(ROOT)
        for path in (ROOT / "fxshard").rglob("*.py")
        if f'"{__version__}"' in path.read_text() and path.name != "_version.py"
    ]
    assert not elsewhere


@pytest.mark.parametrize("script", ["context_parallel", "graphs", "kills", "lightning", "tensor_parallel"])
def test_scripts_for_gpus_find_what_they_import(script: str) -> None:
    """pytest does not collect them. The one for Lightning is skipped without it, as its tests are."""
    importlib.import_module(f"tests.gpu.{script}_on_ranks")
