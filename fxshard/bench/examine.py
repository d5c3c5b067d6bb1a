"""Examine an architecture on ranks: its losses with FSDP2 and with fxshard, and the number of compilations.

The ranks of one architecture are forked from a process that has imported what they need. They are gone afterwards, and
so is everything they broke.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import fx, nn

import fxshard
from fxshard.bench.architectures import Architecture
from fxshard.bench.contenders import fsdp2
from fxshard.passes.calls import argument
from fxshard.passes.context import PassContext

PRELOADED = ["fxshard.bench.examine", "fxshard.frontend.api", "torch.distributed.fsdp", "transformers.modeling_utils"]
"""What every rank imports: imported once, by the process that ranks are forked from."""
Row = dict[str, Any]


def preload() -> None:
    """To be called before the first ranks, and in the main process."""
    for variable, value in {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(variable, value)
    get_context("forkserver").set_forkserver_preload(PRELOADED)


def on_ranks(architecture: Architecture, depths: Depths, timeout: float) -> Row:
    """Examine an architecture on ranks of its own: neither a crash nor a hang reaches the caller."""
    row: Row = {"name": architecture.name, "kind": architecture.kind, "model": architecture.model}
    with tempfile.TemporaryDirectory() as folder:
        started = (_run, (architecture, depths, folder), RANKS)
        ranks = mp.start_processes(*started, join=False, daemon=True, start_method="forkserver")
        failed = _wait(ranks, timeout)
        found: list[Row] = []
        for file in sorted(Path(folder).glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns):
            if failed is None:  # the first that fails is why others do
                found.append(json.loads(file.read_text()))
                failed = found[-1]["failed"]
    if failed is not None:
        return {**row, "failed": failed, "ranks": [{"failed": failed}]}
    found.sort(key=lambda each: int(each["rank"]))
    counts = {layers: count for each in found for layers, count in each["compilations"].items()}
    return {**row, **found[0], "compilations": counts, "ranks": found}


def _wait(ranks: mp.ProcessContext, timeout: float) -> str | None:
    """For the ranks to end. Why they had to, where none of them can say so: a crash, or no time left."""
    deadline = time.monotonic() + timeout
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic())):  # which returns when one of them is done
            if time.monotonic() >= deadline:
                return f"not done after {timeout:.0f} s"
    except mp.ProcessExitedException as error:
        return f"the process ended with exit code {error.exit_code}"
    except mp.ProcessRaisedException:
        return None  # torch ends all of them with the first that fails, which has written down why
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return None


def _run(rank: int, architecture: Architecture, depths: Depths, folder: str) -> None:
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    result = Path(folder, f"rank-{rank}.json")
    try:
        result.write_text(json.dumps({"rank": rank, **examine(architecture, rank, depths)}))
    except Exception as error:
        result.write_text(json.dumps({"rank": rank, "failed": f"{type(error).__name__}: {error}"}))
        raise


RANKS = 2
STEPS = 5
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Depths:
    """Numbers of layers."""

    trained: int = 2
    """Layers of the models that are compared with FSDP2."""
    shallow: int = 6
    deep: int = 12
    """Layers of the models that are compiled only, to see whether a deeper one takes more compilations."""

    def counted(self, architecture: Architecture) -> tuple[int, int]:
        """The shallow and the deep one; twice as deep where several kinds of attention take turns: in few layers not
        every kind has stood after every other, and more compilations say nothing about depth.
        """
        times = 2 if architecture.takes_turns(self.deep) else 1
        return times * self.shallow, times * self.deep


@dataclass
class Recognised:
    """How often the passes before autograd recognised something in the graphs of a model."""

    attention: int = 0
    """Calls of attention, of which ..."""
    causal: int = 0
    """... say that they are causal and have no mask,"""
    recognised: int = 0
    """... had one that was recognised as the causal one,"""
    unmasked: int = 0
    """... had one that hid nothing,"""
    grouped: int = 0
    """... take key and value heads that are not repeated for every query head."""
    masked: dict[str, int] = field(default_factory=dict)
    """Attention that keeps its mask, by the reason."""
    fused: dict[str, int] = field(default_factory=dict)
    """Experts that are one operator, by their form."""
    left: dict[str, int] = field(default_factory=dict)
    """Experts and gated MLPs that were left alone, by the reason."""

    def note(self, module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
        """A pass that changes nothing; it stands after those that recognise something."""
        calls = [node for node in _nodes(module) if node.target is F.scaled_dot_product_attention]
        self.attention += len(calls)
        self.causal += sum(argument(call, 5, "is_causal") is True for call in calls)
        self.grouped += sum(call.kwargs.get("enable_gqa") is True for call in calls)
        self.recognised += len(context.attention.causal)
        self.unmasked += len(context.attention.unmasked)
        self.masked = _count(self.masked, [call.reason for call in context.attention.masked])
        self.fused = _count(self.fused, [f"{each.form}, by {each.implementation}" for each in context.experts.fused])
        self.left = _count(self.left, [each.reason for each in context.experts.left])
        return module


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """All nodes, those of checkpointed regions included, which have graphs of their own."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _count(before: dict[str, int], more: list[str]) -> dict[str, int]:
    return dict(Counter(before) + Counter(more))


