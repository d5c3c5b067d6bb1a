"""``torch.distributed.checkpoint`` as people know it, given ``state_dict()``: uneven rows land where they belong."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fxshard
from fxshard.runtime.rows import rows_of
from tests.checkpoint.zoo import MUON, gradients, plain_contents, same, train, zoo
from tests.pool import Pool
from tests.stack import Stack, batch
from tests.training import deliver


def written(folder: Path) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """By layout: the parameters that were saved, and what another layout reads."""
    found = {}
    for here, there in (("rows", "whole"), ("whole", "rows")):
        model = fxshard.shard(zoo(), optimizer=MUON, zero=3, layout=here)
        train(model, range(2))
        foreign = torch.optim.AdamW(model.parameters(), lr=1e-3)
        deliver(model, gradients(7))
        foreign.step()
        full = model.full_state_dict()
        optimizers = {"own": model.optimizer.state_dict()["state"], "torch's": foreign.state_dict()["state"]}
        dcp.save({"model": model.state_dict(), **optimizers}, checkpoint_id=folder / here)
        other = fxshard.shard(zoo(1), zero=3, layout=there)
        into = {"model": other.state_dict()}
        dcp.load(into, checkpoint_id=folder / here)
        moments = {
            f"{name}.{i}.{field}": value.to_local().clone()
            for name, state in optimizers.items()
            for i, fields in state.items()
            for field, value in fields.items()
            if value.ndim
        }
        found[here] = (full, {"read": other.full_state_dict(), "moments": moments})
    return found


@pytest.mark.shows("C1")
def test_whole_and_uneven_rows(ranks: Pool, tmp_path: Path) -> None:
    results = ranks(2, written, tmp_path)
    for layout in ("rows", "whole"):
        contents = plain_contents(tmp_path / layout)  # in one process that knows nothing of ranks
        full, _ = results[0][layout]
        assert same({k.removeprefix("model."): v for k, v in contents.items() if k.startswith("model.")}, full) == []
        for rank in results:
            assert same(rank[layout][1]["read"], full) == []
        for key, value in contents.items():
            if not key.startswith("model.") and value.ndim:
                assert torch.equal(torch.cat([rank[layout][1]["moments"][key] for rank in results]), value), key
        assert {key.split(".")[0] for key in contents} == {"model", "own", "torch's"}


def read_in_place(folder: Path) -> tuple[list[float], dict[str, str]]:
    """A checkpoint is read into a model that has gathered already; the next forward must see it, on every rank."""
    saved = fxshard.shard(Stack(), zero=1, layout="whole")
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(3)
    copied = copy.deepcopy(saved.state_dict())
    dcp.async_save(copied, checkpoint_id=folder).result()  # which copies once more
    model = fxshard.compile(Stack(), zero=1, layout="whole", lowering="eager")
    x, y = batch(0, dist.get_rank())
    model(x, y)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    plain = Stack()
    plain.load_state_dict(saved.full_state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same = all(torch.equal(value.to_local(), copied[key].to_local()) for key, value in loaded.items())
    kinds = {"in files": type(loaded["head.bias"].to_local()).__name__, "same": str(same)}
    return [float(model(x, y).detach()), float(plain(x, y).detach())], kinds


def test_what_is_read_in_place_is_seen(ranks: Pool, tmp_path: Path) -> None:
    for (mine, plain), kinds in ranks(2, read_in_place, tmp_path / "a"):
        assert mine == pytest.approx(plain, rel=1e-5)
        assert kinds == {"in files": "Tensor", "same": "True"}


def test_a_deep_copy_knows_its_rows() -> None:
    """Many at once: a copy must not be taken for that of another, whose address it happens to have."""
    whole = torch.arange(400.0).view(200, 2)
    pieces = [rows_of(whole[i : i + 1], (i, 0), whole.shape, lambda: None) for i in range(200)]
    copies = copy.deepcopy([*pieces, pieces[0]])
    assert copies[0] is copies[-1]
    for i, (piece, copied) in enumerate(zip(pieces, copies, strict=False)):
        assert torch.equal(piece, copied) and piece.data_ptr() != copied.data_ptr()
        assert copied.__create_chunk_list__()[0].offsets == torch.Size([i, 0])
