"""Which linears are chosen, and what is refused before anything happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard._torch.errors import ConfigError, PassError, StateError
from fxshard.frontend.precision_report import report
from fxshard.planner.quantized import choose_linears
from tests.precision.nets import Net, net
from tests.thorough import thorough


class Odd(nn.Module):
    """Linears of sizes that 32 divides and does not divide, and one whose weight an embedding shares."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.fits = nn.Linear(32, 64)
        self.narrow = nn.Linear(64, 40)
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.fits(self.emb(x)))).sum() + self.tied(self.emb(x)).sum()


def test_by_default_every_linear_but_heads_and_routers() -> None:
    chosen = choose_linears(net(), fxshard.MXFP8())
    assert chosen.weights == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}
    assert chosen.left_out == {"head": "not chosen"}


def test_by_pattern_and_by_function() -> None:
    only = choose_linears(net(), fxshard.MXFP8(linears=("layers.1.*", "head"), exclude=()))
    assert only.weights == {"layers.1.up.weight", "layers.1.down.weight", "head.weight"}
    tall = choose_linears(net(), fxshard.MXFP8(linears=lambda name, shape: shape[0] > shape[1], exclude=()))
    assert tall.weights == {"layers.0.up.weight", "layers.1.up.weight"}


class Stacks(nn.Module):
    """Experts' weights, one of a size that 32 does not divide, and parameters of three dimensions that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 64, 32))
        self.narrow = nn.Parameter(torch.zeros(4, 64, 40))
        self.positions = nn.Parameter(torch.zeros(1, 64, 32))
        self.conv = nn.Conv1d(32, 32, 32)


@pytest.mark.shows("Q10")
def test_stacks_of_experts_are_chosen_by_parameter_name() -> None:
    chosen = choose_linears(Stacks(), fxshard.MXFP8())
    assert chosen.weights == {"up"}
    assert chosen.left_out == {"narrow": "its weight is 4 × 64 × 40, and 32 does not divide both"}
    with pytest.raises(ConfigError, match=r"MXFP8\(experts=...\) names 'narrow', which cannot be quantized"):
        choose_linears(Stacks(), fxshard.MXFP8(experts=("up", "narrow")))
    with pytest.raises(ConfigError, match="'down' matches no stack of weights of the model, which has up, narrow"):
        choose_linears(Stacks(), fxshard.MXFP8(experts=("down",)))
    with pytest.raises(ConfigError, match=r"chooses no linear of Stacks \(up: not chosen"):
        choose_linears(Stacks(), fxshard.MXFP8(experts=()))


@pytest.mark.shows("Q10")
def test_what_cannot_be_quantized_is_left_out_with_a_reason_or_refused_by_name() -> None:
    chosen = choose_linears(Odd(), fxshard.MXFP8())
    assert chosen.weights == {"fits.weight"}
    assert "40 × 64, and 32 does not divide both" in chosen.left_out["narrow"]
    assert "also that of 'emb'" in chosen.left_out["tied"]
    with pytest.raises(ConfigError, match=r"names 'narrow', which cannot be quantized: .*leave it out"):
        fxshard.compile(Odd(), precision=fxshard.MXFP8(linears=("fits", "narrow")))


@pytest.mark.shows("Q10")
@pytest.mark.parametrize(
    ("zero", "policy", "message"),
    [
        (3, {"gather": "staged"}, "gather='staged'.* with zero=3: .*use gather='direct' or 'auto'"),
        (2, {"gather": "direct"}, "gather='direct'.* with zero=2: .*use gather='staged' or 'auto'"),
        (1, {"gather": "direct"}, "use gather='staged'"),
        (3, {"gather": "bf16"}, "expected one of 'auto', 'staged', 'direct', 'off'"),
        (3, {"param": torch.float16}, "what is quantized is bfloat16"),
        (3, {"linears": "up"}, r"expected a tuple of patterns, \('up',\)"),
        (3, {"linears": ("layer.*",)}, "'layer.*' matches no nn.Linear"),
        (3, {"exclude": ("*",)}, "chooses no linear of Net .*use fxshard.Precision"),
    ],
)
def test_wrong_combinations_fail_before_training(zero: int, policy: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=message):
        fxshard.compile(model, zero=zero, precision=fxshard.MXFP8(**policy))
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())  # nothing was taken apart


@pytest.mark.shows("Q10")
def test_other_recipes_are_refused() -> None:
    for recipe in ("mxfp8", object()):
        with pytest.raises(ConfigError, match=r"expected fxshard.Precision\(...\), fxshard.MXFP8"):
            fxshard.compile(net(), precision=recipe)  # type: ignore[arg-type]


class Peeks(Net):
    """Uses a quantized weight for something else than its product."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, y) + self.layers[0].up.weight.float().square().sum()


@pytest.mark.shows("Q10")
def test_another_use_of_a_quantized_weight_is_named() -> None:
    model = fxshard.compile(Peeks(), precision=fxshard.MXFP8(), lowering="eager")
    x = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(PassError, match=r"'layers.0.up.weight' is to run in MXFP8.*exclude=\(..., 'layers.0.up'\)"):
        model(x, x)


@torch.compiler.disable
def untraced(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


class Breaks(Net):
    """Leaves a layer to Python."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(untraced(self.layers[1], self.layers[0](self.emb(x)))).float().square().mean()  # type: ignore[no-any-return]


@pytest.mark.shows("Q10")
@pytest.mark.parametrize(
    ("policy", "name"), [(fxshard.Float8(smallest=0), "Float8"), thorough(fxshard.MXFP8(), "MXFP8")]
)
def test_a_quantized_weight_that_code_between_graphs_reads_is_named(policy: fxshard.Precision, name: str) -> None:
    model = fxshard.compile(Breaks(), precision=policy, lowering="eager", fullgraph=False)
    expected = rf"nets\.py:\d+: 'layers.1.up.weight' is to run in {name}, but code.*exclude=\(..., 'layers.1.up'\)"
    with pytest.raises(StateError, match=expected):
        model(torch.zeros(2, 8, dtype=torch.int64))


def test_the_report_says_what_runs_where() -> None:
    model = fxshard.compile(net(), zero=2, precision=fxshard.MXFP8(), lowering="eager")
    shown = str(report(model))
    assert "MXFP8: 4 weights, 1 linears left in bf16" in shown
    assert "dequantize and multiply in float32 (cpu has no MXFP8 product)" in shown
    assert "nothing travels, this rank quantizes its own: 4 weights" in shown
    assert "head: not chosen" in shown
    plain = fxshard.compile(net(), lowering="eager")
    with pytest.raises(StateError, match=r"not compiled with precision=fxshard\.MXFP8"):
        report(plain)
