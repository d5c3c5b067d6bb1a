"""Parameter groups: in the order of ``parameters()``, honoured one by one, refused where they make no sense."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxshard
from tests.optim.reference import check_steps
from tests.pool import Pool
from tests.stack import Stack
from tests.test_muon import against_plain
from tests.training import deliver, llama, random_gradients

ADAMW = fxshard.AdamW(lr=1e-2, weight_decay=0.1)


def plain_step(plain: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, grad in random_gradients(plain, seed).items():
        plain.get_parameter(name).grad = grad
    optimizer.step()


def sharded_step(model: fxshard.ShardedModule, seed: int) -> None:
    deliver(model, random_gradients(Stack(), seed))
    model.optimizer.step()


def same(model: fxshard.ShardedModule, plain: torch.nn.Module) -> bool:
    full = model.full_state_dict()
    return all(torch.equal(full[name], value) for name, value in plain.state_dict().items())


# -- order and state ---------------------------------------------------------------------------------------------------


def ordered() -> bool:
    choices = (fxshard.AdamW(), fxshard.AdamW(decay=lambda name, shape: len(shape) > 1), fxshard.Muon())
    for choice in choices:
        model = fxshard.shard(llama(), optimizer=choice)
        place = {id(parameter): i for i, parameter in enumerate(model.parameters())}
        groups = [[place[id(p)] for p in group["params"]] for group in model.optimizer.param_groups]
        assert all(group == sorted(group) for group in groups)
        assert sorted(i for group in groups for i in group) == list(range(len(place)))
        names = [name for name, _ in model.named_parameters()]
        for group, places in zip(model.optimizer.param_groups, groups, strict=True):
            assert group["param_names"] == [names[i] for i in places]
    return True


def test_groups_are_in_the_order_of_parameters(ranks: Pool) -> None:
    assert all(ranks(2, ordered))


def continued(zero: int, named: bool) -> bool:
    """The state of torch's AdamW goes on in ours: without names by order, with names whatever the order."""
    plain = Stack()
    given: Any = list(plain.named_parameters()) if named else plain.parameters()
    optimizer = torch.optim.AdamW(given[::-1] if named else given, lr=1e-2, weight_decay=0.1, fused=True)
    for seed in range(2):
        plain_step(plain, optimizer, seed)
    model = fxshard.shard(Stack(), optimizer=fxshard.AdamW(lr=1.0), zero=zero)
    model.load_state_dict(plain.state_dict())
    model.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain_step(plain, optimizer, 2)
    sharded_step(model, 2)
    return same(model, plain)


@pytest.mark.parametrize("named", [True, False])
def test_the_state_of_a_plain_optimizer_goes_on(ranks: Pool, named: bool) -> None:
    assert all(ranks(2, continued, 3, named)) and all(ranks(2, continued, 1, named))


