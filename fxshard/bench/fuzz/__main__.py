"""``python -m fxshard.fuzz --minutes 30 --ranks 2``: random programs until the time is over; findings with seeds."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from fxshard.bench.fuzz.workers import spawned, work


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fxshard.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--programs", type=int, default=10**9, help="how many programs at most")
    parser.add_argument("--ranks", type=int, default=1, help="CPU ranks (gloo)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, str(Path(folder, "store")), given.seed, given.minutes * 60, given.programs)
        if given.ranks == 1:
            sys.exit(work(0, *arguments))
        torch.multiprocessing.spawn(spawned, arguments, nprocs=given.ranks)


if __name__ == "__main__":
    main()
