"""save_residuals: the sum of a lookup and a product is saved, and the first layer's backward is like all others'."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import fxshard
from fxshard._torch import private
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.passes.save_residuals import save_residuals
from tests.passes.graphs import Draft, aten, context


def stream(*, said: CheckpointPolicy | None = None, read_again: bool = False) -> fx.GraphModule:
    """A lookup, to which two products are added in turn; ``said`` of the first sum; the first may be read again."""
    draft = Draft()
    table, tokens = draft.input("table", 16, 4), draft.input("tokens", 3, dtype=torch.int64)
    weight = draft.input("weight", 4, 4)
    x = draft.call(aten.embedding.default, table, tokens)
    product = draft.call(aten.view.default, draft.call(aten.mm.default, x, weight), [3, 4])
    first = draft.call(aten.add.Tensor, x, product)
    if said is not None:
        first.meta["recompute"] = said
    second = draft.call(aten.add.Tensor, first, draft.call(aten.mm.default, first, weight))
    if read_again:
        second = draft.call(aten.mul.Tensor, second, draft.call(aten.cos.default, product))
    return draft.output(draft.call(aten.add.Tensor, second, 1.0))


def said(module: fx.GraphModule) -> dict[str, CheckpointPolicy]:
    return {node.name: node.meta["recompute"] for node in module.graph.nodes if "recompute" in node.meta}


def test_the_sum_of_a_lookup_and_a_product_is_saved() -> None:
    """Through views; torch saves those that follow without being told."""
    assert said(save_residuals(stream(), context())) == {"add": CheckpointPolicy.MUST_SAVE}


def test_what_the_model_says_stands() -> None:
    recomputed = CheckpointPolicy.MUST_RECOMPUTE
    assert said(save_residuals(stream(said=recomputed), context())) == {"add": recomputed}


def test_a_product_that_others_read_is_left_to_torch() -> None:
    """It would be saved, and the sum as well."""
    assert said(save_residuals(stream(read_again=True), context())) == {}


def _interpreted(segment: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    return lambda args: fx.Interpreter(segment).run(*args)


@pytest.mark.thorough
def test_all_layers_have_the_same_backward() -> None:
    """One kind of segment for what lies between two layers' gradients, whichever the layer, and no byte more saved."""
    kinds, saved = [], []
    for passes in (fxshard.PASSES, fxshard.PASSES.without("save_residuals")):
        torch.manual_seed(0)
        config = LlamaConfig(vocab=32, dim=16, layers=2, heads=2, hidden=32)
        model = fxshard.compile(Llama(config), passes=passes)
        tokens = torch.randint(0, 32, (2, 8))
        with mock.patch.object(private, "inductor_compile", _interpreted):  # segments as Inductor gets them
            model(tokens, tokens)  # backward is compiled with it
        kinds.append(model.report.compilations.compiled)
        saved.append(model.schedule.saved_bytes)
    assert kinds[0] == kinds[1] - 1
    assert saved[0] == saved[1]
