"""What implementations of experts take, as measured: a table for each device, and what it says of a case.

Tables are files in ``measured``, made by ``fxshard bench moe --write``. Of a case that was not measured, the nearest
shape that was speaks. The number of tokens is no part of a case: it differs between ranks, which have to choose alike
because schedules follow from the choice, so each shape is measured with several and all of them count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxshard._torch.errors import ConfigError
from fxshard.kernels.case import Case

FOLDER = Path(__file__).with_name("measured")
FORMAT = 1
COMPILER = "compiler"
"""In measurements of dense MLPs: two products and an activation, left to ``torch.compile``."""
GPUS = ("gb200", "b200", "h200", "h100", "a100")
"""GPUs that fxshard knows by a short name, which stands in what CUDA calls them. The longer one first."""


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step, forward and backward with all gradients, by implementation."""

    dense: bool
    """Whether it is a dense MLP made of linears; otherwise experts made of grouped products, with routing weights."""
    dtype: str
    experts: int
    hidden: int
    inner: int
    tokens: int
    """Rows, of all experts together."""
    step_ms: Mapping[str, float]

    def __post_init__(self) -> None:
        for field in ("experts", "hidden", "inner", "tokens"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected a number of 1 or more")
        if type(self.dense) is not bool or not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise ValueError(f"dense is {self.dense!r} and dtype {self.dtype!r}, expected true or false and a dtype")
        times = self.step_ms.values() if isinstance(self.step_ms, dict) else ()
        if not times or any(type(ms) not in (int, float) or not 0 < ms < math.inf for ms in times):
            raise ValueError(f"step_ms is {self.step_ms!r}, expected a positive number for each implementation")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.hidden, self.inner

    def rate(self, name: str) -> float:
        """TFLOP/s. A step multiplies by three matrices, and each product has two in backward."""
        return 3 * 3 * 2 * self.tokens * self.hidden * self.inner / self.step_ms[name] * 1e-9


@dataclass(frozen=True)
class Nearest:
    """What was measured nearest to a case."""

    device: str
    shape: tuple[int, int, int]
    tokens: tuple[int, ...]
    rates: Mapping[str, float]
    """TFLOP/s by implementation, the fastest first: the geometric mean over ``tokens``, of those measured with all."""

    def __str__(self) -> str:
        tokens = " and ".join(map(str, self.tokens))
        return f"measured on {self.device} for {' × '.join(map(str, self.shape))} with {tokens} tokens"


@dataclass(frozen=True)
class CostTable:
    """What was measured on one device."""

    device: str
    """As ``device_name`` says it."""
    made: Mapping[str, str]
    """With what: versions, and what kept implementations from being measured. For people."""
    measurements: Sequence[Measurement]

    def nearest(self, case: Case, *, dense: bool) -> Nearest | None:
        """The shape of the same kind and type whose sizes have ratios to the case's that are nearest to one."""
        dtype = str(case.dtype).removeprefix("torch.")
        found = [each for each in self.measurements if (each.dense, each.dtype) == (dense, dtype)]
        if not found:
            return None
        wanted = (case.experts, case.hidden, case.inner)
        # Of two that are equally near, the smaller one: the order of a file is of no importance.
        shape = min({each.shape for each in found}, key=lambda shape: (_distance(shape, wanted), shape))
        same = sorted((each for each in found if each.shape == shape), key=lambda each: each.tokens)
        names = set.intersection(*(set(each.step_ms) for each in same))
        rates = {name: math.exp(sum(math.log(each.rate(name)) for each in same) / len(same)) for name in names}
        ordered = dict(sorted(rates.items(), key=lambda item: (-item[1], item[0])))
        return Nearest(self.device, shape, tuple(each.tokens for each in same), ordered)

    def write(self, path: Path) -> None:
        """One measurement in each line."""
        head = json.dumps({"format": FORMAT, "device": self.device, "made": dict(self.made)}, indent=1)
        lines = ",\n".join(f"  {json.dumps(asdict(each))}" for each in self.measurements)
        path.write_text(f'{head[:-2]},\n "measurements": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return sum(math.log(x / y) ** 2 for x, y in zip(a, b, strict=True))


# -- files -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> CostTable:
    """A table, or a ConfigError that says what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it is no table of format {FORMAT}")
        measurements = tuple(_measurement(i, each) for i, each in enumerate(_of(found, "measurements", list)))
        seen = {(each.dense, each.dtype, each.shape, each.tokens) for each in measurements}
        if len(seen) < len(measurements):
            raise ValueError("it has two measurements of one case")
        return CostTable(_of(found, "device", str), _of(found, "made", dict), measurements)
    except (OSError, ValueError) as error:  # of which JSON's errors are one kind
        raise ConfigError(
            f"{path}, a table of what experts were measured to take, cannot be used: {error}; make it again by "
            'fxshard bench moe --write, or choose an implementation by name (experts="torch")'
        ) from error


def _of(table: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(table.get(key), kind):
        raise ValueError(f"{key!r} is {table.get(key)!r}, expected a {kind.__name__}")
    return table[key]


def _measurement(number: int, given: Any) -> Measurement:
    wanted = [field.name for field in fields(Measurement)]
    try:
        if not isinstance(given, dict) or sorted(given) != sorted(wanted):
            raise ValueError(f"it is {given!r}, expected {', '.join(wanted)}")
        return Measurement(**given)
    except ValueError as error:
        raise ValueError(f"measurement {number}: {error}") from error


_ADDED: dict[str, CostTable] = {}


def add_table(path: str | Path) -> None:
    """Use a table of your own for its device, in place of the one that comes with fxshard; on every rank the same.

    >>> add_table("my_gpu.json")  # made by: fxshard bench moe --write my_gpu.json
    """
    table = read(Path(path))
    _ADDED[table.device] = table


def table_of(device: str) -> CostTable | None:
    """What was measured on a device of that name, or None."""
    return _ADDED.get(device) or _table_in(FOLDER, device)


@cache
def _table_in(folder: Path, device: str) -> CostTable | None:
    path = folder / f"{device}.json"
    if not path.exists():
        return None
    table = read(path)
    if table.device != device:
        raise ConfigError(f"{path} holds what was measured on {table.device!r}: name it {table.device}.json")
    return table


# -- devices -----------------------------------------------------------------------------------------------------------


def short_name(name: str) -> str | None:
    """What fxshard calls a GPU of which CUDA, or a plan, gives a name; None if it is none that it knows."""
    return next((each for each in GPUS if each in name.lower()), None)


def device_name(case: Case) -> str:
    """Whose table counts: that of the GPU that this is planned for, or of the device that tensors are on."""
    if case.planned_on is None and (case.device.type != "cuda" or not torch.cuda.is_available()):
        return case.device.type
    name = torch.cuda.get_device_name(case.device) if case.planned_on is None else case.planned_on
    return short_name(name) or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def nearest(case: Case, *, dense: bool = False) -> Nearest | None:
    """What was measured nearest to a case on its device, or None where nothing of its kind was."""
    table = table_of(device_name(case))
    return None if table is None else table.nearest(case, dense=dense)
