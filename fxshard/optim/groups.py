"""Parameter groups: which parameters share hyperparameters, checks of these, and saved groups put in our order."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from fxshard._torch.errors import ConfigError, StateError
from fxshard.optim.config import AdamW, Muon, check_scale
from fxshard.planner.state import ROW_MOMENTS, state_shape
from fxshard.planner.stored_names import find_sources, join_state, wrapping

Named = tuple[str, torch.Tensor]
Group = dict[str, Any]


def param_groups(choice: AdamW | Muon, named: Iterable[Named], muon: Container[str] = ()) -> list[Group]:
    """Groups of (name, parameter) pairs in the order given: Muon's, then AdamW's, where there are any.

    Within each: those that no pattern of ``groups`` matches, then one group for each pattern; AdamW's that do not decay
    come after those that do.
    """
    adamw = choice.adamw if isinstance(choice, Muon) else choice
    members: dict[tuple[str, int, bool], list[Named]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            kind = "muon" if name in muon else "adamw"
            of_kind = choice if kind == "muon" else adamw
            decays = kind == "muon" or adamw.decay is None or adamw.decay(name, tuple(parameter.shape))
            members.setdefault((kind, _matching(of_kind, name), not decays), []).append((name, parameter))
    made = []
    for kind, pattern, no_decay in sorted(members, key=lambda key: (key[0] == "adamw", key[1:])):
        group: Group = {"params": members[kind, pattern, no_decay]}
        if isinstance(choice, Muon):
            group["kind"] = kind
        group |= _muon_options(choice) if kind == "muon" and isinstance(choice, Muon) else _adamw_options(adamw)
        if pattern >= 0:
            patterns = list(((choice if kind == "muon" else adamw).groups or {}).items())
            group |= {"pattern": patterns[pattern][0], **patterns[pattern][1]}
        if no_decay:
            group["weight_decay"] = 0.0
        made.append(group)
    return made


def check_patterns(choice: AdamW | Muon, names: Sequence[str], muon: Container[str] = ()) -> None:
    """Raise ``ConfigError`` for a pattern of ``groups`` that matches nothing it could be for."""
    for of_kind in (choice, choice.adamw) if isinstance(choice, Muon) else (choice,):
        own = [name for name in names if (name in muon) == isinstance(of_kind, Muon)]
        for pattern in of_kind.groups or {}:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise ConfigError(
                    f"{type(of_kind).__name__}: the pattern {pattern!r} of groups matches none of its parameters: "
                    f"{', '.join(own[:8]) or 'it has none'}{' …' if own[8:] else ''}"
                )


def _matching(choice: AdamW | Muon, name: str) -> int:
    """The number of the first pattern of ``groups`` that matches, -1 if none does."""
    return next((i for i, pattern in enumerate(choice.groups or {}) if fnmatchcase(name, pattern)), -1)


def _adamw_options(choice: AdamW) -> Group:
    return {"lr": choice.lr, "betas": choice.betas, "eps": choice.eps, "weight_decay": choice.weight_decay}


def _muon_options(choice: Muon) -> Group:
    fields = ("lr", "momentum", "nesterov", "weight_decay", "scale", "coefficients", "steps")
    options = {field: getattr(choice, field) for field in fields}
    return options if choice.beta2 is None else {**options, "beta2": choice.beta2}


# -- what a group says -------------------------------------------------------------------------------------------------


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ``StateError`` for hyperparameters that no step can be made with. No number on a GPU is waited for."""
    muon = group.get("kind") == "muon"
    checks: dict[str, Callable[[Any], bool]] = {"lr": _not_negative, "weight_decay": _not_negative}
    if muon:
        checks["momentum"] = lambda value: 0 <= value < 1
        if "beta2" in group:
            checks["beta2"] = lambda value: value is not None and 0 <= value < 1
    else:
        checks["betas"] = lambda value: len(value) == 2 and all(0 <= _number(beta) < 1 for beta in value)
        checks["eps"] = _not_negative
    for field, fine in checks.items():
        if field not in group:
            raise StateError(f"param_groups has no {field!r}: it is the state of another optimizer")
        if not fine(group[field]):
            raise StateError(f"param_groups: {field}={group[field]!r} is out of range")
    if muon:
        check_scale(group["scale"])
    refused = ["amsgrad", "differentiable", *(["maximize"] if muon else [])]
    for field in refused:
        if group.get(field):
            raise StateError(
                f"param_groups: {field}={group[field]!r} is not there in fxshard's {'Muon' if muon else 'AdamW'}: set "
                f"it to False, or use torch.optim over model.parameters()"
            )
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise StateError(
            "param_groups: decoupled_weight_decay=False, as Adam's state dict says, but fxshard.AdamW decouples it: "
            "load the state of an AdamW, or set weight_decay to 0"
        )


def _not_negative(value: Any) -> bool:
    return 0 <= _number(value) < math.inf


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return 0.0 if value.device.type == "cuda" else float(value)
    return value


