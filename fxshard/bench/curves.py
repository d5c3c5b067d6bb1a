"""Losses of training runs as a table and as curves in an SVG file, from files that ``examples/convergence.py`` writes.

>>> python -m fxshard.bench.curves losses.json more.json --svg docs/images/convergence.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fxshard._torch.errors import ConfigError
from fxshard.bench.harness import svg

LAST = 50
"""Steps at the end of a run over which losses are averaged."""
BASE, OTHER_SEED = "adamw", "adamw-seed1"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 52, 16, 40, 36
COLOURS = ("#6b7280", "#9ca3af", "#2f6feb", "#d97706", "#16a34a", "#dc2626", "#7c3aed", "#0891b2", "#db2777", "#65a30d")

Runs = Mapping[str, Mapping[str, Any]]


def end(losses: Sequence[float]) -> float:
    """The result of a run: the mean of its last losses."""
    last = losses[-LAST:]
    return sum(last) / len(last)


def table(runs: Runs) -> str:
    """Markdown: how each run ended, how far from the base, and whether that is within the spread of seeds."""
    base = end(runs[BASE]["losses"]) if BASE in runs else None
    spread = abs(end(runs[OTHER_SEED]["losses"]) - base) if base is not None and OTHER_SEED in runs else None
    last = min(LAST, max(len(run["losses"]) for run in runs.values()))
    head = f"| | mean of the last {last} losses | from {BASE} | kept back, at the end | ms a step |"
    lines = [head, "| --- " * 5 + "|"]
    for name, run in runs.items():
        apart = "" if base is None or name == BASE else _apart(end(run["losses"]) - base, spread, name)
        kept_back = f"{run['held_out'][-1]:.4f}" if run.get("held_out") else ""
        timed = max(1, len(run["losses"]) - 2)
        lines.append(
            f"| {name} | {end(run['losses']):.4f} | {apart} | {kept_back} | {1000 * run['seconds'] / timed:.1f} |"
        )
    if spread is not None:
        lines += ["", f"Two seeds of {BASE} are {spread:.4f} apart: what ends no further from it is within."]
    return "\n".join(lines)


def _apart(difference: float, spread: float | None, name: str) -> str:
    if spread is None or name == OTHER_SEED:
        return f"{difference:+.4f}"
    where = "within" if abs(difference) <= spread else "below" if difference < 0 else "above"
    return f"{difference:+.4f}, {where}"


def running_mean(losses: Sequence[float], over: int) -> list[float]:
    """At each step the mean of the last ``over`` values, or of as many as there are."""
    total, means = 0.0, []
    for i, loss in enumerate(losses):
        total += loss - (losses[i - over] if i >= over else 0.0)
        means.append(total / min(i + 1, over))
    return means


def to_svg(runs: Runs, heading: str) -> str:
    """A line for each run: the running mean of its losses. Above the range of the drawing, lines are cut off."""
    steps = max(len(run["losses"]) for run in runs.values())
    smooth = {name: running_mean(run["losses"], max(1, steps // 40)) for name, run in runs.items()}
    finite = [loss for curve in smooth.values() for loss in curve if math.isfinite(loss)]
    low = min(finite)
    high = low + max(1e-3, min(max(finite) - low, 3 * (sorted(finite)[len(finite) // 2] - low)))

    def place(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - min(loss, high)) / (high - low)

    body = [f'<text class="title" x="{LEFT}" y="24">{escape(heading)}: loss by step</text>']
    for i in range(5):
        loss, step = low + (high - low) * i / 4, round((steps - 1) * i / 4)
        (x, _), (_, y) = place(step, low), place(0, loss)
        body.append(f'<line stroke="#8884" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="note" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        body.append(f'<text class="note" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step + 1}</text>')
    every = max(1, steps // 400)
    for i, (name, curve) in enumerate(smooth.items()):
        colour = COLOURS[i % len(COLOURS)]
        kept = [step for step in range(len(curve)) if step % every == 0 or step == len(curve) - 1]
        points = " ".join("{:.1f},{:.1f}".format(*place(step, curve[step])) for step in kept if curve[step] <= high)
        y = TOP + 14 + 19 * i
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        body.append(f'<rect x="{WIDTH - 250}" y="{y - 6}" width="18" height="4" fill="{colour}"/>')
        label = f"{escape(name)}  {end(runs[name]['losses']):.4f}"
        body.append(f'<text x="{WIDTH - 224}" y="{y}" xml:space="preserve">{label}</text>')
    return svg(WIDTH, HEIGHT, body)


def read(files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that all runs share, and the runs of all files; where two files have one, the later counts."""
    about: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for file in files:
        content = json.loads(file.read_text())
        if about and content["about"] != about:
            differ = [name for name, value in content["about"].items() if about.get(name) != value]
            raise ConfigError(f"{file} is of other runs than {files[0]}: {', '.join(differ)} differ")
        about = content["about"]
        runs.update(content["runs"])
    return about, runs


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses of training runs: a table, and curves.")
    parser.add_argument("files", nargs="+", type=Path, help="written by examples/convergence.py")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    about, runs = read(options.files)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(runs))
    if options.svg is not None:
        options.svg.write_text(to_svg(runs, f"{about['parameters'] / 1e6:.0f} M parameters"))


if __name__ == "__main__":
    main()
