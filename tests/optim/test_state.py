"""``state=`` and ``offload=`` of optimizers in one process: references, refused steps, checkpoints, plans."""

from __future__ import annotations

import contextlib
import math
import warnings
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fxshard
from fxshard.bench.captured import capture
from tests.optim.late import known_late
from tests.optim.state_reference import LINES, Kinds, bf16, eight_bits, expected
from tests.optim.state_runs import FORMATS, LR, PLACES, moments, momentum_reference, same, sharded, train, wrong
from tests.stack import wide, wide_batch
from tests.thorough import thorough
from tests.training import deliver, random_gradients, train_step


@pytest.mark.shows("M5")
@pytest.mark.parametrize(("format", "place"), list(product(("bf16", "8bit"), PLACES)))
def test_follows_its_reference(format: str, place: str) -> None:
    model = sharded(fxshard.AdamW(lr=LR, state=format, offload=place))
    assert wrong(train(model, range(6)), expected(format, range(6)), format) == []


@pytest.mark.shows("M5")
def test_fp32_on_the_host_is_torchs() -> None:
    plain = Kinds()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    for seed in range(4):
        for name, grad in random_gradients(Kinds(), seed).items():
            plain.get_parameter(name).grad = grad
        optimizer.step()
    model = sharded(fxshard.AdamW(lr=LR, offload="host"))
    assert same(train(model, range(4)), plain.state_dict())


