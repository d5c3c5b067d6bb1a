"""What a user chooses: precision, optimizer and the options of a compilation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxshard.errors import ConfigError
from fxshard.fused.choose import choices
from fxshard.optim import coefficients as coefficient_sets
from fxshard.plan.hardware import Hardware

if TYPE_CHECKING:
    from fxshard.optim.plain_muon import PlainMuon
    from fxshard.passes.pass_list import PassList


@dataclass(frozen=True)
class Precision:
    """Mixed precision: compute and gather in ``param``, reduce gradients in ``reduce``, keep masters in ``master``.

    ``None`` keeps the dtype the model has (for ``reduce``: the dtype of ``param``). With ``cast_inputs`` floating-point
    inputs of the model are cast to ``param``, as FSDP2 does.

    >>> fxshard.compile(model, precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32))
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "master"):
            dtype = getattr(self, field)
            if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
                raise ConfigError(f"Precision({field}={dtype!r}): expected a floating-point torch.dtype or None")


@dataclass(frozen=True)
class AdamW:
    """AdamW over the flat shards: one fused pass per bucket, equal to ``torch.optim.AdamW``.

    ``decay`` decides by name and shape which parameters decay; by default all of them do, as in torch.

    >>> fxshard.AdamW(lr=3e-4, weight_decay=0.1, decay=lambda name, shape: len(shape) > 1)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decay: Callable[[str, tuple[int, ...]], bool] | None = None

    def __post_init__(self) -> None:
        checks: dict[str, bool] = {
            "lr": self.lr >= 0,
            "betas": all(0 <= beta < 1 for beta in self.betas),
            "eps": self.eps >= 0,
            "weight_decay": self.weight_decay >= 0,
        }
        for field, fine in checks.items():
            if not fine:
                raise ConfigError(f"AdamW({field}={getattr(self, field)!r}) is out of range")


@dataclass(frozen=True)
class Split:
    """How the rows of a fused weight fall into matrices that are orthogonalised apart.

    ``parts``: a number of equal parts, or the rows of each part. ``groups``: the parts repeat this often along the
    rows, as in ``[q k v | q k v | ...]``; the pieces of a part are one matrix. ``head_rows``: cut each part further
    into matrices of this many rows (one number, or one for each part): a head, or a group of heads.

    >>> Split(3)                                    # q, k, v of equal size below each other
    >>> Split((2048, 512, 512), head_rows=128)      # grouped-query attention, every head by itself
    >>> Split((256, 64, 64), groups=8)              # eight groups of four queries, a key and a value
    """

    parts: int | tuple[int, ...]
    groups: int = 1
    head_rows: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("parts", "head_rows"):
            if isinstance(value := getattr(self, field), list):
                object.__setattr__(self, field, tuple(value))
        counts: list[Any] = [self.groups]
        for value in (self.parts, self.head_rows):
            counts += value if isinstance(value, tuple) else [] if value is None else [value]
        if self.parts == () or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            raise ConfigError(f"{self}: expected whole numbers above 0 (numbers of parts and groups, or of rows)")


SCALES = ("rms", "spectral", "ratio", None)
FORMS = ("auto", "plain", "symmetric", "gram")
NAN = ("raise", "skip")


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices of hidden layers, AdamW for everything else, in one optimizer.

    ``lr`` and ``weight_decay`` are Muon's; ``adamw`` has its own. ``scale`` multiplies the update of a matrix by
    "rms": 0.2·√max(out, in), which gives it the size of an AdamW update; "spectral": √max(1, out/in); "ratio":
    √(out/in); or nothing. Weight decay is decoupled and uses ``lr`` without that factor. ``coefficients`` names a set
    of ``fxshard.optim.coefficients``. ``use(name, shape)`` says which parameters are Muon's; by default all matrices
    that are no embeddings or output heads. ``split`` maps name patterns to how fused weights are cut before
    orthogonalisation (a ``Split``, or its ``parts``). ``form`` chooses how Newton–Schulz is computed. ``nan``: what to
    do when a gradient is not finite: "raise" a ``StateError``, or "skip" the step with a warning. Nothing is changed
    either way. On a GPU the host does not wait to know: it raises or warns when the next step begins, or when the
    optimizer's state is read.

    >>> fxshard.Muon(lr=2e-2, scale="spectral", adamw=fxshard.AdamW(lr=3e-4), split={"*.qkv.weight": 3})
    """

    lr: float = 2e-2
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    steps: int = 5
    coefficients: str = "quintic"
    scale: str | None = "spectral"
    adamw: AdamW = AdamW()
    use: Callable[[str, tuple[int, ...]], bool] | None = None
    split: Mapping[str, Split | int | tuple[int, ...]] | None = None
    form: str = "auto"
    nan: str = "raise"

    def __post_init__(self) -> None:
        coefficient_sets.check(self.coefficients, self.steps)
        checks: dict[str, bool] = {
            "lr": self.lr >= 0,
            "momentum": 0 <= self.momentum < 1,
            "weight_decay": self.weight_decay >= 0,
        }
        for field, fine in checks.items():
            if not fine:
                raise ConfigError(f"Muon({field}={getattr(self, field)!r}) is out of range")
        for field, known in (("scale", SCALES), ("form", FORMS), ("nan", NAN)):
            if getattr(self, field) not in known:
                raise ConfigError(
                    f"Muon({field}={getattr(self, field)!r}): expected one of {', '.join(map(repr, known))}"
                )
        if not isinstance(self.adamw, AdamW):
            raise ConfigError(f"Muon(adamw={self.adamw!r}): expected fxshard.AdamW(...)")
        if self.use is not None and not callable(self.use):
            raise ConfigError(f"Muon(use={self.use!r}): expected a function of name and shape")
        if self.split is not None:
            if not isinstance(self.split, Mapping):
                raise ConfigError(f"Muon(split={self.split!r}): expected a mapping from name patterns to splits")
            cuts = {name: cut if isinstance(cut, Split) else Split(cut) for name, cut in self.split.items()}
            object.__setattr__(self, "split", cuts)

    def build(self, model: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> PlainMuon:
        """The optimizer over a plain model's parameters, or over (name, parameter) pairs, in one process.

        >>> optimizer = fxshard.Muon(lr=2e-2).build(model)
        """
        from fxshard.optim.plain_muon import PlainMuon

        return PlainMuon(model, self)


LOWERINGS = ("inductor", "eager")

_UNITS = {
    "": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(budget: int | str | None) -> int | None:
    """``60GiB``, ``"1.5 GB"`` or a number of bytes."""
    if budget is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?b?)\s*", str(budget).lower())
    try:
        assert match is not None
        size = int(float(match[1]) * _UNITS[match[2] if match[2] != "b" else ""])
    except (AssertionError, KeyError, ValueError):
        raise ConfigError(f'memory_budget={budget!r}: expected bytes, or a string such as "60GiB" or "1.5GB"') from None
    if size <= 0:
        raise ConfigError(f"memory_budget={budget!r}: expected more than nothing")
    return size


@dataclass(frozen=True)
class Options:
    """How the captured graphs are scheduled and lowered.

    ``prefetch``: how many gathers run ahead of the one in use, 0 gathers when needed; None lets the cost model decide
    when each one must start. ``keep_resident``: buckets stay unsharded between forward and backward where they fit.
    ``defer_wgrad``: weight-gradient products of backward run where they hide communication that nothing else hides.
    ``overlap``: collectives run beside compute; off, each one is waited for where it starts. ``arena``: buffers have
    planned places in one allocation; off, each is allocated when needed. None of them changes a result.
    ``memory_budget``: bytes that shards and arena may take together on a rank. ``hardware``: the machine whose
    durations the schedule is made for; None means the one it runs on. ``verify``: check every emitted schedule.
    ``experts``: what runs mixture-of-experts MLPs: ``"auto"`` picks the fastest implementation that runs on the
    machine, ``"torch"``, ``"triton"``, ``"te"`` or ``"te-mxfp8"`` that one, ``"off"`` leaves them as they are written.
    ``passes``: a list derived from ``fxshard.PASSES``, with passes of one's own. ``trace_once``: layers that repeat are
    traced once when a model is compiled, by Dynamo and through autograd, not one by one: the first call takes less
    time, the graphs are the same.
    ``cuda_graphs``: from their second run on, forward and backward are captured in CUDA graphs and replayed: the host
    launches a step in a few calls. Their memory stays reserved between steps.
    """

    lowering: str = "inductor"
    prefetch: int | None = None
    keep_resident: bool = True
    defer_wgrad: bool = True
    overlap: bool = True
    arena: bool = True
    memory_budget: int | None = None
    hardware: str | Hardware | None = None
    verify: bool = True
    experts: str = "auto"
    passes: PassList | None = None
    trace_once: bool = True
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ConfigError(f"lowering={self.lowering!r}: expected one of {', '.join(map(repr, LOWERINGS))}")
        if self.experts not in choices():
            raise ConfigError(f"experts={self.experts!r}: expected one of {', '.join(map(repr, choices()))}")
        if self.prefetch is not None and (not isinstance(self.prefetch, int) or self.prefetch < 0):
            raise ConfigError(
                f"prefetch={self.prefetch!r}: expected the number of gathers to run ahead, 0 or more, or None"
            )

        if self.passes is not None:
            from fxshard.passes.pass_list import PassList  # which knows these options

            if not isinstance(self.passes, PassList):
                raise ConfigError(
                    f"passes={self.passes!r}: expected a list derived from fxshard.PASSES, such as "
                    'fxshard.PASSES.after("insert_reshard", my_pass)'
                )

    @classmethod
    def from_dict(cls, options: dict[str, Any] | None) -> Options:
        """Options as ``torch.compile(..., options={...})`` passes them."""
        known = cls.__dataclass_fields__
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
        given = dict(options or {})
        if "memory_budget" in given:
            given["memory_budget"] = parse_bytes(given["memory_budget"])
        return cls(**given)
