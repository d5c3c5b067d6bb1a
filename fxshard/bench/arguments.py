"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

DEVICES = ("cpu", "cuda")


def listed(known: Iterable[str], others: Callable[[str], bool] = lambda name: False) -> Callable[[str], list[str]]:
    """A type for ``add_argument``: names with commas in between, each of them known, or one of ``others``."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names and not others(name):
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(names)}")
        return text.split(",")

    return parse
