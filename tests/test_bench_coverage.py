"""``fxshard bench models``: which architectures of ``transformers`` train like FSDP2, in how many graphs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.bench import coverage
from fxshard.bench.architectures import ARCHITECTURES
from fxshard.bench.coverage import difference, grows, is_one_graph, line, page, short, summary, trains
from fxshard.bench.examine import Depths, on_ranks, preload
from fxshard.bench.sample_batches import Batch, text
from fxshard.cli import main as cli
from tests.thorough import thorough

SHALLOW = Depths(trained=1, shallow=1, deep=2)


def row(name: str, *, losses: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    peer = [4.0, 3.0]
    ranks = [{"peer_losses": peer, "losses": peer}, {"peer_losses": peer, "losses": losses or peer}]
    recognised = {
        "attention": 4,
        "causal": 2,
        "recognised": 2,
        "unmasked": 0,
        "grouped": 1,
        "masked": {"is not causal": 2},
        "fused": {"8 experts, SwiGLU, by torch": 2},
        "left": {"a dense gated MLP, one expert: left to the compiler": 3, "rows are sorted": 1},
    }
    found = {
        "name": name,
        "kind": "decoder",
        "model": "Net",
        "graphs": 1,
        "captures": 1,
        "breaks": [],
        "compilations": {"6": 9, "12": 9},
        "unused": 0,
        "recognised": recognised,
        "failed": None,
        "ranks": ranks,
    }
    return {**found, **changes}


ROWS = [
    row("good"),
    row("off", losses=[4.0, 3.01]),
    row("not-a-number", losses=[4.0, math.nan]),
    row("growing", compilations={"6": 9, "12": 15}),
    row(
        "broken", graphs=3, captures=3, breaks=["/x/site-packages/net/model.py:7: data-dependent | branch\nno", *"xyz"]
    ),
    row("again", captures=2),
    {
        "name": "dead",
        "kind": "decoder",
        "model": "Net",
        "failed": "RuntimeError: <no> kernel",
        "ranks": [{"failed": "RuntimeError: <no> kernel"}],
    },
]


def test_what_counts_as_training_like_fsdp2() -> None:
    assert [each["name"] for each in ROWS if trains(each)] == ["good", "growing", "broken", "again"]
    assert difference(ROWS[1]) == pytest.approx(0.01 / 3)
    assert [each["name"] for each in ROWS if not is_one_graph(each)] == ["broken", "dead"]
    assert [each["name"] for each in ROWS if grows(each)] == ["growing"]
    said = "4 of 7 architectures train with FSDP2's losses, 5 of 7 in one graph; compilations grow with depth in 1."
    assert summary(ROWS) == said


def test_losses_that_are_missing_are_no_agreement() -> None:
    ranks = [{"peer_losses": [4.0, 3.0], "losses": [4.0]}]
    with pytest.raises(ValueError, match="longer"):
        trains(row("short", ranks=ranks))


def test_the_page() -> None:
    made = page([*ROWS, row("other", kind="vision")], {"torch": "2.13.0", "transformers": "5.22.2"}, 9)
    assert "with torch 2.13.0, transformers 5.22.2" in made and summary(ROWS) not in made
    assert "8 of the 9 architectures" in made and "8 of the" not in page(ROWS, {}, len(ROWS))
    first, second = made.split("## ")[1:]
    assert first.startswith("Decoder\n") and second.startswith("Vision\n")
    rows = [line[2:-2].split(" | ") for line in first.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ROWS)
    cells = {each[0].split()[0]: each[1:] for each in rows}
    assert cells["good"][:3] == ["1", "0", "6: 9, 12: 9"]
    assert cells["good"][3].startswith("2 of 4 attention calls causal without a mask; 2 masks recognised as causal; 1 ")
    assert cells["good"][3].endswith("2 × 8 experts, SwiGLU, by torch; 3 dense gated MLPs")
    assert cells["good"][4] == "2 masks kept: is not causal; experts not fused: rows are sorted"
    assert cells["off"][1] == "**3e-03, wrong**" and cells["not-a-number"][1] == "**nan, wrong**"
    assert cells["growing"][2] == "6: 9, 12: 15 **grows**"
    assert "captured 2 times" in cells["again"][4]
    assert cells["dead"] == ["–", "–", "–", "–", "**fails**: RuntimeError: \\<no> kernel"]
    assert "graph break: net/model.py:7: data-dependent" in made and "graph break: y; 1 more breaks;" in made
    assert short("CaptureError: not one graph:\na logger\n  Hint") == "a logger"
    assert "fails" in line(ROWS[-1]) and len(short("x" * 500)) == 160


def test_where_kinds_of_layers_take_turns_deeper_models_are_counted() -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    assert Depths().counted(ARCHITECTURES["llama"]) == (6, 12)
    assert Depths().counted(ARCHITECTURES["gemma3"]) == (12, 24)


def test_kinds_and_numbers_of_architectures() -> None:
    kinds = Counter(each.kind for each in ARCHITECTURES.values())
    assert len(ARCHITECTURES) >= 40 and all(name == each.name for name, each in ARCHITECTURES.items())
    assert {"decoder", "encoder", "encoder-decoder", "state space", "vision", "audio"} < set(kinds)
    assert kinds["vision and language"] > 2 and kinds["mixture of experts"] > 2


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "t5", "swin", "whisper", "qwen2-vl"])
def test_the_same_small_model_every_time(name: str) -> None:
    """In plain transformers: a loss, the same one again, no dropout, and as many layers as asked for."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    architecture = ARCHITECTURES[name]
    losses = []
    for _ in range(2):
        model, batch = architecture.build(2), architecture.make_batch(0)
        assert model.training and sum(parameter.numel() for parameter in model.parameters()) < 200_000
        losses.append(model(**batch).loss.item())
    assert losses[0] == losses[1] and math.isfinite(losses[0])
    with torch.device("meta"):
        counts = [sum(1 for _ in architecture.build(layers).parameters()) for layers in (2, 3)]
    assert counts[0] < counts[1]


