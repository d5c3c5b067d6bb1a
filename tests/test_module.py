"""``ShardedModule`` as users know modules: names, optimizers, clipping, state, attributes, modes."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.runtime.optimizer_steps import ELEMENTWISE, ShardedParameter
from tests.pool import Pool
from tests.stack import Stack
from tests.thorough import thorough
from tests.toy import Linears, Mlp
from tests.training import Run, all_data_for, deliver, full_gradients, llama, random_gradients, train


def with_torch_optimizers(zero: int) -> dict[str, tuple[Run, Run]]:
    """The elementwise classes of ``torch.optim`` over ``model.parameters()``, against the same on the plain model."""
    choices: dict[str, Any] = {kind.__name__: partial(kind, lr=1e-3) for kind in ELEMENTWISE}
    choices["AdamW, fused"] = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    choices["SGD, momentum"] = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    model = fxshard.compile(Stack(), zero=zero, lowering="eager")
    runs = {}
    for name, make_optimizer in choices.items():
        plain = Stack()
        model.load_state_dict(plain.state_dict())
        mine = train(model, make_optimizer(model.parameters()), steps=2)
        optimizer = make_optimizer(plain.parameters())
        for step in range(2):
            plain(*all_data_for(plain, step, dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs[name] = (mine, Run(mine.losses, {}, plain.state_dict()))
    return runs


def clipped() -> list[tuple[float, float, float]]:
    """(norm by torch's function, norm by ours, norm on the plain model), gradients checked against the plain ones."""
    found = []
    for zero in (0, 1, 3):
        model, plain = fxshard.shard(llama(), zero=zero), llama()
        grads = random_gradients(plain, zero)
        norms = []
        for clip in (
            lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
            lambda m: m.clip_grad_norm_(0.1),
        ):
            deliver(model, grads)
            norm = clip(model)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        mine = full_gradients(model)
        for name, parameter in plain.named_parameters():
            parameter.grad = grads[name].clone()
        expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-5, atol=1e-7)
        found.append((norms[0], norms[1], expected))
    return found


def state_round_trip(layout: Any) -> bool:
    def sharded(zero: int = 3, **options: Any) -> fxshard.ShardedModule:
        return fxshard.shard(llama(), zero=zero, layout=layout, **options)

    def step(model: fxshard.ShardedModule, seed: int) -> dict[str, torch.Tensor]:
        deliver(model, random_gradients(llama(), seed))
        model.optimizer.step()
        model.optimizer.zero_grad()
        return model.full_state_dict()

    model = sharded(optimizer=fxshard.AdamW())
    step(model, 0)
    full, moments = step(model, 1), copy.deepcopy(model.optimizer.state_dict())
    other = sharded(optimizer=fxshard.AdamW())
    other.load_state_dict(full)
    other.optimizer.load_state_dict(moments)
    copied = copy.deepcopy(model.state_dict())
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    assert set(copied) == set(full) and saved.tell() > 0
    third = sharded(zero=1)
    third.load_state_dict(model.state_dict())
    plain = llama()
    plain.load_state_dict(full)
    after = [step(m, 2) for m in (model, other)]
    same = all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    return same and all(torch.equal(third.full_state_dict()[name], full[name]) for name in full)


def attributes() -> tuple[list[str], list[str], list[int]]:
    plain = Linears()
    for i, layer in enumerate(plain.layers):
        layer.weight.tag = f"layer {i}"  # type: ignore[assignment]
    model = fxshard.shard(plain)
    shapes = [model.layers[0].weight.to_local().shape[0], model.layers[-1].weight.shape[0]]
    return [layer.weight.tag for layer in model.layers], [name for name, _ in model.named_parameters()], shapes


def refused_optimizers() -> dict[str, str]:
    """What making and stepping optimizers that need whole parameters says on this rank."""
    model = fxshard.shard(Stack())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    makers: dict[str, Callable[[], Any]] = {
        "Muon": lambda: torch.optim.Muon(matrices),
        "Adafactor": lambda: torch.optim.Adafactor(model.parameters()),
        "LBFGS": lambda: torch.optim.LBFGS(list(model.parameters())),
        "Rprop": lambda: torch.optim.Rprop([{"params": [parameter]} for parameter in matrices]),
        "SparseAdam": lambda: torch.optim.SparseAdam(model.named_parameters()),
        "fused SGD": lambda: torch.optim.SGD(model.parameters(), fused=True),
        "fused Adagrad": lambda: torch.optim.Adagrad(model.parameters(), fused=True),
        "subclass": lambda: type("Mine", (torch.optim.Adafactor,), {})(model.parameters()),
    }
    said = {}
    for name, make in makers.items():
        with pytest.raises(fxshard.ConfigError) as error:
            make()
        said[name] = str(error.value)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    later.param_groups[0]["fused"] = True  # chosen after it was made: refused before the step changes anything
    with pytest.raises(fxshard.ConfigError) as error:
        later.step()
    said["later"] = str(error.value)
    whole = fxshard.shard(Stack(), zero=0)
    torch.optim.Adafactor(whole.parameters())
    return said


def copied_and_saved() -> list[str]:
    """A file has a DTensor of torch's. Neither it nor a copy is checked when an optimizer gets it."""
    parameter = next(fxshard.shard(Stack()).parameters())
    parameter.tag = "mine"  # type: ignore[attr-defined]
    saved = io.BytesIO()
    torch.save(parameter, saved)
    ours = b"optimizer_steps", b"uneven_rows"
    wrong = ["the file names our class" for name in ours if name in saved.getvalue()]
    saved.seek(0)
    for one in (copy.deepcopy(parameter), torch.load(saved, weights_only=False)):
        if isinstance(one, ShardedParameter) or not isinstance(one, nn.Parameter) or one.tag != "mine":
            wrong.append(f"{type(one)}")
        if not torch.equal(one.to_local(), parameter.to_local()):  # type: ignore[attr-defined]
            wrong.append("other rows")
    return wrong


