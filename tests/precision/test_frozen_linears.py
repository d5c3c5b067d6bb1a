"""Frozen weights in int8 and NF4: codes by their definition, training bitwise that of plain PyTorch with the same
weights, bytes at rest and on the wire as planned, and nothing else kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.frontend.frozen_linears import FrozenLinear
from fxshard.kernels.blockwise import BLOCK, NORMAL_FLOATS, dequantize, nf4_pairs, quantize
from tests.measuring import NewBytes
from tests.pool import Pool
from tests.precision.traffic import gathered
from tests.thorough import thorough
from tests.training import train_step

DIM, HIDDEN, RANK, LAYERS, STEPS = 64, 128, 4, 2, 3
BF16 = torch.bfloat16
BYTES = {"int8": 1 + 4 / BLOCK, "nf4": 1 / 2 + 4 / BLOCK}
"""Of a weight's element, with its part of a scale."""


def by_definition(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Block by block, in Python numbers of fp32."""
    out = torch.empty(weight.shape)
    for source, target in zip(weight.float().view(-1, BLOCK), out.view(-1, BLOCK), strict=True):
        largest = source.abs().max()
        if format == "int8":
            scale = largest / 127
            target.copy_(torch.round(source / scale) * scale if scale else source)
            continue
        nearest = [min(NORMAL_FLOATS, key=lambda value: abs(x - value)) for x in (source / largest).tolist()]
        target.copy_(torch.tensor(nearest) * largest if largest else source)
    return out


@pytest.mark.parametrize("format", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_codes_and_values_are_those_of_the_definition(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(6, 2 * BLOCK) * torch.logspace(-3, 2, 6)[:, None]).to(dtype)
    weight[2, :BLOCK] = 0
    codes, scales = quantize(weight, format)
    pairs = nf4_pairs() if format == "nf4" else None
    assert codes.nbytes + scales.nbytes == weight.numel() * BYTES[format]
    assert torch.equal(dequantize(codes, scales, pairs, torch.float32), by_definition(weight, format))
    assert torch.equal(dequantize(codes, scales, pairs, BF16), by_definition(weight, format).to(BF16))


class Adapted(nn.Module):
    """A linear with a low-rank adapter, as LoRA has it."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m)
        self.down, self.up = nn.Linear(n, RANK, bias=False), nn.Linear(RANK, m, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Adapted(DIM, HIDDEN), nn.GELU(), Adapted(HIDDEN, DIM)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(5, DIM, generator=made).to(dtype), torch.randint(8, (5,), generator=made)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[float]:
    losses = []
    for step in range(STEPS):
        losses.append(train_step(model, *batch(step, dtype), optimizer=optimizer).item())
    return losses


def trained_plainly(format: str, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch, with weights that were rounded by the definition."""
    plain = net(dtype)
    for name, linear in plain.named_modules():
        if name.endswith("base") and isinstance(linear, nn.Linear):
            linear.weight.copy_(by_definition(linear.weight, format))
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    losses = train(plain, optimizer, dtype)
    return losses, {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}


def sharded(format: str, dtype: torch.dtype, zero: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Every rank trains on the same batches, so that the mean of gradients is each of them; saved and loaded midway."""
    model = fxshard.compile(fxshard.quantize_frozen(net(dtype), format), zero=zero, lowering="eager")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = train(model, optimizer, dtype)
    fxshard.save(model, Path(folder, "saved"), optimizer=optimizer)
    again = fxshard.compile(fxshard.quantize_frozen(net(dtype).apply(_other), format), zero=zero, lowering="eager")
    fxshard.load(again, Path(folder, "saved"), weights_only=True)
    state, loaded = model.full_state_dict(), again.full_state_dict()
    assert state.keys() == loaded.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    return losses, {name: state[name] for name, p in model.named_parameters() if p.requires_grad}


def _other(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(2)


@pytest.mark.parametrize(
    ("format", "dtype", "zero"),
    [("nf4", torch.float32, 3), thorough("int8", BF16, 0), thorough("int8", BF16, 3), thorough("nf4", BF16, 1)],
)
def test_training_is_bitwise_that_of_plain_pytorch(
    ranks: Pool, tmp_path: Path, format: str, dtype: torch.dtype, zero: int
) -> None:
    [(losses, weights)] = ranks(1, trained_plainly, format, dtype)
    for mine, state in ranks(2, sharded, format, dtype, zero, str(tmp_path)):
        assert mine == losses and len(set(losses)) == STEPS
        assert state.keys() == weights.keys()
        for name in weights:
            assert torch.equal(state[name], weights[name]), name


def traffic(format: str) -> dict[str, Any]:
    """Bytes of a step's gathers as planned and on the wire, of base weights among them, and what is kept."""
    new = NewBytes()
    precision = fxshard.Precision(param=BF16, reduce=torch.float32)
    model = fxshard.compile(
        fxshard.quantize_frozen(net(BF16), format), precision=precision, lowering="eager",
        debug=fxshard.Debug(keep_resident=False),
    )  # fmt: skip
    held = new.count()
    planned, wire, base = gathered(model, batch(0, BF16), ("codes", "scales"))
    return {
        "held": held,
        "planned": planned,
        "wire": wire,
        "base": base,
        "at rest": sum(plan.at_rest().param for plan in model._sharding.plans),
        "measured": model.bytes_at_rest()["param"],
        "saved": model.schedule.saved_bytes,
    }


def saved_plainly() -> int:
    return fxshard.plan(net(BF16), batch(0, BF16), world_size=2, lowering="eager").saved_bytes


@pytest.mark.parametrize("format", [thorough("int8"), "nf4"])
def test_weights_travel_and_rest_as_codes_and_scales(ranks: Pool, format: str) -> None:
    numel = LAYERS * 2 * DIM * HIDDEN
    plain = saved_plainly()
    for found in ranks(2, traffic, format):
        assert found["planned"] == found["wire"]
        assert found["base"] == {"forward": numel * BYTES[format], "backward": numel * BYTES[format]}
        assert found["measured"] == found["at rest"]
        others = 2 * (LAYERS * (2 * (DIM + HIDDEN) * RANK + DIM + HIDDEN) + 8 * DIM + 8)  # adapters, biases, head
        masters = LAYERS * 2 * (DIM + HIDDEN) * RANK * 2
        assert found["held"] <= (numel * BYTES[format] + others + masters) / 2 + 4096 < numel * 2 / 2
        table = nf4_pairs().nbytes if format == "nf4" else 0  # a buffer
        assert found["saved"] == plain + table, "backward makes weights again, and does not save them"


def test_linears_that_cannot_be_quantized() -> None:
    model = net()
    tied = nn.Linear(DIM, DIM).requires_grad_(False)
    model.one, model.two = tied, nn.Linear(DIM, DIM)
    model.two.weight = tied.weight
    model.odd = nn.Linear(DIM + 1, DIM).requires_grad_(False)
    for name, why in (("one", "another module"), ("odd", "65 are no multiple of 64"), ("layers.0.0.up", "it trains")):
        with pytest.raises(fxshard.ConfigError, match=rf"{name}.*{why}"):
            fxshard.quantize_frozen(model, "nf4", linears=("*", name))
    with pytest.raises(fxshard.ConfigError, match=r"'fp5'.: expected one of 'int8', 'nf4'"):
        fxshard.quantize_frozen(model, "fp5")
    with pytest.raises(fxshard.ConfigError, match=r"'nothing.like.it' matches no nn.Linear"):
        fxshard.quantize_frozen(model, "nf4", linears=("nothing.like.it",))
    with pytest.raises(fxshard.ConfigError, match=r"it trains.*freeze the base first"):
        fxshard.quantize_frozen(nn.Sequential(nn.Linear(DIM, DIM)), "nf4")
    assert not any(isinstance(module, FrozenLinear) for module in model.modules()), "nothing was changed"
    fxshard.quantize_frozen(model, "nf4")
    changed = {name for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    assert changed == {f"layers.{i}.{j}.base" for i in range(LAYERS) for j in (0, 2)}
    plain = model.layers[0][0].base
    assert plain.dequantized().shape == (plain.out_features, plain.in_features)
    compiled = fxshard.compile(model, lowering="eager").layers[0][0].base
    for linear in (plain, compiled):
        with pytest.raises(AttributeError, match=r"in nf4: read it with .dequantized\(\) before fxshard.compile"):
            _ = linear.weight
    with pytest.raises(fxshard.StateError, match=r"dequantized\(\) of FrozenLinear.*before fxshard.compile"):
        compiled.dequantized()
