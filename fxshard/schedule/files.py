"""Schedules as JSON, both ways, without loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from fxshard._torch.errors import FxshardError
from fxshard._version import __version__
from fxshard.schedule.schedule import Schedule

FORMAT = 8
"""Raised whenever a field of a schedule, an event, a bucket or a layout is added, removed or changes its meaning."""


class ScheduleFileError(FxshardError):
    """A file is not a schedule, is damaged, or was written in a format that this fxshard does not read."""


def to_json(schedule: Schedule) -> str:
    """The whole schedule as JSON: events, buckets, layouts, and a digest that tells a damaged file.

    >>> Path("schedule.json").write_text(to_json(model.schedule))
    """
    content = _encode(schedule)
    return json.dumps({"format": FORMAT, "fxshard": __version__, "digest": _digest(content), "schedule": content})


def from_json(text: str) -> Schedule:
    """The schedule that :func:`to_json` wrote, equal to it in every field.

    >>> schedule = from_json(Path("schedule.json").read_text())
    """
    try:
        document = json.loads(text, parse_constant=_not_a_number)
        return _read(document)
    except RecursionError:
        raise ScheduleFileError("lists within lists, deeper than any schedule has") from None
    except ScheduleFileError:
        raise
    except ValueError as error:
        raise ScheduleFileError(f"not JSON, or cut off: {error}") from None


def _not_a_number(name: str) -> NoReturn:
    raise ScheduleFileError(f"a schedule holds no {name}")


def _read(document: Any) -> Schedule:
    if not isinstance(document, dict) or not {"format", "digest", "schedule"} <= document.keys():
        raise ScheduleFileError("this JSON is not a schedule: it has no 'format', 'digest' and 'schedule'")
    if document["format"] != FORMAT:
        raise ScheduleFileError(
            f"written in format {_shown(document['format'])} by fxshard {_shown(document.get('fxshard'))}; "
            f"fxshard {__version__} reads format {FORMAT}: plan again, or read it with the fxshard that wrote it"
        )
    found = _digest(document["schedule"])
    if found != document["digest"]:
        written = _shown(document["digest"])
        raise ScheduleFileError(
            f"the file was damaged or edited: its content has digest {found}, but {written} was written"
        )
    schedule = _decode(document["schedule"], Schedule, "schedule")
    assert isinstance(schedule, Schedule)
    return schedule


def _digest(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a schedule holds a {type(value).__name__}, which files.py does not know how to write")


def _decode(value: Any, wanted: Any, where: str) -> Any:
    """``value`` as the type that a dataclass declares: the declarations are the description of the format."""
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(wanted):
            return None
        (wanted,) = (choice for choice in get_args(wanted) if choice is not NoneType)
        return _decode(value, wanted, where)
    if origin is tuple:
        return _decode_tuple(value, get_args(wanted), where)
    if isinstance(wanted, type) and is_dataclass(wanted):
        return _decode_dataclass(value, wanted, where)
    if wanted is torch.dtype:
        dtype = getattr(torch, value, None) if isinstance(value, str) else None
        return dtype if isinstance(dtype, torch.dtype) else _wrong(value, "a dtype", where)
    if issubclass(wanted, Enum):
        known = [member.value for member in wanted]
        return wanted(value) if value in known else _wrong(value, f"one of {', '.join(map(str, known))}", where)
    if wanted is float and type(value) is int:
        return value
    if wanted is str and type(value) is str and not value.isprintable():  # would reach a terminal with every name
        _wrong(value, "text without control characters", where)
    return value if type(value) is wanted else _wrong(value, f"{wanted.__name__}", where)


def _decode_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _wrong(value, "a list", where)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(item, items[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(items):
        _wrong(value, f"{len(items)} values", where)
    return tuple(_decode(v, t, f"{where}[{i}]") for i, (v, t) in enumerate(zip(value, items, strict=True)))


def _decode_dataclass(value: Any, wanted: type, where: str) -> Any:
    hints = _hints(wanted)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        _wrong(value, f"exactly the fields {', '.join(hints)}", where)
    try:
        return wanted(**{name: _decode(value[name], hint, f"{where}.{name}") for name, hint in hints.items()})
    except ScheduleFileError:
        raise
    except FxshardError as error:  # a layout checks itself
        raise ScheduleFileError(f"{where}: {error}") from error


@cache
def _hints(wanted: type) -> Mapping[str, Any]:
    hints = get_type_hints(wanted)
    return {field.name: hints[field.name] for field in fields(wanted)}


def _wrong(value: Any, expected: str, where: str) -> Any:
    raise ScheduleFileError(f"{where}: expected {expected}, found {_shown(value)}")


def _shown(value: Any) -> str:
    """A value of a file in a message: short, and with nothing in it that a terminal obeys."""
    found = ascii(value)
    return found if len(found) < 80 else found[:77] + "..."
