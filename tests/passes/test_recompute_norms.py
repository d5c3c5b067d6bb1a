"""recompute_norms: a norm's output is made again in backward, and nothing else is."""

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import fxshard
from fxshard.passes.recompute_norms import recompute_norms
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, context


def norm(
    *, of_another: bool = False, two: bool = False, said: CheckpointPolicy | None = None, steps: int = 0
) -> fx.GraphModule:
    """A product of a norm of ``x``. ``of_another``: scaled by what another tensor is like; ``two``: times a second."""
    draft = Draft()
    x, other = draft.input("x", 16, 32), draft.input("other", 16, 32)
    weight, matrix = (
        draft.input("weight", 32, param=ParamRef(0, 0)),
        draft.input("matrix", 32, 32, param=ParamRef(0, 1)),
    )
    scale = draft.call(aten.mean.dim, draft.call(aten.pow.Tensor_Scalar, other if of_another else x, 2), [-1], True)
    for _ in range(steps):
        scale = draft.call(aten.add.Tensor, scale, 0.0)
    scale = draft.call(aten.rsqrt.default, scale)
    scaled = draft.call(aten.mul.Tensor, x, scale)
    out = draft.call(aten.mul.Tensor, scaled, other if two else weight)
    if said is not None:
        out.meta["recompute"] = said
    return draft.output(draft.call(aten.mm.default, draft.call(aten.view.default, out, [16, 32]), matrix))


def recomputed(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE]


def test_the_copy_is_made_again_and_the_scale_is_not() -> None:
    assert recomputed(recompute_norms(norm(), context())) == ["mul", "mul_1"]


def test_what_the_model_says_stands() -> None:
    assert recomputed(recompute_norms(norm(said=CheckpointPolicy.MUST_SAVE), context())) == ["mul"]


@pytest.mark.parametrize("near", [{"of_another": True}, {"two": True}, {"steps": 20}])
def test_near_misses_are_left_alone(near: dict[str, bool]) -> None:
    """A scale that is not of what it scales, a second tensor as large as the first, a scale that took long to make."""
    assert recomputed(recompute_norms(norm(**near), context())) == []  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = kind(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class RMSNorm(nn.Module):
    """As ``transformers`` writes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def saved(model: fxshard.ShardedModule) -> int:
    """Bytes that forward keeps for backward."""
    values = [node.meta.get("val") for node in model.graphs["forward"].graph.output_node().all_input_nodes]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("kind", [RMSNorm, nn.LayerNorm])
def test_gradients_are_plain_torchs_and_less_is_saved(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Net(kind)
    x = torch.randn(8, 32, requires_grad=True)
    held = []
    lowering = "eager" if kind is RMSNorm else "inductor"  # which takes LayerNorm apart
    for passes in (fxshard.PASSES, fxshard.PASSES.without("recompute_norms")):
        twin = Net(kind)
        twin.load_state_dict(plain.state_dict())
        model = fxshard.compile(twin, lowering=lowering, passes=passes)
        loss = model(x)
        (of_x,) = torch.autograd.grad(loss, [x], retain_graph=False)
        expected = plain(x)
        (exact,) = torch.autograd.grad(expected, [x])
        bitwise = {"rtol": 0, "atol": 0} if lowering == "eager" else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(loss, expected, **bitwise)
        torch.testing.assert_close(of_x, exact, **bitwise)
        held.append(saved(model))
    scales = 0 if kind is RMSNorm else 0.5  # of LayerNorm, means and scales are saved in the place of the copies
    assert held[1] - held[0] >= (3 - scales) * x.nbytes
