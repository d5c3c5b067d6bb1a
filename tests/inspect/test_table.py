"""The table: folded by repeated layers, never wider than asked for, plain text."""

from dataclasses import replace

import pytest

from fxshard.schedule.events import Kind
from fxshard.schedule.table import WIDEST, between, flop, render
from tests.inspect.schedules import drawn


def test_an_80_layer_schedule_fits_on_a_page() -> None:
    text = render(drawn(layers=80, ranks=1024))
    assert len(text.splitlines()) < 85
    assert all(part in text for part in ("×79", "layers.0…78", "×77", "layers.78…2", "layers.79…0"))


def test_twice_the_layers_take_the_same_room() -> None:
    assert len(render(drawn(layers=20)).splitlines()) == len(render(drawn(layers=40)).splitlines())


def test_title_says_stage_ranks_digest_peak_and_communication() -> None:
    schedule = drawn(ranks=8, budget=60 * 2**30)
    title = render(schedule).split("\n\n")[0]
    for part in ("ZeRO-3 on 8 ranks", schedule.digest, "peak", "60.00 GiB budget", "communication", "per step"):
        assert part in title


def test_few_layers_are_not_folded_and_every_runtime_event_has_its_row() -> None:
    schedule = drawn(layers=2)
    lines = render(schedule).splitlines()
    assert not any("×" in line for line in lines)
    shown = {int(line.split()[0]) for line in lines if line.strip() and line.split()[0].isdigit()}
    assert shown == set(range(len(schedule)))


def test_a_layer_that_differs_is_not_hidden_in_a_fold() -> None:
    schedule = drawn(layers=12)
    at = next(i for i, event in schedule.of(Kind.RESHARD) if event.bucket == "layers.6")
    odd = replace(schedule.events[at], why="a reason of its own")
    events = (*schedule.events[:at], odd, *schedule.events[at + 1 :])
    assert "a reason of its own" in render(replace(schedule, events=events))


@pytest.mark.parametrize(("why", "folded"), [("last use: mm", True), ("first use: layers.6.norm_1.weight", False)])
def test_numbers_of_nodes_are_not_those_of_parameters(why: str, folded: bool) -> None:
    """The first node of a name has no number. A parameter's name with another number is another parameter."""
    schedule = drawn(layers=12)
    prefix = "last use: mm_{}" if folded else "first use: layers.{}.norm.weight"
    events = []
    for event in schedule.events:
        if event.kind is Kind.RESHARD and event.bucket.startswith("layers."):
            number = int(event.bucket.removeprefix("layers."))
            event = replace(event, why=why if number == 6 else prefix.format(number + 1 if folded else number))
        events.append(event)
    shown = render(replace(schedule, events=tuple(events)))
    assert (why not in [line.strip().split("  ")[-1].strip() for line in shown.splitlines()]) == folded


@pytest.mark.parametrize("width", [60, 88, 120, 140, 400])
def test_never_wider_than_asked_nor_than_140(width: int) -> None:
    schedule = drawn(layers=4, unit="a_module_with_a_rather_long_name_that_goes_on.layers")
    assert max(map(len, render(schedule, width).splitlines())) <= min(width, WIDEST)


def test_plain_unless_colour_is_asked_for() -> None:
    assert "\x1b[" not in render(drawn())
    assert "\x1b[" in render(drawn(), colour=True)


def test_names_in_brackets_are_not_markup() -> None:
    assert "layers [bold].0" in render(drawn(unit="layers [bold]"))


def test_a_narrow_table_keeps_bucket_names_whole() -> None:
    assert "layers.0…4" in render(drawn(layers=6), width=80)


def test_no_events() -> None:
    assert "0 events" in render(replace(drawn(), events=()))


def test_between_and_flop() -> None:
    assert between("layers.3.mlp", "layers.12.mlp") == "layers.3…12.mlp"
    assert between("head", "head") == "head"
    assert between("first", "other") == "first"
    assert between("last use: mm", "last use: mm_12") == "last use: mm…12"
    assert between("last use: mm_12", "last use: mm") == "last use: mm_12…0"
    assert between("layers.1", "layers.1_2") == "layers.1"
    assert (flop(12), flop(1_500), flop(2.5e12)) == ("12 FLOP", "1.5 kFLOP", "2.50 TFLOP")
