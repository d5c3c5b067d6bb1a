"""Which architectures of ``transformers`` train with fxshard as with FSDP2: a table, made on two ranks of this machine.

python -m fxshard.bench.coverage --output docs/models.md
python -m fxshard.bench.coverage --only llama,gpt2 --json found.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fxshard._torch.progress import progress
from fxshard.bench.architectures import ARCHITECTURES
from fxshard.bench.coverage_table import line, page, summary
from fxshard.bench.examine import Depths, Row, on_ranks, preload
from fxshard.bench.harness import listed


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import fxshard

    return {"fxshard": fxshard.__version__, **{name: version(name) for name in ("torch", "transformers")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    only = f"of {', '.join(ARCHITECTURES)} (default: all)"
    parser.add_argument("--only", type=listed(ARCHITECTURES), metavar="NAME,...", help=only)
    depths = "of models that are trained, and of two that are compiled only (default: 2,6,12)"
    parser.add_argument("--layers", type=_depths, default=Depths(), metavar="N,N,N", help=depths)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one architecture (default: 300)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as a page of Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, losses included")
    arguments = parser.parse_args()
    if arguments.output and not arguments.output.absolute().parent.is_dir():
        parser.error(f"cannot write {arguments.output}: there is no directory {arguments.output.absolute().parent}")
    names = [name for name in ARCHITECTURES if not arguments.only or name in arguments.only]
    rows: list[Row] = []
    preload()
    with progress(len(names)) as begin:
        for name in names:
            begin(name)
            rows.append(on_ranks(ARCHITECTURES[name], arguments.layers, arguments.timeout))
            print(line(rows[-1]), flush=True)
            if arguments.json:  # after each: a run that is stopped has left what it found
                arguments.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1))
    print(summary(rows))
    if arguments.output:
        arguments.output.write_text(page(rows, versions(), len(ARCHITECTURES)), encoding="utf-8")


def _depths(listed: str) -> Depths:
    numbers = [int(each) for each in listed.split(",") if each.isdecimal()]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{listed!r}: expected three numbers of layers, as 2,6,12")
    return Depths(*numbers)


if __name__ == "__main__":
    main()
