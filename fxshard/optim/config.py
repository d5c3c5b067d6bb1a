"""``fxshard.AdamW`` and ``fxshard.Muon``: what a user chooses of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxshard._torch.errors import ConfigError
from fxshard.optim import coefficients as coefficient_sets
from fxshard.planner.state import AUTO, FORMATS, OFFLOADS, StateChoice

if TYPE_CHECKING:
    from fxshard.optim.plain_muon import PlainMuon

NAN = ("raise", "skip")


@dataclass(frozen=True)
class AdamW:
    """AdamW over the shards by torch's fused kernel, equal to ``torch.optim.AdamW``.

    - ``decay`` says by name and shape which parameters decay; by default all of them do, as in torch.
    - ``groups`` maps patterns of parameter names to what is different for them (lr, betas, eps, weight_decay). The
      first that matches counts, and each is a group of ``param_groups``.
    - ``nan``: what to do when a gradient is not finite, as in :class:`fxshard.Muon`: "raise" or "skip". By default
      nothing is checked, as in torch.
    - ``state``: how moments are kept: "fp32" as the masters are, "bf16" and "8bit" rounded at random, in a half and in
      a quarter of the memory, or "auto": as a ``memory_budget`` decides; without a budget, fp32.
    - ``offload="host"`` keeps moments in the host's memory and brings them to the GPU for the update. ``"auto"`` lets a
      ``memory_budget`` decide for which buckets; without a budget, for none.
    - ``over_replicas``: with HSDP, replicas share the state of a shard instead of all keeping it.
    - ``qk_clip``: as in :class:`fxshard.Muon`.

    >>> fxshard.AdamW(lr=3e-4, weight_decay=0.1, decay=lambda name, shape: len(shape) > 1)
    >>> fxshard.AdamW(lr=3e-4, groups={"embed*": {"lr": 1e-3, "weight_decay": 0.0}})
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decay: Callable[[str, tuple[int, ...]], bool] | None = None
    nan: str | None = None
    groups: Mapping[str, Mapping[str, Any]] | None = None
    over_replicas: bool = False
    state: str = "fp32"
    offload: str = "none"
    qk_clip: float | None = None

    def __post_init__(self) -> None:
        _check_groups(self, ("lr", "betas", "eps", "weight_decay"))
        _check_known(self, state=(*FORMATS, AUTO), offload=(*OFFLOADS, AUTO))
        _check_known(self, nan=(None, *NAN))
        _check_ranges(
            self,
            lr=0 <= self.lr < math.inf,
            betas=all(0 <= beta < 1 for beta in self.betas),
            eps=self.eps >= 0,
            weight_decay=self.weight_decay >= 0,
            qk_clip=self.qk_clip is None or 0 < self.qk_clip < math.inf,
        )


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
Scale = str | float | Callable[[tuple[int, int]], float] | None
FORMS = ("auto", "plain", "symmetric", "gram")


