"""Graphs written by hand, how they read on one line per node, and a runtime that only pretends."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.passes.context import PassContext
from fxshard.passes.options import Options
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.domain import ZERO
from fxshard.planner.layout import TensorSpec
from fxshard.planner.rows import row_layout
from fxshard.schedule.events import Event, Kind, Phase, event_of
from fxshard.schedule.params import GRADS, PARAM, ParamRef
from tests.training import with_debug

aten = torch.ops.aten


class Draft:
    """A graph in the making. Values are meta tensors, computed by running each op on them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(
        self, name: str, *shape: int, param: ParamRef | None = None, dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta", dtype=dtype)
        node.meta[PARAM] = param
        return node

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        name = op.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", op, args, kwargs, name)
        node.meta["val"] = op(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
        return node

    def output(self, *nodes: fx.Node | None, grads: Sequence[ParamRef | None] | None = None) -> fx.GraphModule:
        output = self.graph.output(nodes)
        if grads is not None:
            output.meta[GRADS] = tuple(grads)
        return fx.GraphModule({}, self.graph)


def value(node: fx.Node) -> Any:
    return node.meta["val"]


def bucket(index: int, *shapes: tuple[int, ...], zero: int = 3, ranks: int = 2, trainable: bool = True) -> BucketPlan:
    """Bucket ``b<index>`` with parameters ``b<index>.0``, ``b<index>.1``, …"""
    specs = [TensorSpec(f"b{index}.{i}", shape) for i, shape in enumerate(shapes)]
    f32 = torch.float32
    return BucketPlan(index, f"b{index}", f"b{index}", row_layout(specs, ranks), ZERO[zero], f32, f32, f32, trainable)


def context(*buckets: BucketPlan, phase: Phase = Phase.FORWARD, **options: Any) -> PassContext:
    return PassContext(buckets, Options(lowering="eager", **with_debug(options)), phase, group="test", ranks=2)


def listing(module: fx.GraphModule) -> list[str]:
    """The graph without its inputs: ``wait b0``, ``b0[1]`` for an unpacking, ``mm(x, b0[1])`` for compute."""
    label: dict[fx.Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        event = event_of(node)
        if node.op == "placeholder":
            label[node] = node.name
            continue
        if event is not None:
            label[node], line = event.bucket, " ".join([event.kind, event.bucket, *map(str, node.kwargs.values())])
        elif node.target is operator.getitem:
            line = label[node] = f"{label[node.args[0]]}[{node.args[1]}]"  # type: ignore[index]
        else:
            args = fx.map_arg(node.args[0] if node.op == "output" else node.args, label.__getitem__)
            label[node] = node.name
            line = f"{node.name}({', '.join(map(str, args))})"
        lines.append(line)
    return lines


def chain(layers: int, shape: tuple[int, int], saves: bool = False) -> fx.GraphModule:
    """x @ w0 @ w1 @ …, one bucket per product; returns the weights, too, where they are saved for backward."""
    draft = Draft()
    weights = [draft.input(f"w{i}", *shape, param=ParamRef(i, 0)) for i in range(layers)]
    x = draft.input("x", *shape)
    for weight in weights:
        x = draft.call(aten.mm.default, x, weight)
    return draft.output(x, *(weights if saves else ()))


class Pretend(fx.Interpreter):
    """Runs a scheduled or a split graph on real tensors, with buckets that are plain lists.

    A gathered bucket exists between its ``unshard`` and its ``reshard`` only, and is poisoned behind it. A gradient
    bucket starts as NaN; what it holds at ``reduce`` is kept in ``reduced``, and it is poisoned at ``finish``.
    """

    def __init__(
        self, module: fx.GraphModule, buckets: Sequence[BucketPlan], params: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__(module)
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.params = params or {}
        self.gathered: dict[str, tuple[Tensor, ...]] = {}
        self.gradients: dict[str, tuple[Tensor, ...]] = {}
        self.reduced: dict[str, tuple[Tensor, ...]] = {}
        self.log: list[str] = []
        self.most_alive = 0

    def run_node(self, n: fx.Node) -> Any:
        event = event_of(n)
        if event is None:
            return super().run_node(n)
        self.log.append(f"{event.kind} {event.bucket}")
        return self.act(event, n.kwargs.get("zeros", ()))

    def act(self, event: Event, zeros: Any) -> Any:
        name, plan = event.bucket, self.buckets[event.bucket]
        if event.kind is Kind.UNSHARD:
            assert name not in self.gathered, f"{name} is gathered already"
            self.gathered[name] = tuple(self.params[param].clone() for param in plan.params)
        elif event.kind is Kind.WAIT:
            return self.gathered[name]
        elif event.kind is Kind.RESHARD:
            poison(self.gathered.pop(name))
        elif event.kind is Kind.GRAD:
            assert name not in self.gradients and name not in self.reduced, f"{name} is taken twice"
            shapes = [slot.spec.shape for slot in plan.layout.slots]
            views = tuple(torch.full(shape, 0.0 if i in zeros else torch.nan) for i, shape in enumerate(shapes))
            self.gradients[name] = views
            self.most_alive = max(self.most_alive, len(self.gradients))
            return views
        elif event.kind is Kind.REDUCE:
            assert name not in self.reduced, f"{name} is reduced twice"
            self.reduced[name] = tuple(view.clone() for view in self.gradients[name])
        elif event.kind is Kind.FINISH:
            assert name in self.reduced, f"{name} is finished before it is reduced"
            poison(self.gradients.pop(name))
        return None


def poison(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)
