"""A checkpoint that tests damage."""

import shutil
from pathlib import Path

import pytest

import fxshard
from tests.checkpoint.zoo import MUON, zoo


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "step-5"
    fxshard.save(fxshard.shard(zoo(), optimizer=MUON), path)
    return path


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(good, tmp_path / good.name)
