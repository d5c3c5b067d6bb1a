"""JSON both ways: nothing is lost, and what is damaged or of another version is refused with a reason."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch.errors import FxshardError
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import Placement
from fxshard.planner.layout import TensorSpec
from fxshard.planner.memory import SlotRange
from fxshard.planner.rows import row_layout
from fxshard.planner.whole import whole_layout
from fxshard.schedule.events import Event, Kind, Phase
from fxshard.schedule.files import FORMAT, ScheduleFileError, _digest, from_json, to_json
from fxshard.schedule.schedule import Schedule
from tests.inspect.schedules import drawn

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
TEXT = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "))
"""What can be printed."""
COUNT = st.integers(0, 2**60)
POSITIONS = st.lists(st.integers(0, 100), max_size=3).map(tuple)
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=4)

LAYOUTS = st.builds(
    lambda shapes, ranks, make: make([TensorSpec(f"p{i}", shape) for i, shape in enumerate(shapes)], ranks),
    SHAPES, st.integers(1, 9), st.sampled_from([row_layout, whole_layout]),
)  # fmt: skip
BUCKETS = st.builds(
    BucketPlan, st.integers(0, 99), TEXT, TEXT, LAYOUTS,
    st.builds(Placement, st.booleans(), st.booleans(), st.booleans()), DTYPES, DTYPES, DTYPES, st.booleans(),
)  # fmt: skip
EVENTS = st.builds(
    Event, st.sampled_from(Kind), st.sampled_from(Phase), TEXT, st.integers(-1, 99),
    st.lists(TEXT, max_size=3).map(tuple), COUNT, DTYPES, TEXT, TEXT, TEXT,
    slot=st.none() | st.builds(SlotRange, COUNT, COUNT), reads=POSITIONS, writes=POSITIONS, flops=COUNT, traffic=COUNT,
    held=COUNT, peak=COUNT, waits_for=POSITIONS,
)  # fmt: skip
SCHEDULES = st.builds(
    Schedule, st.lists(EVENTS, max_size=4).map(tuple), st.lists(BUCKETS, max_size=3).map(tuple), COUNT, COUNT,
    st.integers(1, 4096), st.integers(0, 3), st.none() | COUNT,
)  # fmt: skip


@pytest.mark.shows("P7")
@given(SCHEDULES)
def test_round_trip_is_equal(schedule: Schedule) -> None:
    back = from_json(to_json(schedule))
    assert back == schedule
    assert back.digest == schedule.digest


@pytest.mark.shows("P7")
def test_round_trip_of_a_whole_step() -> None:
    schedule = drawn(layers=80, ranks=1024, budget=60 * 2**30)
    text = to_json(schedule)
    assert from_json(text) == schedule
    assert to_json(from_json(text)) == text


def edited(change: Any) -> str:
    """A file in which someone changed something and took care of the digest."""
    document = json.loads(to_json(drawn()))
    change(document["schedule"])
    document["digest"] = _digest(document["schedule"])
    return json.dumps(document)


def test_cut_off_file() -> None:
    with pytest.raises(ScheduleFileError, match="not JSON, or cut off"):
        from_json(to_json(drawn())[:-100])


def test_other_json() -> None:
    for text in ("[]", "3", '{"traceEvents": []}'):
        with pytest.raises(ScheduleFileError, match="not a schedule"):
            from_json(text)


def test_changed_content() -> None:
    text = to_json(drawn())
    with pytest.raises(ScheduleFileError, match="damaged or edited"):
        from_json(text.replace('"ranks": 8', '"ranks": 9'))


def test_another_version_names_both() -> None:
    document = json.loads(to_json(drawn())) | {"format": FORMAT + 1, "fxshard": "99.0"}
    with pytest.raises(ScheduleFileError, match=rf"format {FORMAT + 1} by fxshard '99.0'; .* reads format {FORMAT}"):
        from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["events"][3].update(bytes="many"), r"events\[3\].bytes: expected int, found 'many'"),
        (lambda s: s["events"][0].update(dtype="load"), r"events\[0\].dtype: expected a dtype"),
        (lambda s: s["events"][0].update(kind="dance"), r"events\[0\].kind: expected one of compute"),
        (lambda s: s["events"][0].pop("why"), r"events\[0\]: expected exactly the fields"),
        (lambda s: s.update(extra=1), "schedule: expected exactly the fields"),
        (lambda s: s["buckets"].__setitem__(0, None), r"buckets\[0\]: expected exactly"),
        (lambda s: s["buckets"][0]["layout"].update(shard_numel=63), r"buckets\[0\].layout: shard length 63"),
        (lambda s: s.update(ranks=True), "ranks: expected int"),
        (lambda s: s["events"][0].update(why="\x1b]0;gone\x07"), r"why: expected text without control .*x1b"),
        (lambda s: s["buckets"][0].update(name="a\u202eb"), r"name: expected text without control .*u202e"),
        (lambda s: s["buckets"][0]["layout"].update(ranks=0), r"layout: 0 shards of"),
        (
            lambda s: s["buckets"][0]["layout"]["slots"][0]["spec"].update(shape=[-4, 4]),
            r"layout: .* has shape \(-4, 4\)",
        ),
        (lambda s: s["buckets"][0]["layout"].update(ranks=10**30), r"layout: .* more than any memory holds"),
    ],
)
def test_content_that_cannot_be(change: Any, message: str) -> None:
    with pytest.raises(ScheduleFileError, match=message):
        from_json(edited(change))


def test_a_layout_over_a_billion_ranks_costs_no_memory() -> None:
    """Boundaries between shards are counted, not listed."""
    tracemalloc.start()
    try:
        from_json(edited(lambda s: s["buckets"][0]["layout"].update(ranks=10**9)))
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_nested_without_end() -> None:
    for text in ("[" * 10**5, '{"a":' * 10**5, "[" * 10**5 + "]" * 10**5):
        with pytest.raises(ScheduleFileError, match=r"deeper than any schedule|not JSON"):
            from_json(text)


def test_no_number_at_all() -> None:
    with pytest.raises(ScheduleFileError, match="holds no NaN"):
        from_json('{"format": NaN}')
    with pytest.raises(ScheduleFileError, match="not JSON"):
        from_json("1" * 10**5)


@pytest.mark.parametrize("field", ["format", "fxshard", "digest"])
def test_what_a_terminal_would_obey_is_not_printed(field: str) -> None:
    document = json.loads(to_json(drawn())) | {"format": FORMAT + (field != "digest"), field: "\x1b[2J"}
    with pytest.raises(ScheduleFileError) as caught:
        from_json(json.dumps(document))
    assert "\x1b" not in str(caught.value)


def test_the_error_is_one_of_fxshards() -> None:
    assert issubclass(ScheduleFileError, FxshardError)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match="set"):
        to_json(replace(drawn(), budget={1}))  # type: ignore[arg-type]