def test_parameters_are_copied_and_saved_as_dtensors(ranks: Pool) -> None:
    assert ranks(2, copied_and_saved) == [[], []]


@pytest.mark.shows("X7")
def test_optimizers_that_need_whole_parameters_are_refused_on_every_rank(ranks: Pool) -> None:
    said = ranks(3, refused_optimizers)
    assert said[0] == said[1] == said[2]
    assert "fxshard.Muon" in said[0]["Muon"] and "Adafactor" in said[0]["subclass"]
    assert "fused=True" in said[0]["fused SGD"] and said[0]["later"] == said[0]["fused SGD"]


@pytest.mark.parametrize("zero", [thorough(0), thorough(2), 3])
def test_elementwise_torch_optimizers_work(ranks: Pool, zero: int) -> None:
    for runs in ranks(2, with_torch_optimizers, zero):
        for name, (mine, reference) in runs.items():
            assert mine.distance(reference) < 2e-6, name


@pytest.mark.shows("O7")
def test_gradient_norms_count_every_element_once(ranks: Pool) -> None:
    for found in ranks(3, clipped):
        for by_torch, by_us, expected in found:
            assert by_torch == pytest.approx(expected, rel=1e-5)
            assert by_us == pytest.approx(expected, rel=1e-5)


def odd_norms() -> list[bool]:
    """Refused on one rank alone, which then has to wait for nobody."""
    model, plain = fxshard.shard(llama(), zero=3), llama()
    deliver(model, random_gradients(plain, 0))
    before = full_gradients(model)
    calls = [(0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0), (1.0, -2.0), (1.0, math.nan)]
    for number, (max_norm, norm_type) in enumerate(calls):
        if number % 2 == dist.get_rank():
            with pytest.raises(fxshard.ConfigError, match=r"clip_grad_norm_\((max_norm|norm_type)=.* above 0"):
                model.clip_grad_norm_(max_norm, norm_type)
    squares = sum(float(gradient.square().sum()) for gradient in before.values())
    largest = max(float(gradient.abs().max()) for gradient in before.values())
    found = [math.isclose(float(model.clip_grad_norm_(math.inf)), math.sqrt(squares), rel_tol=1e-5)]
    found.append(math.isclose(float(model.clip_grad_norm_(math.inf, "inf")), largest, rel_tol=1e-6))  # type: ignore[arg-type]
    return [*found, all(torch.equal(value, before[name]) for name, value in full_gradients(model).items())]


def test_norms_that_clip_nothing_or_everything_are_refused(ranks: Pool) -> None:
    """Infinity measures: it is what torch's function is called with for that, and changes no gradient."""
    assert ranks(2, odd_norms) == [[True] * 3] * 2


def wholes(layout: str) -> list[bool]:
    torch.manual_seed(0)
    plain = Mlp()
    values = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    model = fxshard.shard(plain, layout=layout)
    names = [name for name, _ in model.named_parameters()]
    return [torch.equal(model.get_parameter(name).full_tensor(), values[name]) for name in names]


@pytest.mark.parametrize("layout", ["rows", "whole"])
def test_full_tensor_is_the_parameter_however_rows_are_cut(ranks: Pool, layout: str) -> None:
    for same in ranks(3, wholes, layout):
        assert same and all(same)


@pytest.mark.parametrize("layout", ["rows", "whole"])
def test_state_goes_out_and_back(ranks: Pool, layout: str) -> None:
    assert ranks(2, state_round_trip, layout) == [True, True]


@pytest.mark.shows("S15")
def test_names_and_attributes_survive(ranks: Pool) -> None:
    for tags, names, (local_rows, rows) in ranks(2, attributes):
        assert tags == ["layer 0", "layer 1", "layer 2"]
        assert names == [name for name, _ in Linears().named_parameters()]
        assert local_rows <= rows == 8


def test_fused_adamw_equals_torch_bitwise() -> None:
    """Alone, the flat update must give the bits of torch's fused AdamW, parameter by parameter, with two groups."""

    def decays(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1

    torch.manual_seed(0)
    plain = Mlp()
    reference = copy.deepcopy(plain)
    model = fxshard.compile(plain, optimizer=fxshard.AdamW(lr=1e-2, weight_decay=0.1, decay=decays), lowering="eager")
    groups = [
        {
            "params": [p for n, p in reference.named_parameters() if decays(n, tuple(p.shape)) == flag],
            "weight_decay": wd,
        }
        for flag, wd in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)
    reference_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(4):
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step))
        for m, o, s in ((model, model.optimizer, scheduler), (reference, optimizer, reference_scheduler)):
            m(x).square().sum().backward()
            o.step()
            o.zero_grad()
            s.step()
    full = model.full_state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=1e-7, msg=name)


def test_train_and_eval_reach_the_model() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.linear(x))

    plain = Noisy()
    expected = plain.eval()(torch.ones(2, 4)).detach()
    plain.train()
    model = fxshard.compile(plain, lowering="eager")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    model.train()
    assert not torch.equal(model(torch.ones(2, 4)).detach(), expected)
    assert set(model.graphs) == {"forward", "backward", "eval"}
    assert "unshard" in str(model.graphs["forward"].graph)


def test_on_one_rank_nothing_travels() -> None:
    model = fxshard.compile(Stack(), lowering="eager", optimizer=fxshard.AdamW())
    model(*all_data_for(Stack(), 0, 1)).backward()
    assert model.schedule.comm_bytes == 0
    assert "no communication" in str(model.schedule) and "communication 0" not in str(model.schedule)
