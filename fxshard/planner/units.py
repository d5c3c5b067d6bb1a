"""Units: which parameters are unsharded together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fxshard._torch.errors import ConfigError

UnitPatterns = Sequence[str | Sequence[str]]


@dataclass(frozen=True)
class Unit:
    """A name and the parameters that are gathered and released together."""

    name: str
    params: tuple[str, ...]


def find_units(model: nn.Module, patterns: UnitPatterns | None = None) -> tuple[Unit, ...]:
    """Split the parameters of ``model`` into units, in the order in which forward is expected to use them.

    Without ``patterns`` every block of a repeated ``ModuleList``, ``Sequential`` or numbered ``ModuleDict`` is a unit.
    With them, every module whose name matches a pattern is one (a sequence of patterns puts all its matches into one
    unit). A unit may lie within another: a parameter belongs to the innermost, and the outer one has what its inner
    ones leave. The rest is grouped by registration order: what stands between two blocks belongs together. A shared
    parameter belongs to the unit that names it first, so a tied embedding is stored, gathered and updated once.
    """
    roots = _matched_modules(model, patterns) if patterns is not None else _repeated_blocks(model)
    owner_of = {module: unit for unit, modules in roots.items() for module in modules}

    units: dict[str, list[str]] = {}
    run = 0  # counts the stretches of leftovers, so that two of them never merge
    previous: str | None = None
    for name, _ in model.named_parameters():
        unit = _owning_unit(name, owner_of)
        if unit is None:
            if previous is None or not previous.startswith("\0"):
                run += 1
            unit = f"\0{run}"
        units.setdefault(unit, []).append(name)
        previous = unit
    return tuple(Unit(_unit_name(key, params), tuple(params)) for key, params in units.items())


def _repeated_blocks(model: nn.Module) -> dict[str, list[str]]:
    """The outermost lists of two or more blocks of one class, as {unit: [module]}."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in found):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) and not _is_numbered(module):
            continue
        blocks = [(child, block) for child, block in module.named_children() if _has_parameters(block)]
        if len(blocks) > 1 and len({type(block) for _, block in blocks}) == 1:
            found += [f"{name}.{child}" if name else child for child, _ in blocks]
    return {name: [name] for name in found}


def _is_numbered(module: nn.Module) -> bool:
    """A dictionary whose keys are numbers, from which pipeline stages take some: torchtitan keeps layers so."""
    return isinstance(module, nn.ModuleDict) and all(key.isdecimal() for key in module)


def _matched_modules(model: nn.Module, patterns: UnitPatterns) -> dict[str, list[str]]:
    modules = [name for name, module in model.named_modules() if name and _has_parameters(module)]
    roots: dict[str, list[str]] = {}
    claimed: dict[str, str] = {}
    for pattern in patterns:
        matched: list[str] = []
        for glob in [pattern] if isinstance(pattern, str) else pattern:
            hits = [name for name in modules if _same_depth_match(name, glob)]
            if not hits:
                raise ConfigError(
                    f"units: the pattern {glob!r} matches no module with parameters; modules are {_some(modules)}"
                )
            matched += hits
        for name in matched:
            if name in claimed:
                raise ConfigError(
                    f"units: {name!r} (pattern {pattern!r}) is a unit by the pattern {claimed[name]!r} already; make "
                    "the patterns disjoint, a parameter can be in one unit only"
                )
            claimed[name] = str(pattern)
        if isinstance(pattern, str):
            roots.update({name: [name] for name in matched})
        else:
            roots["+".join(matched)] = matched
    return roots


def _same_depth_match(name: str, glob: str) -> bool:
    """``layers.*`` means the blocks, not everything inside them: a star does not cross a dot."""
    parts, globs = name.split("."), glob.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _owning_unit(parameter: str, owner_of: dict[str, str]) -> str | None:
    path = parameter.split(".")
    for depth in range(len(path) - 1, 0, -1):
        unit = owner_of.get(".".join(path[:depth]))
        if unit is not None:
            return unit
    return None


def _unit_name(key: str, params: Sequence[str]) -> str:
    if not key.startswith("\0"):
        return key
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in params))
    return "+".join(modules) if len(modules) <= 3 else f"{modules[0]}…{modules[-1]}"


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _some(names: Iterable[str], limit: int = 12) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", … ({len(listed)} in all)" if len(listed) > limit else "")
