"""Train one small language model twice, in MXFP8 and in bf16, on the source of Python's standard library, byte by byte.

python examples/mxfp8_against_bf16.py --quick                 # a minute on a CPU: a smaller model, fewer steps
python examples/mxfp8_against_bf16.py --svg losses.svg        # on a GPU

Everything but the precision is the same: initial values, data, optimizer, schedule of the learning rate. On a CPU the
products that stay in bf16 multiply the same bf16 values in fp32 and round the result, which is what a GPU does: many
CPUs have no bf16 product and take a thousand times longer for one. What to look at: the report says which linears were
chosen and how they are computed here; the last line how far losses are apart.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import fx

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.frontend.precision_report import report
from fxshard.passes.context import PassContext

SMALL = LlamaConfig(vocab=256, dim=64, layers=1, heads=4, hidden=192)
LARGE = LlamaConfig(vocab=256, dim=512, layers=6, heads=8, hidden=1408)
PRECISIONS = {"bf16": fxshard.Precision(param=torch.bfloat16, reduce=torch.float32), "MXFP8": fxshard.MXFP8()}
COLOURS = {"bf16": "#7a7a7a", "MXFP8": "#d1495b"}


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = corpus(options.bytes).to(device)
    losses = {}
    with progress(len(PRECISIONS)) as begin:
        for name in PRECISIONS:
            begin(f"{name}, {options.steps} steps")
            losses[name] = train(name, text, device, options)
    final = {name: sum(curve[-options.tail :]) / options.tail for name, curve in losses.items()}
    apart = final["MXFP8"] / final["bf16"] - 1
    print(f"mean loss of the last {options.tail} steps: {final}, {apart:+.2%} apart")
    if options.svg is not None:
        options.svg.write_text(drawing(losses, final, options), encoding="utf-8")
    if abs(apart) > options.within:
        raise SystemExit(f"the final losses are {apart:+.2%} apart, more than {options.within:.0%}")


def train(name: str, text: torch.Tensor, device: torch.device, options: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    with device:
        plain = Llama(SMALL if options.quick else LARGE)
    model = fxshard.compile(
        plain,
        precision=PRECISIONS[name],
        optimizer=fxshard.AdamW(lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1),
        lowering=options.lowering,
        passes=fxshard.PASSES.after("quantize_linears", in_fp32) if device.type == "cpu" else None,
    )
    if name == "MXFP8":
        print(report(model))
    warmup = max(1, options.steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        model.optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps)),
    )
    draw = torch.Generator().manual_seed(1)
    curve = []
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=draw).to(device)
        stretches = text[starts + torch.arange(options.length + 1, device=device)]
        loss = model(stretches[:, :-1].contiguous(), stretches[:, 1:].contiguous())
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        rate.step()
        curve.append(loss.detach())
        if step % max(1, options.steps // 10) == 0:
            print(f"{name:>6} step {step:5d}  loss {loss.item():.4f}", flush=True)
    return torch.stack(curve).tolist()


PRODUCTS = {
    f"aten.{name}.default"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
}
OF_THE_RESULT = ("val", "tensor_meta", "eager_input_vals")


def in_fp32(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """A pass: products of bf16 multiply the same values in fp32, and their results are rounded to bf16."""
    graph = module.graph

    def cast(node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        made = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        made.meta.update({key: value for key, value in like.meta.items() if key not in OF_THE_RESULT})
        made.meta["val"] = like.meta["val"].to(dtype) if like is node else like.meta["val"]
        return made

    for node in [node for node in graph.nodes if str(node.target) in PRODUCTS]:
        with graph.inserting_before(node):
            for arg in node.all_input_nodes:
                if arg.meta["val"].dtype is torch.bfloat16:
                    node.replace_input_with(arg, cast(arg, torch.float32, arg))
        several = isinstance(node.meta["val"], tuple)
        for result in list(node.users) if several else [node]:
            if result.meta["val"].dtype is torch.bfloat16:
                with graph.inserting_after(result):
                    rounded = cast(result, torch.bfloat16, result)
                result.replace_all_uses_with(rounded, delete_user_cb=lambda user, own=rounded: user is not own)
                result.meta["val"] = result.meta["val"].float()
        if several:
            node.meta["val"] = tuple(
                value.float() if value.dtype is torch.bfloat16 else value for value in node.meta["val"]
            )
    graph.lint()
    module.recompile()
    return module


def corpus(size: int) -> torch.Tensor:
    """Bytes of the standard library's modules, in the order of their names."""
    joined = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        joined += file.read_bytes()
        if len(joined) >= size:
            break
    return torch.tensor(list(joined[:size]))


def drawing(losses: dict[str, list[float]], final: dict[str, float], options: argparse.Namespace) -> str:
    """Both curves, each a running mean, as SVG."""
    width, height, left, bottom = 720, 360, 56, 40
    smooth = {name: running_mean(curve, max(1, options.steps // 60)) for name, curve in losses.items()}
    low = math.floor(min(map(min, smooth.values())) * 4) / 4
    high = min(max(map(max, smooth.values())), low + 3.0)

    def place(step: int, loss: float) -> str:
        x = left + (width - left - 16) * step / max(1, options.steps - 1)
        y = 16 + (height - bottom - 16) * (high - min(loss, high)) / (high - low)
        return f"{x:.1f},{y:.1f}"

    every = max(1, options.steps // 400)
    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k in range(5):
        loss = low + (high - low) * k / 4
        x, y = place(0, loss).split(",")
        parts.append(f'<line x1="{x}" x2="{width - 16}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for k in range(5):
        step = round((options.steps - 1) * k / 4)
        x = place(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    for k, (name, curve) in enumerate(smooth.items()):
        points = " ".join(place(step, curve[step]) for step in range(0, len(curve), every))
        style = 'fill="none" stroke-width="1.6"' + (' stroke-dasharray="5 3"' if k else "")
        parts.append(f'<polyline points="{points}" {style} stroke="{COLOURS[name]}"/>')
        label = f"{name}: {final[name]:.4f} at the end"
        parts.append(
            f'<text x="{width - 24}" y="{34 + 18 * k}" text-anchor="end" fill="{COLOURS[name]}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def running_mean(curve: list[float], width: int) -> list[float]:
    return [sum(curve[max(0, i - width) : i + 1]) / len(curve[max(0, i - width) : i + 1]) for i in range(len(curve))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one small language model in MXFP8 and in bf16.")
    parser.add_argument("--quick", action="store_true", help="a smaller model, 60 steps, no compilation")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int)
    parser.add_argument("--bytes", type=int, default=4_000_000, help="how much text")
    parser.add_argument("--within", type=float, help="fail if the final losses are further apart than this")
    parser.add_argument("--lowering", help="inductor, or eager to compile nothing")
    parser.add_argument("--svg", type=Path, help="draw both curves there")
    options = parser.parse_args()
    options.steps = options.steps or (60 if options.quick else 1000)
    options.length = options.length or (64 if options.quick else 256)
    options.within = options.within or (0.05 if options.quick else 0.01)
    options.lowering = options.lowering or ("eager" if options.quick else "inductor")
    options.tail = max(1, options.steps // 10)
    return options


if __name__ == "__main__":
    main()
