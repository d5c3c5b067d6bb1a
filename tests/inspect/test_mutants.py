"""Every field of every event, bucket and header, changed one at a time: the verifier rejects all that does harm."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import fxshard
from fxshard.schedule.events import OF_HOST, Event, Kind
from fxshard.schedule.step import READ, WRITE
from fxshard.schedule.verify import ScheduleError, verify
from tests.inspect.mutants import Mutant, mutants
from tests.inspect.real import SCHEDULES
from tests.thorough import thorough

HARMLESS = {
    r"(event\.\w+|buckets)\.why": "a reason, for people",
    r"buckets\.unit": "a label; the bucket's name still begins with it",
    r"event\.(compute|update)\.(flops|traffic)": "an estimate that only the simulator adds up",
    r"event\.compute\.held|event\.(compute|collective)\.peak": "an estimate of memory",
    r"event\.\w+\.float8_flops": "another one",
    r"event\.compute\.dtype": "which peak rate the simulator divides by",
    r"budget": "a limit that holds as well",
    r"(recomputed|offloaded)(\.\w+)?(\[\])?": "what a budget made of saved values, for people",
    r"buckets\.domain\.stride": "which links the simulator takes; all buckets of a domain agree on it",
    r"buckets\.layout\.whole": "no parameter crosses a boundary: both words describe the same places",
    r"graphs\.(reads|writes)\.nodes(\[\])?": "another node of the same stretch",
    r"graphs\.collectives\.(after|before)": "another node of the same stretch",
    r"graphs\.copies\.node": "another node of the same stretch",
    r"model_groups\.stride|buckets\.cuts\.group\.stride": "which links the simulator takes",
    r"graphs\.inputs(\.\w+)?(\[\])?": "a witness less, or one of another parameter of this shape",
}
"""{kind of place: why it does no harm if the verifier lets it pass}. All else must be caught."""

LIKE_OTHERS = (
    *("zero 0", "zero 1", "zero 2", "zero 3, torch's optimizer", "one rank", "frozen", "evaluation"),
    *("muon by rows", "muon whole", "normuon by rows", "mxfp8 experts", "experts on ranks of their own"),
)
"""Schedules with no kind of event or field that those of other names have not."""

EACH = 1
"""Mutants of each kind of place that the suite tries; ``-m ''`` tries all."""


def harmless(mutant: Mutant, schedule: fxshard.Schedule, mutated: fxshard.Schedule) -> bool:
    """Whether a mutant that passed is on the list, or is a right schedule of another order."""
    if any(why and re.fullmatch(field, mutant.field) for field, why in HARMLESS.items()):
        return True
    if mutant.field.startswith("swap "):
        at = int(re.findall(r"at (\d+)", mutant.what)[0])
        first, second = schedule.events[at : at + 2]
        return not _touched(first) & _touched(second)  # neither has to do with the other
    if mutant.field == "buckets.reduce_dtype":  # of what has no gradients
        at = int(re.findall(r"buckets\[(\d+)\]", mutant.what)[0])
        return not schedule.buckets[at].trainable
    if mutant.field == "buckets.domain.divisor":  # mean or sum, asked for by the user: one bucket has no other witness
        at = int(re.findall(r"buckets\[(\d+)\]", mutant.what)[0])
        return sum(bucket.domain == schedule.buckets[at].domain for bucket in schedule.buckets) == 1
    return mutant.field == "event.wait.copies" and _both_copies_are_there(mutant, schedule)


def _touched(event: Event) -> set[tuple[str, int]]:
    """The memory that an event has to do with: parameters or gradients, of which bucket; or which one on the host."""
    own = {Kind.UPDATE: (READ, WRITE), **dict.fromkeys((Kind.UNSHARD, Kind.WAIT, Kind.RESHARD), (READ,))}
    found = {(what, event.bucket_index) for what in own.get(event.kind, (WRITE,)) if event.bucket}
    found |= {("host", event.number)} if event.kind in OF_HOST else set()
    return found | {(READ, index) for index in event.reads} | {(WRITE, index) for index in event.writes}


def _both_copies_are_there(mutant: Mutant, schedule: fxshard.Schedule) -> bool:
    at = int(re.findall(r"events\[(\d+)\]", mutant.what)[0])
    return schedule.buckets[schedule.events[at].bucket_index].gather.value == "staged"


def some(all_of: Iterator[Mutant], each: int | None) -> list[Mutant]:
    """A few of each kind of place, spread over the schedule."""
    by_field: dict[str, list[Mutant]] = {}
    for mutant in all_of:
        by_field.setdefault(mutant.field, []).append(mutant)
    return [mutant for found in by_field.values() for mutant in found[:: max(1, len(found) // each if each else 1)]]


def passed(schedule: fxshard.Schedule, tried: list[Mutant]) -> tuple[int, list[tuple[Mutant, bool]]]:
    """How many mutants there are, and those that the verifier takes for right, with whether they are harmless."""
    count, found = 0, []
    for mutant in tried:
        mutated = mutant.make()
        if mutated is None or mutated == schedule:
            continue
        count += 1
        try:
            verify(mutated)
        except ScheduleError:
            continue
        found.append((mutant, harmless(mutant, schedule, mutated)))
    return count, found


@pytest.mark.shows("P1")
@pytest.mark.parametrize("each", [EACH, thorough(None)])
@pytest.mark.parametrize("name", [thorough(name) if name in LIKE_OTHERS else name for name in SCHEDULES])
def test_what_does_harm_is_caught(name: str, each: int | None, record_property: pytest.RecordProperty) -> None:
    schedule = SCHEDULES[name]()
    verify(schedule)
    count, found = passed(schedule, some(mutants(schedule), each))
    share = f"{count - len(found)} of {count} mutants caught; the other {len(found)} are harmless"
    print(f"{name}: {share}")
    record_property("mutants", share)
    harmful = [f"{mutant.field}: {mutant.what}" for mutant, is_harmless in found if not is_harmless]
    assert not harmful, f"{len(harmful)} of {count} pass: {harmful[:20]}"
    assert count > (150 if each else 2000)


@pytest.mark.parametrize("field", ["event.compute.flops", "event.wait.why", "budget"])
def test_the_list_of_harmless_fields_has_only_what_is_needed(field: str) -> None:
    """What is on the list really passes: it is there because the verifier cannot know better."""
    schedule = SCHEDULES["zero 3"]()
    tried = [mutant for mutant in mutants(schedule) if mutant.field == field]
    assert passed(schedule, tried)[1]
