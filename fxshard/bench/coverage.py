"""Which architectures of ``transformers`` train with fxshard as with FSDP2: a table, made on two ranks of this machine.

python -m fxshard.bench.coverage --output docs/models.md
python -m fxshard.bench.coverage --only llama,gpt2 --json found.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxshard._torch.progress import progress
from fxshard.bench.architectures import ARCHITECTURES
from fxshard.bench.examine import Depths, Row, on_ranks, preload
from fxshard.bench.harness import listed

CLOSE = 1e-5
"""Relative difference of losses up to which they count as the same: that of rounding, after five steps in fp32."""
COMMAND = "fxshard bench models --output docs/models.md"
TIMEOUT = 300.0
"""Seconds for one architecture."""
BREAKS = 3
"""So many reasons why a model is no single graph are told."""
DENSE = "a dense gated MLP"


def difference(row: Row) -> float:
    """The largest relative difference between a loss and FSDP2's, over steps and ranks."""
    each = [
        abs(ours - peer) / abs(peer)
        for rank in row["ranks"]
        for ours, peer in zip(rank["losses"], rank["peer_losses"], strict=True)
    ]
    return math.nan if any(map(math.isnan, each)) else max(each)


def trains(row: Row) -> bool:
    """Whether its losses are those of FSDP2, on every rank; not-a-number is never the same."""
    return not row["failed"] and difference(row) <= CLOSE


def is_one_graph(row: Row) -> bool:
    return not row["failed"] and row["graphs"] == 1


def grows(row: Row) -> bool:
    if row["failed"]:
        return False
    counts = list(row["compilations"].values())  # the shallow one's first
    return bool(counts[-1] > counts[0])


def line(row: Row) -> str:
    """One architecture, for a terminal."""
    cells = _cells(row)
    return f"{row['name']:<16} {row.get('seconds', 0.0):>5.0f} s  " + "; ".join(cell for cell in cells[1:] if cell)


def page(rows: Sequence[Row], versions: Mapping[str, str], listed: int) -> str:
    """The page of the architectures that were run, out of ``listed`` that there are."""
    left = f" These are {len(rows)} of the {listed} architectures that it has (`--only`)." if len(rows) < listed else ""
    lines = [
        "# Models of transformers",
        "",
        f"Made by `{COMMAND}` with {', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"it is not edited by hand.{left} Nothing is downloaded: models are small and random.",
        "",
        summary(rows),
        "",
        _METHOD,
    ]
    for kind, of_kind in itertools.groupby(rows, key=lambda row: row["kind"]):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", "", *_table(list(of_kind))]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    count = len(rows)
    return (
        f"{sum(map(trains, rows))} of {count} architectures train with FSDP2's losses, "
        f"{sum(map(is_one_graph, rows))} of {count} in one graph; "
        f"compilations grow with depth in {sum(map(grows, rows))}."
    )


_METHOD = (
    "Each is trained on two CPU ranks (gloo) by FSDP2 and by `fxshard.compile(model, zero=3)`, in fp32, from the same "
    "weights with the same batches, for five steps of AdamW, with two layers "
    "unless `--layers` says otherwise. Dropout and other random parts are switched off. "
    "Everything else is as the configuration has it by default: the key/value cache, the implementation of attention "
    'and of experts. Segments run operator by operator (`lowering="eager"`); how many there are to compile does not '
    "depend on that.\n\n"
    "- **graphs**: that one forward takes. Where it is more than one, `fullgraph=False` is needed, and a remark says "
    "what broke the graph. A model that is captured again in its second step has changed something by itself: "
    "classifiers write `config.problem_type` in their first call, where it is not set.\n"
    "- **losses differ by**: the largest relative difference between a loss and FSDP2's, over five steps and both "
    "ranks. Up to 1e-5 is taken for rounding, and more is called wrong.\n"
    "- **compilations**: distinct segments of forward and backward, in a shallow and in a deep model (layers of each "
    "stack and tower, or of the deepest stage; twice as many where kinds of attention take turns, so that each has "
    "stood after each other), each in one process. Equal numbers: what is compiled does not grow with depth.\n"
    "- **recognised**: attention that is causal and needs no mask, because the model says so or because "
    "[its mask was recognised](design/masks.md); key and value heads that are not repeated; [experts](howto/moe.md) "
    "that are one operator; dense gated MLPs, which a CPU leaves to the compiler and Hopper fuses where they are "
    "SwiGLU without biases. Numbers are those of the model that was trained."
)


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("architecture", "graphs", "losses differ by", "compilations, by layers", "recognised", "remarks")
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(cell or '–' for cell in _cells(row))} |" for row in rows),
    ]


def _cells(row: Row) -> tuple[str, ...]:
    name = f"{row['name']} (`{row['model']}`)"
    if row["failed"]:
        return (name, "", "", "", "", f"**fails**: {short(row['failed'])}")
    differs = difference(row)
    losses = f"{differs:.0e}" if differs else "0"
    losses = losses if trains(row) else f"**{differs:.0e}, wrong**"
    compiled = ", ".join(f"{layers}: {count}" for layers, count in row["compilations"].items())
    compiled += " **grows**" if grows(row) else ""
    return (name, str(row["graphs"]), losses, compiled, recognised(row["recognised"]), _remarks(row))


def recognised(found: Mapping[str, Any]) -> str:
    said = []
    if found["causal"]:
        said.append(f"{found['causal']} of {found['attention']} attention calls causal without a mask")
    if found["recognised"]:
        said.append(f"{found['recognised']} masks recognised as causal")
    if found["unmasked"]:
        said.append(f"{found['unmasked']} masks that hide nothing left out")
    if found["grouped"]:
        said.append(f"{found['grouped']} with grouped heads")
    said += [f"{_times(count)}{form}" for form, count in found["fused"].items()]
    dense = sum(count for reason, count in found["left"].items() if reason.startswith(DENSE))
    said += [f"{dense} dense gated MLPs"] if dense else []
    return "; ".join(said)


def _remarks(row: Row) -> str:
    found = row["recognised"]
    said = [f"graph break: {short(reason)}" for reason in row["breaks"][:BREAKS]]
    said += [f"{len(row['breaks']) - BREAKS} more breaks"] if len(row["breaks"]) > BREAKS else []
    said += [f"{count} masks kept: {reason}" for reason, count in found["masked"].items()]
    said += [
        f"{_times(count)}experts not fused: {reason}"
        for reason, count in found["left"].items()
        if not reason.startswith(DENSE)
    ]
    if row["graphs"] == 1 and row["captures"] > 1:
        said.append(f"captured {row['captures']} times")
    said += [f"{row['unused']} parameters unused"] if row["unused"] else []
    return "; ".join(said)


def _times(count: int) -> str:
    return f"{count} × " if count > 1 else ""


def short(reason: str) -> str:
    """The first line of a message that is no heading, with paths from the package on, as a cell can hold it."""
    lines = [part.strip() for part in reason.splitlines() if part.strip()]
    first = next((part for part in lines if not part.endswith(":")), "no reason given")
    first = re.sub(r"\S*/(?:site-packages/|(?=fxshard/))", "", first).replace("|", "\\|").replace("<", "\\<")
    return first if len(first) <= 160 else f"{first[:157]}..."


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
            rows.append(on_ranks(ARCHITECTURES[name], arguments.layers, TIMEOUT))
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