def check_scale(scale: Any) -> None:
    """Raise ``ConfigError`` for what is no ``Scale``."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not callable(scale) and not (0 <= scale < math.inf if number else scale in SCALES):
        raise ConfigError(
            f"Muon(scale={scale!r}): expected one of {', '.join(map(repr, SCALES))}, a number, or a function of "
            "(out, in)"
        )


def _check_known(choice: AdamW | Muon, **known: tuple[str | None, ...]) -> None:
    for field, values in known.items():
        if getattr(choice, field) not in values:
            found = f"{type(choice).__name__}({field}={getattr(choice, field)!r})"
            raise ConfigError(f"{found}: expected one of {', '.join(map(repr, values))}")


def _check_ranges(choice: AdamW | Muon, **fine: bool) -> None:
    for field, within in fine.items():
        if not within:
            raise ConfigError(f"{type(choice).__name__}({field}={getattr(choice, field)!r}) is out of range")


def state_choice(choice: AdamW | Muon | None) -> StateChoice:
    """How the state of an optimizer is kept; that of one that is not fxshard's own is taken for torch's."""
    if choice is None:
        return StateChoice()
    if isinstance(choice, Muon):
        return StateChoice(choice.state, choice.offload, choice.over_replicas, choice.beta2 is not None)
    return StateChoice(choice.state, choice.offload, choice.over_replicas)


def _check_groups(choice: AdamW | Muon, known: tuple[str, ...]) -> None:
    """Check the options of each pattern in ``groups`` as if they were given for all parameters."""
    kind = type(choice).__name__
    if choice.groups is None:
        return
    if not isinstance(choice.groups, Mapping):
        raise ConfigError(f"{kind}(groups={choice.groups!r}): expected a mapping from name patterns to options")
    for pattern, options in choice.groups.items():
        wrong = [option for option in options if option not in known]
        if wrong:
            raise ConfigError(f"{kind}(groups={{{pattern!r}: ...}}): {wrong[0]!r} is none of {', '.join(known)}")
        replace(choice, groups=None, **options)


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices of hidden layers, AdamW for everything else, in one optimizer.

    - ``lr`` and ``weight_decay`` are Muon's; ``adamw`` has its own. Weight decay is decoupled and uses ``lr`` without
      ``scale``.
    - ``scale`` multiplies the update of a matrix by "rms": 0.2·√max(out, in), which gives it the size of an AdamW
      update; "spectral": √max(1, out/in); "ratio": √(out/in); a number; what a function of (out, in) returns; or
      nothing.
    - ``use(name, shape)`` says which parameters are Muon's; by default all matrices that are no embeddings or output
      heads.
    - ``split`` maps name patterns to how fused weights are cut before orthogonalisation (a ``Split``, or its
      ``parts``). Weights that no pattern matches are cut if their names and shapes say that they are fused
      (``model.report.splits``), unless ``split`` is "off".
    - ``groups`` maps patterns of parameter names to what is different for them (lr, momentum, nesterov, weight_decay,
      scale). The first that matches counts, and each is a group of ``param_groups``; AdamW's parameters have those of
      ``adamw``.
    - ``coefficients`` names a set of ``fxshard.optim.coefficients``, ``form`` how Newton–Schulz is computed.
    - ``nan``: what to do when a gradient is not finite: "raise" a ``StateError``, or "skip" the step with a warning.
      Nothing is changed either way. On a GPU the host does not wait to know: it raises or warns when the next step
      begins, or when the optimizer's state is read.
    - ``state`` and ``offload`` are those of :class:`fxshard.AdamW`, for the momentum and for AdamW's part alike.
    - ``over_replicas``: with HSDP, replicas share state and work where owners hold whole matrices (layout "whole");
      where matrices travel, each replica keeps their momentum.
    - ``beta2``: normalize each row of an update by its running second moment, as :class:`fxshard.NorMuon` does.
    - ``qk_clip``: if the largest attention logit of a head exceeds this number in a step, the weights of its queries
      and keys are scaled down to it after the update (MuonClip).

    >>> fxshard.Muon(lr=2e-2, scale="spectral", adamw=fxshard.AdamW(lr=3e-4), split={"*.qkv.weight": 3})
    """

    lr: float = 2e-2
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    steps: int = 5
    coefficients: str = "quintic"
    scale: Scale = "spectral"
    adamw: AdamW = AdamW()
    use: Callable[[str, tuple[int, ...]], bool] | None = None
    split: Mapping[str, Split | int | tuple[int, ...]] | str = "auto"
    form: str = "auto"
    nan: str = "raise"
    groups: Mapping[str, Mapping[str, Any]] | None = None
    state: str = "fp32"
    offload: str = "none"
    beta2: float | None = None
    over_replicas: bool = False
    qk_clip: float | None = None

    def __post_init__(self) -> None:
        check_scale(self.scale)
        _check_known(self, state=(*FORMATS, AUTO), offload=(*OFFLOADS, AUTO))
        of_rows = ("beta2",) if self.beta2 is not None else ()
        _check_groups(self, ("lr", "momentum", "nesterov", "weight_decay", "scale", *of_rows))
        coefficient_sets.check(self.coefficients, self.steps)
        _check_ranges(
            self,
            lr=0 <= self.lr < math.inf,
            momentum=0 <= self.momentum < 1,
            weight_decay=self.weight_decay >= 0,
            beta2=self.beta2 is None or 0 <= self.beta2 < 1,
            qk_clip=self.qk_clip is None or 0 < self.qk_clip < math.inf,
        )
        _check_known(self, form=FORMS, nan=NAN)
        if not isinstance(self.adamw, AdamW):
            raise ConfigError(f"Muon(adamw={self.adamw!r}): expected fxshard.AdamW(...)")
        if self.adamw.nan not in (None, self.nan):
            raise ConfigError(
                f"Muon(nan={self.nan!r}, adamw=AdamW(nan={self.adamw.nan!r})): one check covers all gradients; say it "
                "to Muon alone"
            )
        for field in ("state", "offload"):
            if getattr(self.adamw, field) not in (getattr(AdamW, field), getattr(self, field)):
                raise ConfigError(
                    f"Muon(adamw=AdamW({field}={getattr(self.adamw, field)!r})): momentum and moments are kept alike; "
                    "say it to Muon alone"
                )
        if self.adamw.over_replicas and not self.over_replicas:
            raise ConfigError("Muon(adamw=AdamW(over_replicas=True)): replicas share all state; say it to Muon alone")
        if self.adamw.qk_clip is not None:
            raise ConfigError("Muon(adamw=AdamW(qk_clip=...)): heads are clipped together; say it to Muon alone")
        if self.use is not None and not callable(self.use):
            raise ConfigError(f"Muon(use={self.use!r}): expected a function of name and shape")
        if self.split not in ("auto", "off"):
            if not isinstance(self.split, Mapping):
                raise ConfigError(
                    f"Muon(split={self.split!r}): expected 'auto', 'off', or a mapping from name patterns to splits"
                )
            cuts = {name: cut if isinstance(cut, Split) else Split(cut) for name, cut in self.split.items()}
            object.__setattr__(self, "split", cuts)

    def build(self, model: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> PlainMuon:
        """The optimizer over a plain model's parameters, or over (name, parameter) pairs, in one process.

        >>> optimizer = fxshard.Muon(lr=2e-2).build(model)
        """
        from fxshard.optim.plain_muon import PlainMuon

        if self.qk_clip is not None:
            raise ConfigError(
                f"Muon(qk_clip={self.qk_clip}).build(): logits are measured in compiled graphs; "
                "fxshard.compile(model, optimizer=...) measures them, on one rank too"
            )
        if not state_choice(self).first.plain:
            raise ConfigError(
                f"Muon(state={self.state!r}, offload={self.offload!r}).build(): over plain tensors state is kept as "
                "the parameters are; fxshard.shard(model, optimizer=...) keeps it in fewer bits or on the host, on one "
                "rank too"
            )
        return PlainMuon(model, self)


@dataclass(frozen=True)
class NorMuon(Muon):
    """NorMuon: Muon whose updates are normalized by row, that is for every neuron, after Newton–Schulz.

    A running mean (``beta2``) of the squares of a row is kept, one number for a row; the row is divided by its root,
    and the matrix scaled to the norm that it had. Everything else is :class:`fxshard.Muon`'s: options, layouts, state
    and learning rates. With ``scale="rms"`` it is the algorithm of the paper (arXiv 2510.05491), with "spectral" that
    of its authors' code.

    >>> fxshard.NorMuon(lr=2e-2, beta2=0.95, adamw=fxshard.AdamW(lr=3e-4))
    """

    beta2: float | None = 0.95

    def __post_init__(self) -> None:
        if self.beta2 is None:
            raise ConfigError("NorMuon(beta2=None): without second moments it is fxshard.Muon")
        super().__post_init__()
