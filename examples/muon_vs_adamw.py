"""Muon against AdamW: the same small language model, the same batches, a small sweep of learning rates for both.

python examples/muon_vs_adamw.py --svg docs/images/muon-vs-adamw.svg

The model reads this repository character by character; one tenth of the text is kept back to measure the loss. What to
look at: how many steps each optimizer needs, at its best learning rate, to reach the loss that AdamW ends with. The
sweep is ten runs, minutes each on a CPU; ``--quick`` shows in seconds that it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.models import Llama, LlamaConfig

ROOT = Path(__file__).parent.parent
Curve = list[tuple[int, float]]


def text() -> torch.Tensor:
    """The package, its tests and its documentation as one sequence of bytes."""
    files = sorted(path for folder in ("docs", "fxshard", "tests") for path in (ROOT / folder).rglob("*.[mp][dy]"))
    return torch.tensor(list("\n".join(file.read_text() for file in files).encode()))


def batch(data: torch.Tensor, size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(data) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(optimizer: str, lr: float, data: torch.Tensor, arguments: argparse.Namespace) -> Curve:
    """(step, loss on text kept back) of one run. Seed and batches are those of every other run."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=256, dim=arguments.dim, layers=arguments.layers, heads=4, hidden=arguments.dim * 11 // 4)
    model = Llama(config).to(arguments.device)
    if optimizer == "Muon":
        made: torch.optim.Optimizer = fxshard.Muon(lr=lr, adamw=fxshard.AdamW(lr=arguments.inner_lr)).build(model)
    else:
        made = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / arguments.steps)
    cut = len(data) * 9 // 10
    held_out = [t.to(arguments.device) for t in batch(data[cut:], 8 * arguments.batch, arguments.length, 0)]
    curve: Curve = []
    for step in range(arguments.steps + 1):
        if step % arguments.every == 0:
            with torch.no_grad():
                curve.append((step, float(model(*held_out))))
        inputs, targets = batch(data[:cut], arguments.batch, arguments.length, 1 + step)
        model(inputs.to(arguments.device), targets.to(arguments.device)).backward()
        made.step()
        made.zero_grad()
        schedule.step()
    print(f"{optimizer:>6} lr {lr:<8g} loss {curve[-1][1]:.4f} after {curve[-1][0]} steps", flush=True)
    return curve


def steps_to(curve: Curve, loss: float) -> int | None:
    """The first measured step with at most this loss."""
    return next((step for step, value in curve if value <= loss), None)


def svg(curves: dict[tuple[str, float], Curve], best: dict[str, float], goal: float) -> str:
    """Every run as a thin line, the best of each optimizer as a thick one, the loss to reach as a dashed one."""
    width, height, left, top, bottom = 720, 420, 56, 24, 46
    colours = {"AdamW": "#d97706", "Muon": "#2563eb"}
    last = max(curve[-1][0] for curve in curves.values())
    low = min(value for curve in curves.values() for _, value in curve) - 0.05
    high = min(4.0, max(curve[0][1] for curve in curves.values()))

    def at(step: float, value: float) -> tuple[float, float]:
        x = left + step / last * (width - left - 24)
        return x, top + (high - min(value, high)) / (high - low) * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i in range(6):
        value, step = low + (high - low) * i / 5, round(last * i / 5)
        (x, _), (_, y) = at(step, low), at(0, value)
        out.append(f'<line x1="{left}" x2="{width - 24}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#374151">{value:.2f}</text>')
        out.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#374151">{step}</text>')
    for (name, lr), curve in sorted(curves.items(), key=lambda item: best[item[0][0]] == item[0][1]):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        chosen = best[name] == lr
        style = 'stroke-width="2.5"' if chosen else 'stroke-width="1" stroke-opacity="0.35"'
        out.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" {style}/>')
    _, y = at(0, goal)
    out.append(
        f'<line x1="{left}" x2="{width - 24}" y1="{y:.1f}" y2="{y:.1f}" stroke="#111827" stroke-dasharray="5 4"/>'
    )
    for i, (name, lr) in enumerate(best.items()):
        reached = steps_to(curves[name, lr], goal)
        label = f"{name}, best learning rate {lr:g}: {goal:.3f} after {reached} steps"
        out.append(f'<rect x="{width - 392}" y="{top + 8 + 22 * i}" width="18" height="4" fill="{colours[name]}"/>')
        out.append(f'<text x="{width - 366}" y="{top + 15 + 22 * i}" fill="#111827">{label}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle" fill="#374151">steps</text>')
    out.append(f'<text x="{left - 40}" y="{top - 8}" fill="#374151">loss on text kept back</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements of the loss")
    parser.add_argument("--muon-lrs", default="0.005,0.01,0.02,0.04,0.08")
    parser.add_argument("--adamw-lrs", default="0.001,0.002,0.004,0.008,0.016")
    parser.add_argument("--inner-lr", type=float, default=4e-3, help="of AdamW within Muon: embedding, head and norms")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model, to see that it runs")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.dim, arguments.layers, arguments.batch, arguments.length = 20, 32, 1, 4, 32
        arguments.muon_lrs, arguments.adamw_lrs, arguments.every = "0.02,0.04", "0.004,0.008", 5
    data = text()
    sweeps = {"AdamW": arguments.adamw_lrs, "Muon": arguments.muon_lrs}
    runs = [(name, float(lr)) for name, lrs in sweeps.items() for lr in lrs.split(",")]
    curves = {}
    with progress(len(runs)) as begin:
        for name, lr in runs:
            begin(f"{name}, learning rate {lr:g}")
            curves[name, lr] = train(name, lr, data, arguments)
    best = {name: min((curve[-1][1], lr) for (of, lr), curve in curves.items() if of == name)[1] for name in sweeps}
    goal = curves["AdamW", best["AdamW"]][-1][1]
    for name, lr in best.items():
        reached = steps_to(curves[name, lr], goal)
        print(f"{name} at its best learning rate, {lr:g}, reaches {goal:.4f} after {reached} steps")
    if arguments.svg:
        arguments.svg.write_text(svg(curves, best, goal))


if __name__ == "__main__":
    main()
