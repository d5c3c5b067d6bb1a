"""Masks of rows that no expert takes are left out where every row has one, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxshard.passes.sentinels import drop_sentinels

EXPERTS = 4
Route = Callable[[Tensor], Tensor]


def rewritten(run: Callable[..., Tensor], *args: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What Dynamo captured, before and after."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = copy.deepcopy(module)
        drop_sentinels(module.graph)
        module.graph.lint()
        module.recompile()
        found.extend((before, module))
        results = [part(*inputs)[0] for part in found]
        torch.testing.assert_close(results[1], results[0])
        return before.forward

    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*args)
    return found[0], found[1]


def fills(module: fx.GraphModule) -> int:
    return sum("masked_fill" in str(node.target) for node in module.graph.nodes)


def by_transformers(scores: Tensor, x: Tensor) -> Tensor:
    """As ``transformers`` prepares tokens for grouped products."""
    chosen, ids = torch.topk(scores, 2, dim=-1)
    sorted_ids, order = torch.sort(ids.reshape(-1))
    rows = x[order // 2]
    mask = (sorted_ids >= EXPERTS).unsqueeze(-1)
    sorted_ids.clamp_(max=EXPERTS - 1)
    rows.masked_fill_(mask, 0.0)
    product = rows * 2.0
    return product.masked_fill(mask, 0.0) * chosen.reshape(-1)[order].unsqueeze(-1)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, EXPERTS, generator=generator), torch.randn(6, 3, generator=generator)


@pytest.mark.shows("G1")
def test_masks_that_mask_nothing_are_left_out() -> None:
    before, after = rewritten(by_transformers, *inputs())
    assert fills(before) == 2 and fills(after) == 0


def filled(mask: Route) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, x: (x * 2).masked_fill(mask(scores).unsqueeze(-1), 0.0)


def _written(scores: Tensor) -> Tensor:
    ids = scores.topk(1).indices.reshape(-1)
    ids.add_(3)
    return ids >= EXPERTS


def _mask_written(scores: Tensor) -> Tensor:
    mask = scores.topk(1).indices.reshape(-1) >= EXPERTS
    mask[0] = True
    return mask


NEAR: dict[str, Route] = {
    "a smaller number": lambda scores: scores.topk(1).indices.reshape(-1) >= EXPERTS - 1,
    "less": lambda scores: scores.topk(1).indices.reshape(-1) < EXPERTS,
    "scores": lambda scores: scores.topk(1).values.reshape(-1) >= EXPERTS,
    "numbers of another origin": lambda scores: (scores.sum(-1) * 9).long() >= EXPERTS,
    "added to": lambda scores: scores.topk(1).indices.reshape(-1) + 3 >= EXPERTS,
    "along the tokens": lambda scores: scores.topk(1, dim=0).indices.reshape(-1).repeat(2)[:6] >= EXPERTS,
    "written to": _written,
    "a mask that is written to": _mask_written,
}


@pytest.mark.parametrize("form", NEAR)
def test_other_masks_are_kept(form: str) -> None:
    before, after = rewritten(filled(NEAR[form]), *inputs())
    assert fills(before) == fills(after) == 1


def test_a_copy_that_something_writes_to_stays_one() -> None:
    def run(scores: Tensor, x: Tensor) -> Tensor:
        mask = (scores.topk(1).indices.reshape(-1) >= EXPERTS).unsqueeze(-1)
        rows = x * 2
        copied = rows.masked_fill(mask, 0.0)
        copied.add_(1)
        return rows + copied

    _, after = rewritten(run, *inputs())
    assert fills(after) == 1
