"""Checkpoints from strangers: reading runs none of their code, and believes none of their numbers."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata

import fxshard
from fxshard.checkpoint.metadata import read_metadata
from tests.checkpoint.zoo import MUON, same, zoo
from tests.pool import Pool


def replaced(path: Path, metadata: bytes) -> None:
    """Other metadata, and a manifest that says that they are right."""
    (path / ".metadata").write_bytes(metadata)
    manifest = json.loads((path / "fxshard.json").read_text())
    manifest["metadata_sha256"] = hashlib.sha256(metadata).hexdigest()
    manifest["files"][".metadata"] = len(metadata)
    (path / "fxshard.json").write_text(json.dumps(manifest))


def refused(path: Path, match: str, **options: Any) -> None:
    model = fxshard.shard(zoo(1), optimizer=MUON)
    before = model.full_state_dict()
    with pytest.raises(fxshard.CheckpointError, match=match):
        fxshard.load(model, path, **options)
    assert same(model.full_state_dict(), before) == []


class Runs:
    """What runs when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("weights_only", [False, True])
def test_no_code_of_the_folder_runs(damaged: Path, tmp_path: Path, weights_only: bool) -> None:
    mark = tmp_path / "it ran"
    programs = [
        Runs(os.system, f"touch '{mark}'"),
        Runs(eval, f"open({str(mark)!r}, 'w')"),
        Runs(getattr, Metadata, "__init__"),
        Runs(torch.load, str(mark)),
        {"state_dict_metadata": Runs(Path.touch, mark)},
    ]
    for program in programs:
        replaced(damaged, pickle.dumps(program))
        refused(damaged, r"was not written by torch.distributed.checkpoint: it names", weights_only=weights_only)
    assert not mark.exists()
    pickle.loads(pickle.dumps(programs[1]))
    assert mark.exists()  # so it is a program


def test_what_is_read_is_what_torch_reads(good: Path) -> None:
    """Against torch's own reader, which unpickles."""
    files = json.loads((good / "fxshard.json").read_text())["files"]
    ours, torchs = read_metadata(good, files), FileSystemReader(good).read_metadata()
    assert ours.state_dict_metadata.keys() == torchs.state_dict_metadata.keys()
    for key, value in torchs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[key]
        assert type(mine) is type(value)
        if isinstance(value, TensorStorageMetadata):
            assert (mine.size, mine.chunks, mine.properties.dtype) == (value.size, value.chunks, value.properties.dtype)
    places = {(index.fqn, index.offset): vars(place) for index, place in ours.storage_data.items()}
    for index, place in torchs.storage_data.items():
        found = places.pop((index.fqn, index.offset))
        assert found == {name: getattr(place, name) for name in ("relative_path", "offset", "length")}
    assert not places


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("relative_path", "../step-6/__0_0.distcp", "no file of the checkpoint"),
        ("relative_path", "/etc/passwd", "no file of the checkpoint"),
        ("offset", -1, "no number of bytes"),
        ("length", 2**70, "no number of bytes"),
        ("length", 10**12, "past the end"),
        ("length", "1", "no number of bytes"),
    ],
)
def test_places_outside_of_the_files(damaged: Path, field: str, value: Any, match: str) -> None:
    metadata = FileSystemReader(damaged).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn == "model.odd.weight")
    setattr(metadata.storage_data[index], field, value)
    replaced(damaged, pickle.dumps(metadata))
    refused(damaged, match)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"cos\nsystem\n.", pickle.dumps([1, 2]), b"(" * 10**5])
def test_metadata_that_is_none(damaged: Path, data: bytes) -> None:
    replaced(damaged, data)
    refused(damaged, r"cannot be read|was not written by")


def flipped(path: Path) -> tuple[str, list[str]]:
    """What loading says on this rank, and what it changed."""
    model = fxshard.shard(zoo(1), optimizer=MUON, layout="rows")
    before = model.full_state_dict()
    try:
        fxshard.load(model, path)
    except fxshard.CheckpointError as error:
        return str(error), same(model.full_state_dict(), before)
    return "it was loaded", []


def saved(path: Path) -> None:
    fxshard.save(fxshard.shard(zoo(), optimizer=MUON, layout="rows"), path)


@pytest.mark.thorough
@pytest.mark.shows("C5")
def test_a_bit_that_flipped_on_other_ranks_than_saved_it(ranks: Pool, tmp_path: Path) -> None:
    """Two ranks saved, three read: no rank reads a stored piece whole, and still the model is left as it was."""
    path = tmp_path / "a"
    ranks(2, saved, path)
    assert [said for said, _ in ranks(3, flipped, path)] == ["it was loaded"] * 3
    weights = bytes(zoo().odd.weight.detach().view(-1).view(torch.uint8).tolist()[:200])
    data = next(file for file in path.glob("*.distcp") if weights in file.read_bytes())
    content = bytearray(data.read_bytes())
    content[content.index(weights) + 100] ^= 1
    data.write_bytes(content)
    for said, changed in ranks(3, flipped, path):
        assert "damaged, nothing was loaded" in said and "model.odd.weight is not what was written" in said
        assert changed == []
