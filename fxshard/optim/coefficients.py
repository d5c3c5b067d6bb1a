"""Coefficient sets of Newton–Schulz iterations, by name.

A step maps every singular value s to a·s + b·s³ + c·s⁵. The sets are not interchangeable: they leave singular values in
different places, so the name of the set is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxshard._torch.errors import ConfigError

Triple = tuple[float, float, float]

# Amsel, Persson, Musco, Gower: "The Polar Express" (arXiv 2505.16932), for singular values from 10⁻³ to 1.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def _with_safety(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """Every step but the last sees singular values divided by ``factor``, so that rounding cannot push one past 1."""
    return (*((a / factor, b / factor**3, c / factor**5) for a, b, c in triples[:-1]), triples[-1])


COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan's: the steepest slope at zero; singular values end between 0.68 and 1.21, not at 1.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # Converge to 1, from small values slowly: for many steps, or for reference.
    "cubic": ((1.5, -0.5, 0.0),),
    "taylor": ((1.875, -1.25, 0.375),),
    # You Jiacheng's: another triple for each of five steps.
    "five_steps": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": _with_safety(_POLAR_EXPRESS, 1.01),
    "polar_express_1.02": _with_safety(_POLAR_EXPRESS, 1.02),
    "polar_express_1.05": _with_safety(_POLAR_EXPRESS, 1.05),
}


def triples(name: str, steps: int) -> tuple[Triple, ...]:
    """(a, b, c) of each of ``steps`` steps. A set that is shorter goes on with its last triple."""
    check(name, steps)
    known = COEFFICIENTS[name]
    return tuple(known[min(i, len(known) - 1)] for i in range(steps))


def check(name: str, steps: int) -> None:
    """Raise ``ConfigError`` if there is no such set, or nothing to do."""
    if name not in COEFFICIENTS:
        raise ConfigError(f"unknown coefficients {name!r}; known sets: {', '.join(COEFFICIENTS)}")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= 100:
        raise ConfigError(f"steps={steps!r}: expected a number of Newton–Schulz steps from 1 to 100")