def test_pieces_that_come_and_go_are_cut_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large shards are: more pieces than there are places for them on the device."""
    monkeypatch.setattr("fxshard.optim.moments.PIECE_NUMEL", 300)
    model = sharded(fxshard.AdamW(lr=LR, state="8bit", offload="host"))
    held = list(model.optimizer._moments.values())  # type: ignore[attr-defined]
    deliver(model, random_gradients(Kinds(), 0))
    pieces = [piece for each in held for piece in each.pieces()]
    assert len(pieces) > 2 * len(list(model.parameters())) and all(end - begin <= 300 for _, begin, end in pieces)
    assert wrong(train(model, range(3)), expected("8bit", range(3)), "8bit") == []


@pytest.mark.shows("M5")
@pytest.mark.parametrize("format", [thorough("bf16"), "8bit"])
def test_muons_momentum_follows_its_reference(format: str) -> None:
    wanted = momentum_reference(format, range(3))
    for place in PLACES:
        model = fxshard.shard(wide(), optimizer=fxshard.Muon(lr=LR, state=format, offload=place))
        for step in range(3):
            deliver(model, random_gradients(wide(), step))
            model.optimizer.step()
        found = model.full_state_dict()
        assert len(wanted) == 3 and all(torch.equal(found[name], wanted[name]) for name in wanted), place


@cache
def losses(format: str) -> list[float]:
    model = fxshard.compile(wide(), optimizer=fxshard.AdamW(lr=1e-3, state=format), lowering="eager")
    found = []
    for step in range(40):
        found.append(float(train_step(model, *wide_batch(step % 4, 0))))
    return found


@pytest.mark.parametrize("format", [thorough("bf16"), "8bit"])
def test_trains_as_fp32_does(format: str) -> None:
    mine, theirs = losses(format), losses("fp32")
    assert theirs[-1] < 0.1 * theirs[0]
    assert mine == pytest.approx(theirs, rel=0.05) and mine != theirs


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("format", "place"), [("bf16", "none"), ("8bit", "none"), ("8bit", "host"), ("fp32", "host")])
@pytest.mark.parametrize("kind", [fxshard.AdamW, fxshard.Muon])
def test_a_refused_step_changes_no_bit(kind: Any, format: str, place: str, late: bool) -> None:
    model, other = (sharded(kind(lr=LR, nan="skip", state=format, offload=place)) for _ in range(2))
    with known_late() if late else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = train(model, range(1)), moments(model)
        bad = random_gradients(Kinds(), 7)
        bad["ragged"][2, 5] = math.nan
        deliver(model, bad)
        model.optimizer.step()
        assert same(model.full_state_dict(), before[0]) and same(moments(model), before[1])
        after = train(model, range(1, 2))
        assert model.optimizer.skipped_steps == 1
    if kind is fxshard.AdamW:  # Muon has drawn once more, and rounds otherwise
        assert same(after, train(other, range(2)))


def test_groups_and_maximize_hold() -> None:
    groups = {"ragged": {"lr": 1e-3, "weight_decay": 0.5}}
    model = sharded(fxshard.AdamW(lr=LR, state="8bit", groups=groups))
    reference = expected("8bit", range(0))
    model.optimizer.param_groups[0]["maximize"] = True
    for seed in range(3):
        grads = random_gradients(Kinds(), seed)
        deliver(model, grads)
        model.optimizer.step()
        reference["ragged"].update(grads["ragged"], 1e-3, decay=0.5)
        reference["short"].update(-grads["short"], LR)
    found = model.full_state_dict()
    for name in ("ragged", "short"):
        assert np.array_equal(found[name].numpy().reshape(-1), reference[name].p), name


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    model = sharded(fxshard.AdamW(lr=LR, state="8bit", offload="host"))
    before = train(model, range(1)), moments(model)
    grads = random_gradients(Kinds(), 1)
    del grads["ragged"]
    deliver(model, grads)
    model.optimizer.step()
    after = model.full_state_dict(), moments(model)
    assert torch.equal(after[0]["ragged"], before[0]["ragged"]) and not torch.equal(
        after[0]["short"], before[0]["short"]
    )
    assert all(torch.equal(after[1][key], before[1][key]) for key in before[1] if key.startswith("ragged"))


# -- state dicts and checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.shows("M5")
@pytest.mark.parametrize("kind", [fxshard.AdamW, fxshard.Muon])
def test_checkpoints_convert_between_all_of_them(kind: Any, tmp_path: Path) -> None:
    """What is saved is what the codes stand for. It goes on bit by bit in the same format, wherever that is kept."""
    for format in FORMATS:
        model = sharded(kind(lr=LR, state=format))
        train(model, range(2))
        state = moments(model)
        fxshard.save(model, tmp_path / format)
        onward = train(model, range(2, 4))
        for other, place in product(FORMATS, PLACES):
            loaded = sharded(kind(lr=LR, state=other, offload=place))
            fxshard.load(loaded, tmp_path / format)
            found = moments(loaded)
            if other in (format, "fp32"):
                assert same(found, state), (format, other, place)
            else:
                check_nearest(found, state, other)
            if other == format:
                assert same(train(loaded, range(2, 4)), onward), (format, place)


def check_nearest(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor], format: str) -> None:
    for key, value in state.items():
        name, field = key.rsplit(".", 1)
        values = value.numpy().reshape(-1)
        if field == "step" or (format == "8bit" and not LINES[name]):
            wanted = values
        elif format == "bf16":
            wanted = bf16(values, None)
        else:
            wanted = eight_bits(values, LINES[name], field != "exp_avg_sq", None)
        assert np.array_equal(found[key].numpy().reshape(-1), wanted), key


class OneByOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [torch.nn.ModuleDict({"w1": torch.nn.Linear(70, 4, bias=False)}) for _ in range(3)]
        self.experts = torch.nn.ModuleList(parts)


class Together(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ParameterDict({"w1": torch.randn(3, 4, 70)})


def test_experts_in_another_layout_keep_their_codes(tmp_path: Path) -> None:
    """Blocks do not reach over rows, so those of an expert are the same alone and in a stack."""
    choice = fxshard.AdamW(lr=LR, state="8bit", offload="host")
    single = fxshard.shard(OneByOne(), optimizer=choice)
    for seed in range(2):
        deliver(single, random_gradients(OneByOne(), seed))
        single.optimizer.step()
    fxshard.save(single, tmp_path / "single")
    stacked, again = fxshard.shard(Together(), optimizer=choice), fxshard.shard(OneByOne(), optimizer=choice)
    fxshard.load(stacked, tmp_path / "single")
    before, after = moments(single), moments(stacked)
    for field in ("exp_avg", "exp_avg_sq"):
        parts = [before[f"experts.{i}.w1.weight.{field}"] for i in range(3)]
        assert torch.equal(after[f"experts.w1.{field}"], torch.stack(parts)) and parts[0].any()
    fxshard.save(stacked, tmp_path / "stacked")
    fxshard.load(again, tmp_path / "stacked")
    assert same(moments(again), before)


@pytest.mark.parametrize("place", PLACES)
def test_state_dicts_are_those_of_torch(place: str) -> None:
    model = sharded(fxshard.AdamW(lr=LR, state="8bit", offload=place))
    train(model, range(2))
    state = model.optimizer.state_dict()
    plain = torch.optim.AdamW(Kinds().parameters(), lr=LR)
    plain.load_state_dict(state)  # fp32, in the order of parameters()
    again = sharded(fxshard.AdamW(lr=LR, state="8bit"))
    again.load_state_dict(model.full_state_dict())
    again.optimizer.load_state_dict(plain.state_dict())
    assert same(moments(again), moments(model))
    assert same(train(again, range(2, 4)), train(model, range(2, 4)))
    empty = {**plain.state_dict(), "state": {}}
    again.optimizer.load_state_dict(empty)
    assert all(not value.any() for value in moments(again).values())


# -- plans and refusals ------------------------------------------------------------------------------------------------


def test_a_plan_counts_what_is_kept() -> None:
    captured = capture(wide(), wide_batch(0, 0), lowering="eager")

    def plan(state: str, offload: str, budget: int | None = None) -> fxshard.Schedule:
        options: dict[str, Any] = {"optimizer": fxshard.AdamW(state=state, offload=offload), "memory_budget": budget}
        return captured.schedule(ranks=4, hardware="h200", **options)

    plans = {case: plan(*case) for case in product(FORMATS, PLACES)}
    at_rest = {key: schedule.resident_bytes for key, schedule in plans.items()}
    moments = {key: sum(bucket.moment_bytes for bucket in schedule.buckets) for key, schedule in plans.items()}
    assert moments["fp32", "none"] == moments["fp32", "host"] == 2 * moments["bf16", "none"]
    assert 0.25 * moments["fp32", "none"] < moments["8bit", "none"] < 0.29 * moments["fp32", "none"]
    nothing = at_rest["fp32", "host"]
    for (format, place), schedule in plans.items():
        schedule.verify()
        on_host = moments[format, place] if place == "host" else 0
        assert schedule.host_bytes == on_host and at_rest[format, place] == nothing + moments[format, place] - on_host
        assert ("on the host" in str(schedule)) == (place == "host")
        assert fxshard.Schedule.from_json(schedule.to_json()) == schedule
    smallest = min(plan.peak_bytes for plan in plans.values())
    with pytest.raises(fxshard.BudgetError):
        plan("fp32", "none", smallest)
    plan("8bit", "host", smallest)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        fxshard.ConfigError, match=r"AdamW\(state='int8'\): expected one of 'fp32', 'bf16', '8bit', 'auto'"
    ):
        fxshard.AdamW(state="int8")
    with pytest.raises(fxshard.ConfigError, match=r"Muon\(offload='cpu'\): expected one of 'none', 'host', 'auto'"):
        fxshard.Muon(offload="cpu")
    with pytest.raises(fxshard.ConfigError, match="say it to Muon alone"):
        fxshard.Muon(adamw=fxshard.AdamW(state="8bit"))
    fxshard.Muon(state="8bit", adamw=fxshard.AdamW(state="8bit"))
    with pytest.raises(fxshard.ConfigError, match="on one rank too"):
        fxshard.Muon(state="8bit").build(wide())
    with pytest.raises(fxshard.ConfigError, match=r"is updated in bfloat16.*pass precision="):
        fxshard.shard(wide().bfloat16(), optimizer=fxshard.AdamW(state="8bit"))
