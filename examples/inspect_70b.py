"""Plan a training step of a 70B Llama for 1024 ranks on this machine: no GPU, no process group, no weights.

python examples/inspect_70b.py
python examples/inspect_70b.py --layers 80 --budget 60GiB --html schedule.html

What to look at: the braces in the table hold what repeats from layer to layer; below it, how much communication the
plan hides and how far the step is from the bound that no order of events can beat. A budget changes both: buckets that
fit are kept for backward. Eight layers take seconds, eighty about a minute.
"""

import argparse
from pathlib import Path

import torch

import fxshard
from fxshard._torch.progress import progress
from fxshard.bench.presets import PRESETS
from fxshard.frontend.planning import STAGES


def main() -> None:
    options = arguments()
    model, inputs = PRESETS["llama-70b"](options.layers)  # on the meta device
    with progress(len(STAGES)) as begin:
        schedule = fxshard.plan(
            model,
            inputs,
            world_size=options.world_size,
            hardware=options.hardware,
            memory_budget=options.budget,
            precision=fxshard.Precision(param=torch.bfloat16, reduce=torch.float32),
            progress=begin,
        )
    schedule.verify()  # planning has done this already; it raises ScheduleError if an event is out of place
    print(schedule)

    step = schedule.simulate(options.hardware)
    print(f"simulated on {options.world_size} × {options.hardware}, {options.layers} of 80 layers")
    print(f"  step           {step.step_seconds * 1e3:.1f} ms, at best {step.bound_seconds * 1e3:.1f} ms")
    print(f"  compute        {step.compute_seconds * 1e3:.1f} ms")
    print(f"  communication  {step.communication_seconds * 1e3:.1f} ms, {step.overlap:.0%} of it hidden")
    print(f"  peak memory    {step.peak_bytes / 2**30:.1f} GiB, activations included")
    if options.html is not None:
        schedule.to_html(options.html, options.hardware)
        print(f"wrote {options.html}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plan a training step of a 70B Llama.")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, 80 for all of it (default 8)")
    parser.add_argument("--world-size", type=int, default=1024, help="data-parallel ranks (default 1024)")
    parser.add_argument("--hardware", default="h200", help="device and network to plan for (default h200)")
    parser.add_argument("--budget", help='what a rank may hold in shards and arena, as "60GiB"')
    parser.add_argument("--html", type=Path, help="write the schedule as a page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