@dataclass
class Finding:
    """The results of one rank for an architecture."""

    peer_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    graphs: int = 0
    """Graphs of one forward."""
    captures: int = 0
    """How often one of them was captured; more than their number where something other than inputs changed."""
    breaks: list[str] = field(default_factory=list)
    """Why it is not one graph."""
    compilations: dict[str, int] = field(default_factory=dict)
    """By number of layers."""
    unused: int = 0
    """Parameters that no graph uses."""
    recognised: Recognised = field(default_factory=Recognised)
    seconds: float = 0.0
    failed: str | None = None


def examine(architecture: Architecture, rank: int, depths: Depths) -> dict[str, Any]:
    """To be called on every rank of a process group, which is gone afterwards."""
    found, start = Finding(), time.perf_counter()
    peer, optimizer = fsdp2(_without_scalars(architecture.build(depths.trained)), None, compiled=False)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    found.peer_losses = train(architecture, peer, optimizer, rank)
    whole = True
    try:
        _train_ours(architecture, rank, depths.trained, found, fullgraph=True)
    except fxshard.CaptureError as error:
        whole, found.breaks, found.recognised = False, [str(error)], Recognised()
        _train_ours(architecture, rank, depths.trained, found, fullgraph=False)
    dist.destroy_process_group()
    layers = depths.counted(architecture)[rank]  # each rank counts for one depth, alone
    model = _compile(architecture, layers, whole, Recognised().note)
    model(**architecture.make_batch(rank)).loss.backward()
    found.compilations[str(layers)] = model.report.compilations.compiled
    found.seconds = time.perf_counter() - start
    return asdict(found)


def _without_scalars(model: nn.Module) -> nn.Module:
    """FSDP2 takes no parameter without a dimension and asks for one of size 1 in its place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
    return model


def _train_ours(architecture: Architecture, rank: int, layers: int, found: Finding, *, fullgraph: bool) -> None:
    model = _compile(architecture, layers, fullgraph, found.recognised.note)
    found.losses = train(architecture, model, model.optimizer, rank)
    report = model.report
    found.captures = report.compilations.captures
    found.graphs = 1 if fullgraph else found.captures
    found.breaks += report.graph_breaks
    found.unused = len(report.unused_parameters)


def _compile(
    architecture: Architecture, layers: int, fullgraph: bool, note: Callable[..., fx.GraphModule]
) -> fxshard.ShardedModule:
    torch.compiler.reset()
    return fxshard.compile(
        architecture.build(layers),
        optimizer=fxshard.AdamW(lr=LEARNING_RATE),
        passes=fxshard.PASSES.after("fuse_dense_swiglu", note),
        lowering="eager",
        fullgraph=fullgraph,
    )


def train(architecture: Architecture, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Losses of a few steps, each with another batch."""
    losses = []
    for step in range(STEPS):
        loss = model(**architecture.make_batch(RANKS * step + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