@pytest.mark.thorough
def test_the_command_on_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    found, made = tmp_path / "found.json", tmp_path / "models.md"
    options = ["--only", "llama", "--layers", "1,1,1", "--json", str(found), "--output", str(made)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    coverage.main()
    (row,) = json.loads(found.read_text())["rows"]
    assert row["name"] == "llama" and row["failed"] is None and trains(row) and is_one_graph(row)
    assert list(row["compilations"]) == ["1"]
    losses = [rank["losses"] for rank in row["ranks"]]
    assert len(losses[0]) == 5 and losses[0] != losses[1], "ranks see batches of their own"
    assert row["recognised"]["causal"] == 1
    assert "## Decoder" in made.read_text()


def crash(config: Any, generator: torch.Generator) -> Batch:
    os._exit(3)


def fail_on_one(config: Any, generator: torch.Generator) -> Batch:
    if generator.initial_seed() == 1:  # the first batch of the second rank
        raise ValueError("no such batch")
    return text(config, generator)


def hang(config: Any, generator: torch.Generator) -> Batch:
    time.sleep(60)
    return text(config, generator)


@pytest.mark.parametrize(
    ("batch", "timeout", "said"),
    [
        (crash, 350.0, "the process ended with exit code 3"),
        thorough(fail_on_one, 350.0, "ValueError: no such batch"),
        (hang, 1.0, "not done after 1 s"),
    ],
)
def test_neither_a_crash_nor_a_hang_ends_the_run(batch: Any, timeout: float, said: str) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    preload()
    found = on_ranks(replace(ARCHITECTURES["llama"], batch=batch), SHALLOW, timeout)
    assert found["failed"] == said and not trains(found) and "**fails**" in line(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "llama,nope"], "no 'nope'; there are llama, "),
        (["--layers", "6,12"], "expected three numbers of layers"),
        (["--output", "no/such/models.md"], "there is no directory"),
    ],
)
def test_what_cannot_be_asked_for(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    with pytest.raises(SystemExit):
        coverage.main()
    assert message in capsys.readouterr().err


def test_a_table_is_no_picture(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", "models", "--svg", "models.svg"]) == 2
    assert "bench models gives a table, and no bars" in capsys.readouterr().err