def stepped(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    plain = Stack()
    optimizer = kind(plain.parameters(), lr=1e-2, **options)
    plain_step(plain, optimizer, 0)
    return optimizer.state_dict()


def exchanged(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a weight and of a bias, one in place of the other."""
    moments = dict(state["state"])
    moments[0], moments[1] = moments[1], moments[0]
    return {**state, "state": moments}


def halved(state: dict[str, Any]) -> dict[str, Any]:
    group = state["param_groups"][0]
    return {**state, "param_groups": [{**group, "params": group["params"][:4]}]}


MISFITS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another order": (lambda: exchanged(stepped(torch.optim.AdamW)), "order of model.parameters"),
    "another optimizer": (lambda: stepped(torch.optim.SGD, momentum=0.9), "no 'betas'"),
    "amsgrad": (lambda: stepped(torch.optim.AdamW, amsgrad=True), "amsgrad=True"),
    "coupled decay": (lambda: stepped(torch.optim.Adam, weight_decay=0.1), "decoupled_weight_decay=False"),
    "fewer parameters": (lambda: halved(stepped(torch.optim.AdamW)), "groups of \\[4\\] parameters"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_state_that_does_not_fit_changes_nothing(case: str) -> None:
    model = fxshard.shard(Stack(), optimizer=ADAMW)
    sharded_step(model, 0)
    before = copy.deepcopy(model.optimizer.state_dict())
    make, message = MISFITS[case]
    with pytest.raises(fxshard.StateError, match=message):
        model.optimizer.load_state_dict(make())
    after = model.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][field]) for field, value in state.items())


# -- what groups say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
def test_maximize_is_torchs(maximize: bool) -> None:
    plain, model = Stack(), fxshard.shard(Stack(), optimizer=ADAMW)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, maximize=maximize, fused=True)
    model.optimizer.param_groups[0]["maximize"] = maximize
    for seed in range(2):
        plain_step(plain, optimizer, seed)
        sharded_step(model, seed)
    assert same(model, plain)


SENSELESS = [
    ("lr", math.nan),
    ("lr", -1.0),
    ("lr", math.inf),
    ("lr", torch.tensor(math.nan)),
    ("weight_decay", math.nan),
    ("betas", (0.9, 2.0)),
    ("amsgrad", True),
    ("differentiable", True),
]


@pytest.mark.parametrize(
    ("choice", "field", "value"),
    [
        *((ADAMW, *case) for case in SENSELESS),
        *((fxshard.Muon(), *case) for case in (*SENSELESS, ("momentum", 1.5), ("maximize", True))),
    ],
)
def test_senseless_groups_are_refused_before_anything_changes(choice: Any, field: str, value: Any) -> None:
    model = fxshard.shard(Stack(), optimizer=choice)
    sharded_step(model, 0)
    before = copy.deepcopy(model.full_state_dict())
    for group in model.optimizer.param_groups:
        if field in group or value is True:
            group[field] = value
    with pytest.raises(fxshard.StateError, match=field):
        sharded_step(model, 1)
    assert all(torch.equal(before[name], value) for name, value in model.full_state_dict().items())


def test_the_data_of_a_gradient_may_be_replaced() -> None:
    plain, model = Stack(), fxshard.shard(Stack(), optimizer=ADAMW)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    deliver(model, random_gradients(Stack(), 0))
    for name, grad in random_gradients(Stack(), 1).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        gradient.data = grad.clone()
    model.optimizer.step()
    plain_step(plain, optimizer, 1)
    assert same(model, plain)


@pytest.mark.parametrize("choice", [fxshard.AdamW, fxshard.Muon])
def test_a_learning_rate_that_is_no_number_is_refused(choice: Any) -> None:
    for lr in (math.nan, math.inf, -1.0):
        with pytest.raises(fxshard.ConfigError, match="out of range"):
            choice(lr=lr)


# -- groups by pattern -------------------------------------------------------------------------------------------------

PATTERNS: dict[str, dict[str, Any]] = {
    "*.attention.*": {"lr": 5e-3, "weight_decay": 0.3, "scale": 0.7},
    "layers.0.*": {"scale": lambda shape: shape[0] / (shape[0] + shape[1]), "momentum": 0.8},
}
GROUPED = fxshard.Muon(
    lr=2e-2,
    weight_decay=0.1,
    scale="rms",
    groups=PATTERNS,
    adamw=fxshard.AdamW(lr=1e-3, groups={"head*": {"lr": 5e-3, "betas": (0.8, 0.9)}}),
)


def alone(options: dict[str, Any], pairs: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer with one group."""
    return fxshard.Muon(**{"lr": 2e-2, "weight_decay": 0.1, "scale": "rms", **options}).build(pairs)


@pytest.mark.shows("X3")
def test_groups_equal_optimizers_of_their_own() -> None:
    plain, apart = llama(layers=2), llama(layers=2)
    grouped = GROUPED.build(plain)
    named = dict(apart.named_parameters())
    attention = [(n, p) for n, p in named.items() if ".attention." in n]
    first = [(n, p) for n, p in named.items() if n.startswith("layers.0.mlp")]
    others = [(n, p) for n, p in named.items() if n.startswith("layers.1.mlp")]
    head = [p for n, p in named.items() if n.startswith("head")]
    rest = [p for n, p in named.items() if n.startswith("emb") or "norm" in n]
    optimizers = [
        alone(PATTERNS["*.attention.*"], attention),
        alone(PATTERNS["layers.0.*"], first),
        alone({}, others),
        torch.optim.AdamW(rest, lr=1e-3, fused=True),
        torch.optim.AdamW(head, lr=5e-3, betas=(0.8, 0.9), fused=True),
    ]
    assert sum(len(ps) for ps in (attention, first, others, head, rest)) == len(named)
    for seed in range(3):
        grads = random_gradients(plain, seed)
        for name, grad in grads.items():
            plain.get_parameter(name).grad = grad
            named[name].grad = grad.clone()
        grouped.step()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, named[name]), name


@pytest.mark.shows("X3")
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_groups_move_as_those_of_torchs_muon(scale: str) -> None:
    """Learning rate and decay of each group, and a scale as a function, against ``torch.optim.Muon``."""
    ours = [torch.nn.Parameter(torch.randn(24, 40)) for _ in range(2)]
    theirs = copy.deepcopy(ours)
    factor = {
        "original": lambda shape: math.sqrt(max(1, shape[0] / shape[1])),
        "match_rms_adamw": lambda shape: 0.2 * math.sqrt(max(shape)),
    }
    choice = fxshard.Muon(lr=0.05, scale=factor[scale], groups={"b": {"lr": 0.01, "weight_decay": 0.5}})
    mine = choice.build([("a", ours[0]), ("b", ours[1])])
    groups = [{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.01, "weight_decay": 0.5}]
    torchs = torch.optim.Muon(groups, lr=0.05, weight_decay=0.0, adjust_lr_fn=scale)
    check_steps(mine, torchs, ours, theirs)


def grouped_on_shards() -> dict[str, list[str]]:
    return {
        f"ZeRO-{zero} {layout}": against_plain(GROUPED, zero=zero, layout=layout)
        for zero, layout in ((1, "rows"), (2, "whole"), (3, "rows"))
    }


@pytest.mark.shows("X3")
def test_groups_on_shards_equal_those_of_the_plain_optimizer(ranks: Pool) -> None:
    for found in ranks(2, grouped_on_shards):
        assert found == {name: [] for name in found}


def test_a_group_that_is_changed_or_split_in_training_counts() -> None:
    plain, model = llama(layers=2), fxshard.shard(llama(layers=2), optimizer=fxshard.Muon(lr=2e-2))
    reference = fxshard.Muon(lr=2e-2, groups={"layers.1.mlp.w2.weight": {"lr": 0.0}}).build(plain)
    muon = model.optimizer.param_groups[0]
    assert muon["param_names"].pop() == "layers.1.mlp.w2.weight"
    model.optimizer.param_groups.append({**muon, "params": [muon["params"].pop()], "lr": 0.0})
    for seed in range(2):
        grads = random_gradients(plain, seed)
        deliver(model, grads)
        model.optimizer.step()
        for name, grad in grads.items():
            plain.get_parameter(name).grad = grad
        reference.step()
    assert same(model, plain)
    head = model.optimizer.param_groups[1]["params"].pop(0)
    with pytest.raises(fxshard.StateError, match="in none of param_groups"):
        model.optimizer.step()
    muon["params"].append(head)
    with pytest.raises(fxshard.StateError, match="moved to a group of kind 'muon'"):
        model.optimizer.step()


def test_functions_are_not_saved_and_stay() -> None:
    scale = lambda shape: 0.5  # noqa: E731
    optimizer = fxshard.Muon(scale=scale).build(llama(layers=2))
    saved = optimizer.state_dict()
    assert "scale" not in saved["param_groups"][0]
    other = fxshard.Muon(lr=1.0, scale=scale).build(llama(layers=2))
    other.load_state_dict(saved)
    assert other.param_groups[0]["scale"] is scale and other.param_groups[0]["lr"] == 2e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxshard.Muon(groups={"*": {"betas": (0.9, 0.9)}}), "none of lr, momentum"),
        (lambda: fxshard.Muon(groups={"*": {"lr": -1.0}}), "out of range"),
        (lambda: fxshard.Muon(groups={"*": {"scale": "half"}}), "scale='half'"),
        (lambda: fxshard.AdamW(groups={"*": {"scale": 1.0}}), "none of lr, betas"),
        (lambda: fxshard.AdamW(groups=[{"lr": 1.0}]), "mapping"),
        (lambda: fxshard.shard(Stack(), optimizer=fxshard.Muon(groups={"lm_head*": {}})), "matches none"),
        (lambda: fxshard.shard(Stack(), optimizer=fxshard.AdamW(groups={"nothing": {}})), "matches none"),
        (lambda: fxshard.Muon(adamw=fxshard.AdamW(groups={"layers.0.weight": {}})).build(Stack()), "matches none"),
    ],
)
def test_groups_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(fxshard.ConfigError, match=message):
        make()
