"""The garbage collector rests while a model is compiled, and is afterwards as the user had it."""

import gc

import pytest
import torch
from torch import fx, nn

import fxshard
from tests.stack import Stack, batch


def compiled(model: nn.Module, through: str, seen: list[bool]) -> nn.Module:
    def look(module: fx.GraphModule, context: object) -> fx.GraphModule:
        seen.append(gc.isenabled())
        return module

    options = {"lowering": "eager", "passes": fxshard.PASSES.before("insert_unshard", look)}
    if through == "compile":
        return fxshard.compile(model, **options)
    return torch.compile(fxshard.shard(model, **options), backend="fxshard")  # type: ignore[return-value]


@pytest.mark.parametrize("through", ["compile", "torch.compile"])
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_model_is_compiled(through: str, enabled: bool) -> None:
    seen: list[bool] = []
    model = compiled(Stack(), through, seen)
    if not enabled:
        gc.disable()
    try:
        model(*batch(0, 0)).backward()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen and not any(seen)


def test_an_error_leaves_the_collector_as_it_was() -> None:
    class Prints(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            print("forward")
            return super().forward(x, y)

    with pytest.raises(fxshard.CaptureError):
        fxshard.compile(Prints(), lowering="eager")(*batch(0, 0))
    assert gc.isenabled()