# -- saved groups ------------------------------------------------------------------------------------------------------


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without functions, which cannot be saved: where it is loaded, they stay as they are."""
    groups = [{k: v for k, v in group.items() if not callable(v)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def in_our_order(ours: Sequence[Group], given: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose groups and parameters stand as ours do: by name where both have names, as they are if not.

    Functions, which are not saved, stay ours.
    """
    theirs = given["param_groups"]
    if all("param_names" in group for group in (*ours, *theirs)):
        given = _regrouped(ours, given)
        theirs = _by_name(ours, given["param_groups"])
    if any("kind" in group for group in ours):
        check_loaded(ours, theirs)
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise StateError(
            f"the optimizer state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}: it was saved for "
            "another model, or with other groups, use= or decay="
        )
    filled = [
        {**{key: value for key, value in own.items() if callable(value)}, **their}
        for own, their in zip(ours, theirs, strict=True)
    ]
    for group in filled:
        check_group(group)
    return {**given, "param_groups": filled}


def _regrouped(ours: Sequence[Group], given: dict[str, Any]) -> dict[str, Any]:
    """A state dict under our names: without ``module.``, and with the state of experts in our layout."""
    wanted = {name: tuple(p.shape) for own in ours for name, p in _members(own)}
    states = {name: given["state"].get(key, {}) for their in given["param_groups"] for name, key in _members(their)}
    here, there = wrapping(wanted), wrapping(states)
    shapes = {name: _shape(state) or wanted.get(here + name.removeprefix(there), ()) for name, state in states.items()}
    sources = find_sources({(name,): shape for name, shape in wanted.items()}, shapes).of
    if all(source.names == (name,) and source.index is None for name, source in sources.items()):
        return given
    made = {name: join_state(name, source, states) for name, source in sources.items()}
    groups = []
    for their in given["param_groups"]:
        members = set(their["param_names"])
        names = [name for name, source in sources.items() if members.issuperset(source.names)]
        groups.append({**their, "params": names, "param_names": names})
    return {**given, "state": made, "param_groups": groups}


def _members(group: Group) -> Iterable[tuple[str, Any]]:
    return zip(group["param_names"], group["params"], strict=True)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    others = ("step", ROW_MOMENTS)
    tensors = [value for field, value in state.items() if isinstance(value, torch.Tensor) and field not in others]
    return tuple(tensors[0].shape) if tensors else ()


def _by_name(ours: Sequence[Group], theirs: Sequence[Group]) -> list[Group]:
    found = {frozenset(group["param_names"]): group for group in theirs}
    matched = []
    for own in ours:
        their = found.get(frozenset(own["param_names"]))
        if their is None:
            known = {name for group in theirs for name in group["param_names"]}
            lacking = [name for name in own["param_names"] if name not in known]
            raise StateError(
                f"the optimizer state has no state of {', '.join(lacking[:5])}"
                if lacking
                else f"the optimizer state has {own['param_names'][0]} in another group than this optimizer: it was "
                "saved with other groups, use= or decay="
            )
        place = dict(zip(their["param_names"], their["params"], strict=True))
        matched.append(
            {**their, "params": [place[name] for name in own["param_names"]], "param_names": list(own["param_names"])}
        )
    if len(theirs) != len(matched):
        names = {name for own in ours for name in own["param_names"]}
        extra = [name for group in theirs for name in group["param_names"] if name not in names]
        raise StateError(f"the optimizer state has state of parameters that are not here: {', '.join(extra[:5])}")
    return matched


def check_states(
    groups: Sequence[Group], given: Mapping[str, Any], fields: Callable[[torch.Tensor], Iterable[str]]
) -> None:
    """Raise ``StateError`` unless every saved state has the fields and the shape of the parameter it is for."""
    for own, their in zip(groups, given["param_groups"], strict=True):
        names = own.get("param_names") or [f"parameter {i}" for i in range(len(own["params"]))]
        for name, parameter, key in zip(names, own["params"], their["params"], strict=True):
            state, wanted = given["state"].get(key), set(fields(parameter))
            if not state:
                continue
            if set(state) != wanted:
                raise StateError(f"the state of {name} has {sorted(state)}, this optimizer needs {sorted(wanted)}")
            for field, value in state.items():
                if not isinstance(value, torch.Tensor) or field == "step":
                    continue
                if value.shape != state_shape(field, parameter.shape):
                    raise StateError(
                        f"the state {field!r} of {name} has shape {tuple(value.shape)}, the parameter "
                        f"{tuple(parameter.shape)}: is it the state of another parameter? State without names is "
                        "matched by the order of model.parameters()"
                    )


def check_loaded(ours: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``StateError`` if the groups of a state dict were made by another iteration or for other parameters."""
    if [group.get("kind") for group in loaded] != [group["kind"] for group in ours]:
        raise StateError(
            f"the optimizer state has groups {[group.get('kind') for group in loaded]}, this optimizer has "
            f"{[group['kind'] for group in ours]}: it was saved by another optimizer, or with another use= or decay="
        )
    for theirs, group in zip(loaded, ours, strict=True):
        for field in ("coefficients", "steps"):
            if group["kind"] == "muon" and theirs.get(field) != group[field]:
                raise StateError(
                    f"the optimizer state was made with {field}={theirs.get(field)!r}, this optimizer has "
                    f"{field}={group[field]!r}; the two do not train alike: pass fxshard.Muon({field}="
                    f"{theirs.get(field)!r}), or start from a fresh optimizer state"
                )
