"""``experts="auto"``: of what runs, the one that takes least for the nearest shape that was measured."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxshard
from fxshard.kernels import choose, costs
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.case import Case
from fxshard.kernels.choose import choose_dense
from fxshard.kernels.costs import COMPILER, CostTable, Measurement
from tests.fused import models
from tests.fused.test_patterns import DIM, EXPERTS, INNER, OFFSETS, SIZES, inputs

CPU = torch.device("cpu")
NAMES = ("torch", "one", "two", "three")


class Dense(TorchExperts):
    takes_dense = True


@contextmanager
def machine(table: CostTable | None, refused: dict[str, str] | None = None) -> Iterator[list[str]]:
    """A machine with three more implementations, some of which refuse everything; gives whoever was asked to run."""
    asked: list[str] = []

    def refuses(name: str) -> Callable[[Case], str | None]:
        return lambda case: asked.append(name) or (refused or {}).get(name)  # type: ignore[func-returns-value]

    with (
        mock.patch.dict(choose._MAKE, dict.fromkeys(NAMES[1:], Dense)),
        mock.patch.dict(choose._REFUSALS, {name: refuses(name) for name in NAMES}),
        mock.patch.dict(costs._ADDED, {} if table is None else {table.device: table}),
    ):
        yield asked


def table(*measurements: Measurement) -> CostTable:
    return CostTable("cpu", {}, measurements)


def measured(shape: tuple[int, int, int], tokens: int = 64, *, dense: bool = False, **step_ms: float) -> Measurement:
    return Measurement(dense, "float32", *shape, tokens, step_ms)


def case(experts: int = 8, hidden: int = 64, inner: int = 32, **more: Any) -> Case:
    return Case(CPU, torch.float32, hidden, inner, experts=experts, **more)


# -- the choice --------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 9)
times = st.dictionaries(st.sampled_from(("triton", *NAMES, "unknown")), st.integers(1, 30).map(float), min_size=1)
entries = st.dictionaries(st.tuples(sizes, sizes, sizes, sizes), times, min_size=1, max_size=6)


@pytest.mark.shows("G7")
@settings(max_examples=60)
@given(entries, st.tuples(sizes, sizes, sizes), st.sets(st.sampled_from(NAMES[1:])), st.randoms())
def test_the_fastest_of_the_nearest_that_runs(
    entries: dict[tuple[int, ...], dict[str, float]],
    asked: tuple[int, int, int],
    refusing: set[str],
    shuffle: random.Random,
) -> None:
    found = [Measurement(False, "float32", *key, step_ms) for key, step_ms in entries.items()]
    wanted = case(*asked)
    with machine(table(*found), dict.fromkeys(refusing, "no")):
        choice = choose.choose("auto", wanted)
    assert choice.name in {"torch", *NAMES} - refusing
    away = {key[:3]: sum((math.log(a) - math.log(b)) ** 2 for a, b in zip(key, asked, strict=False)) for key in entries}
    least = min(away.values())
    nearest = min(key for key in away if away[key] - least < 1e-12)
    same = [step_ms for key, step_ms in entries.items() if key[:3] == nearest]
    runs = {name for name in NAMES if name not in refusing and all(name in each for each in same)}
    if runs:
        totals = {name: sum(math.log(each[name]) for each in same) for name in runs}
        assert totals[choice.name] == pytest.approx(min(totals.values()), abs=1e-9)
    else:
        assert choice.name == "torch" and "the first of triton, torch that runs" in choice.why
    shuffle.shuffle(found)
    again = [
        Measurement(False, "float32", *each.shape, each.tokens, dict(reversed(each.step_ms.items()))) for each in found
    ]
    with machine(table(*again), dict.fromkeys(refusing, "no")):
        assert choose.choose("auto", wanted) == choice


def test_it_says_what_was_considered_at_what_cost() -> None:
    one, two = measured((8, 64, 32), 64, one=1.0, torch=4.0, three=8.0), measured((8, 64, 32), 128, one=2.0, torch=8.0)
    with machine(table(one, two, measured((64, 8, 8), two=0.1)), {"one": "it has no taste"}) as asked:
        choice = choose.choose("auto", case(4, 64, 64))
    assert asked == ["one", "torch"]  # whoever is slower is not asked, which may take an import
    assert choice.name == "torch"
    rate = 18 * 64 * 64 * 32 / 1e-3 * 1e-12
    said = (
        f"measured on cpu for 8 × 64 × 32 with 64 and 128 tokens: torch {rate / 4:.3g} TFLOP/s, one {rate:.3g} (it has"
    )
    assert choice.why.startswith(said)
    for name in ("triton", "te", "te-mxfp8", "two", "three"):  # three, with one number of tokens alone
        assert f"{name} not measured" in choice.why


def test_where_nothing_that_was_measured_runs_the_order_is_fixed() -> None:
    with machine(table(measured((8, 64, 32), one=1.0)), {"one": "it has no taste"}):
        choice = choose.choose("auto", case())
    assert choice.name == "torch" and "nothing was measured" not in choice.why
    assert "(it has no taste): the first of triton, torch that runs" in choice.why


def test_one_that_rounds_more_is_not_chosen_for_its_time() -> None:
    with machine(table(Measurement(False, "float32", 8, 64, 32, 64, {"te-mxfp8": 1.0, "torch": 2.0}))):
        choice = choose.choose("auto", case())
    assert choice.name == "torch" and "(only where it is asked for: it rounds more)" in choice.why


@pytest.mark.parametrize("found", [None, table(), table(measured((1, 64, 32), dense=True, one=1.0))])
def test_without_a_measurement_the_order_is_fixed(found: CostTable | None) -> None:
    with machine(found):
        choice = choose.choose("auto", case())
        assert choice.name == "torch"
        assert choice.why == "nothing was measured on cpu in float32: the first of triton, torch that runs"
        assert choose.choose("one", case()) == choose.Choice("one")


def test_a_table_is_for_the_device_of_the_case_or_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs.device_name(case()) == "cpu"
    assert costs.device_name(case(planned_on="h200")) == "h200"
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA GB200": "gb200",
        "NVIDIA H100 80GB HBM3": "h100",
        "Tesla V100 (X)": "tesla-v100-x",
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, short in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert costs.device_name(Case(torch.device("cuda"), torch.bfloat16, 64, 64)) == short


# -- dense MLPs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "refused", "name", "reason"),
    [
        ({"one": 1.0, COMPILER: 2.0}, {}, "one", None),
        ({"one": 1.02, COMPILER: 1.0, "two": 3.0}, {}, "one", None),  # for the memory that it saves
        ({"one": 1.1, COMPILER: 1.0}, {}, "one", "the compiler is faster as measured on cpu for 1 × 64 × 32"),
        ({"one": 1.0, "two": 1.5, COMPILER: 2.0}, {"one": "no"}, "two", None),
        ({"one": 1.0, "torch": 0.5, COMPILER: 2.0}, {"one": "no"}, COMPILER, "no implementation that was measured"),
    ],
)
def test_a_dense_mlp_is_compared_with_the_compilers(
    step_ms: dict[str, float], refused: dict[str, str], name: str, reason: str | None
) -> None:
    with machine(table(measured((1, 64, 32), dense=True, **step_ms), measured((1, 64, 32), three=0.1)), refused):
        choice, left = choose_dense("auto", case(1))
    assert choice.name == name
    assert (left is None) == (reason is None) and (left or "").startswith(reason or "")
    assert left is not None or f"the compiler {18 * 64 * 64 * 32e-9 / step_ms[COMPILER]:.3g}" in choice.why


def test_a_dense_mlp_without_a_measurement_is_chosen_for_as_ever() -> None:
    with machine(table(measured((8, 64, 32), one=1.0))):
        choice, left = choose_dense("auto", case(1))
    assert choice.name == "torch" and left == "there is nothing to group, and the compiler fuses its activation"


# -- what users read ---------------------------------------------------------------------------------------------------


@pytest.mark.shows("G7")
def test_reports_say_which_was_chosen_and_why() -> None:
    model = models.Joined(*SIZES)
    args = inputs(OFFSETS)
    with machine(table(measured((EXPERTS, DIM, INNER), two=1.0, torch=2.0))):
        reports = [fxshard.explain(model, args), fxshard.explain(model, args, experts="one")]
        compiled = fxshard.compile(copy.deepcopy(model), lowering="eager")
        compiled(*args)
        named = compiled.report
    assert [each.fused[0].implementation for each in (*reports, named.experts)] == ["two", "one", "two"]
    assert reports[1].fused[0].why == "" and "was chosen" not in str(reports[1])
    said = f"two was chosen: measured on cpu for {EXPERTS} × {DIM} × {INNER} with 64 tokens: two "
    assert said in str(reports[0]) and said in str(named)
    assert "torch was chosen: nothing was measured on cpu in float32" in str(fxshard.explain(model, args))


# -- files -------------------------------------------------------------------------------------------------------------

GOOD = CostTable(
    "cpu",
    {"torch": "2.11.0"},
    (measured((8, 64, 32), one=1.5, torch=2.0), measured((1, 64, 32), dense=True, one=1.0, compiler=3.25)),
)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    GOOD.write(path)
    assert costs.read(path) == GOOD and costs._table_in(tmp_path, "cpu") == GOOD
    assert costs._table_in(tmp_path, "h200") is None
    assert sum('"step_ms"' in line for line in path.read_text().splitlines()) == 2
    with mock.patch.dict(costs._ADDED):
        costs.add_table(path)
        assert costs.table_of("cpu") == GOOD


def changed(*path: str | int, to: Any) -> Callable[[dict[str, Any]], Any]:
    def change(found: dict[str, Any]) -> Any:
        *outer, last = path
        place: Any = found
        for key in outer:
            place = place[key]
        place[last] = to
        return found

    return change


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda found: [found], "no table of format 1"),
    "format": (changed("format", to=2), "no table of format 1"),
    "device": (changed("device", to=3), "'device' is 3, expected a str"),
    "no list": (changed("measurements", to={}), "'measurements' is {}, expected a list"),
    "no case": (changed("measurements", 1, to=4), "measurement 1: it is 4, expected dense, dtype"),
    "unknown key": (changed("measurements", 0, "speed", to=4), "measurement 0: it is .*'speed'"),
    "size": (changed("measurements", 0, "hidden", to=0), "measurement 0: hidden is 0"),
    "kind of size": (changed("measurements", 0, "inner", to="8"), "measurement 0: inner is '8'"),
    "dtype": (changed("measurements", 0, "dtype", to="float3"), "measurement 0: .*dtype 'float3'"),
    "dense": (changed("measurements", 0, "dense", to=1), "measurement 0: dense is 1"),
    "no times": (changed("measurements", 0, "step_ms", to={}), "step_ms is {}, expected a positive number"),
    "time": (changed("measurements", 0, "step_ms", "one", to=-1.0), "expected a positive number for each"),
    "not a number": (changed("measurements", 0, "step_ms", "one", to=math.nan), "expected a positive number for each"),
    "twice": (
        lambda found: {**found, "measurements": [*found["measurements"], found["measurements"][0]]},
        "two measurements of one case",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_table_that_is_wrong_is_an_error_that_says_how(kind: str, tmp_path: Path) -> None:
    change, reason = MALFORMED[kind]
    path = tmp_path / "cpu.json"
    GOOD.write(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(fxshard.ConfigError, match=rf"cpu.json, a table .*{reason}.*; make it again by fxshard bench"):
        costs.add_table(path)


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(fxshard.ConfigError, match=r"none.json, a table .* cannot be used: .*No such file"):
        costs.add_table(tmp_path / "none.json")
    (tmp_path / "cpu.json").write_text('{"format": 1,')
    with pytest.raises(fxshard.ConfigError, match=r"cpu.json, a table .* cannot be used: Expecting property name"):
        costs._table_in(tmp_path, "cpu")
    GOOD.write(tmp_path / "h200.json")
    with pytest.raises(fxshard.ConfigError, match=r"h200.json holds what was measured on 'cpu': name it cpu.json"):
        costs._table_in(tmp_path, "h200")


def test_tables_that_come_with_fxshard_can_be_read() -> None:
    for path in costs.FOLDER.glob("*.json"):
        found = costs.table_of(path.stem)
        assert found is not None and found.measurements
        assert all({"torch", COMPILER} & set(each.step_ms) for each in found.measurements)
