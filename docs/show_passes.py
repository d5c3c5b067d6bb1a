"""Print the graphs in passes.md: small models, sharded over two ranks by ZeRO-3, pass by pass.

python docs/show_passes.py                # all of them
python docs/show_passes.py --only mxfp8   # one of PARTS, below
"""

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxshard
from fxshard._torch import private
from fxshard.frontend.tracing import outputs_without_values, tie_parameters
from fxshard.kernels.by_torch import TorchExperts
from fxshard.kernels.choose import add_implementation
from fxshard.kernels.op import grouped_swiglu
from fxshard.passes.apply_decisions import apply_decisions
from fxshard.passes.chunk_loss import chunk_loss
from fxshard.passes.context import PassContext
from fxshard.passes.decide import Decisions
from fxshard.passes.defer_wgrad import defer_wgrad
from fxshard.passes.fill_arena import fill_arena
from fxshard.passes.fuse_dense_swiglu import fuse_dense_swiglu
from fxshard.passes.fuse_grouped_swiglu import fuse_grouped_swiglu
from fxshard.passes.group_experts import group_experts
from fxshard.passes.insert_all_reduce import insert_all_reduce
from fxshard.passes.insert_reduce_scatter import insert_reduce_scatter
from fxshard.passes.insert_unshard import insert_unshard
from fxshard.passes.keep_resident import Order, keep_resident
from fxshard.passes.measure_logits import measure_logits
from fxshard.passes.offload_saved import offload_saved, saved_kinds
from fxshard.passes.options import Options
from fxshard.passes.order_collectives import order_collectives
from fxshard.passes.order_prefetch import late_gathers, latest_starts, order_prefetch
from fxshard.passes.pipeline import INSERTING, JOINT
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.recognize_masks import recognize_masks
from fxshard.passes.scale_narrow import scale_narrow
from fxshard.passes.split_segments import split_segments
from fxshard.passes.stage_quantized import stage_quantized
from fxshard.passes.sum_products import sum_products
from fxshard.passes.timeline import Timeline
from fxshard.planner.buckets import plan_buckets
from fxshard.planner.domain import Domain
from fxshard.planner.hardware import hardware
from fxshard.planner.memory import MemoryPlan
from fxshard.planner.model_groups import ModelGroup
from fxshard.planner.precision import Precision
from fxshard.planner.tuning import FARTHEST
from fxshard.planner.units import find_units
from fxshard.schedule.collectives import GROUP
from fxshard.schedule.events import Phase, event_of
from fxshard.schedule.params import GRADS, PARAM, ParamRef

# -- models ----------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Two layers, so that there is one to prefetch."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class Embedded(nn.Module):
    """Two layers after an embedding that is larger than one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return h.sum()


class Rotated(nn.Module):
    """A norm, an activation, and a table of cosines between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)
        self.register_buffer("angles", torch.rand(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.scale)
        x = x * self.angles.cos()
        return self.down(torch.nn.functional.silu(x)).sum()


class Residual(Embedded):
    """The same, but each layer adds to what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(torch.tanh(h))
        return h.tanh().sum()


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two experts that compute a half of the tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.chunk(2), strict=True)])


class Stacked(nn.Module):
    """Two experts in one tensor per product, as the passes before autograd leave them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(2, 32, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([16, 32], dtype=torch.int32)
        nothing = (None,) * 4
        return grouped_swiglu(
            x, offsets, self.gate, self.up, self.down, *nothing, 1.0, math.inf, 0.0, 0, False, "torch"
        )[0]


# -- capturing -------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """The graphs of a model: Dynamo's, the joint one, and both of its parts."""

    context: PassContext
    dynamo: fx.GraphModule
    joint: fx.GraphModule
    phases: dict[Phase, fx.GraphModule]

    def run(self, phase: Phase, run: Callable[[fx.GraphModule, PassContext], fx.GraphModule]) -> None:
        self.phases[phase] = run(self.phases[phase], replace(self.context, phase=phase))


def captured(
    model: nn.Module, x: Tensor, *, precision: Precision | None = None, replicas: int = 1, shows: bool = False
) -> Captured:
    """Capture, tie to parameters, run the passes on the joint graph (printed if it ``shows``), partition."""
    domain = Domain(2, replicas, divisor=2 * replicas)
    plans = plan_buckets(model, find_units(model), zero=3, ranks=2, precision=precision, domain_of=lambda name: domain)
    context = PassContext(plans, Options(), Phase.FORWARD, "cpu×2", ranks=2 * replicas, hardware=hardware("cpu"))
    if precision is not None:
        model = model.to(precision.param)
    refs = {
        id(model.get_parameter(name)): ParamRef(plan.index, position)
        for plan in plans
        for position, name in enumerate(plan.params)
    }
    found: dict[str, Any] = {}

    def partition(joint: fx.GraphModule, outputs: int, static: Sequence[int]) -> None:
        joint = private.inductor_joint_passes(joint)
        for node, ref in zip(joint.graph.find_nodes(op="placeholder"), found["refs"], strict=False):
            node.meta[PARAM] = ref
        joint.graph.output_node().meta[GRADS] = (*[None] * outputs, *found["refs"])
        if shows:
            show("joint graph, as traced", joint)
        for run in JOINT:
            joint = run(joint, context)
            if shows:
                show(f"joint graph, {run.__name__}", joint, lambda node: node.meta.get("recompute"))
        forward, backward = private.min_cut_partition(
            joint, (), num_fwd_outputs=outputs, static_lifetime_input_indices=list(static)
        )
        backward.graph.output_node().meta[GRADS] = tuple(found["refs"])
        found.update(joint=joint, phases={Phase.FORWARD: forward, Phase.BACKWARD: backward})

    def capture(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        placeholders = graph.graph.find_nodes(op="placeholder")
        found.update(dynamo=graph, refs=[refs.get(id(private.graph_input_example(node))) for node in placeholders])
        tie_parameters(graph, found["refs"])
        results = outputs_without_values(graph)
        with private.traced(graph, inputs, private.inductor_decompositions()) as traced:
            partition(traced.graph, traced.outputs or 0, traced.static_inputs)
        return lambda *args: results

    torch.compile(model, backend=capture, fullgraph=True)(x)
    return Captured(context, found["dynamo"], found["joint"], found["phases"])


# -- showing ---------------------------------------------------------------------------------------------------------


def schedule() -> None:
    """Two layers: everything that happens to a plain model."""
    model = captured(Tiny(), torch.randn(4, 8), shows=True)
    for phase in model.phases:
        show(f"{phase}, as partitioned", model.phases[phase])
        for run in INSERTING[phase]:
            model.run(phase, run)
            show(f"{phase}, {run.__name__}", model.phases[phase])
    ahead = Timeline.of(model.phases).each(lambda part: order_prefetch(part, 1))
    kept, _ = keep_resident(Order(ahead, model.context))
    late = kept.each(lambda part: order_prefetch(part, FARTHEST, latest_starts(part, model.context), leading=1))
    rules = {"order_prefetch": ahead, "keep_resident": kept, "order_prefetch by deadlines": late}
    for name, timeline in rules.items():
        for phase, module in applied(model, timeline).items():
            show(f"{phase}, {name}", module)
    print("\n== plan_memory")
    show_places(plan_memory(late, model.context.buckets), model)
    for phase, module in applied(model, late).items():
        split = split_segments(module, replace(model.context, phase=phase))
        show(f"{phase}, split_segments", split)
        for name, segment in split.named_children():
            assert isinstance(segment, fx.GraphModule)
            show(f"{phase}, {name}", segment)


def filled() -> None:
    """Four layers, gathered one ahead over a network that is slower than compute."""
    model = captured(Tiny(layers=4), torch.randn(4, 8))
    for phase in model.phases:
        for run in INSERTING[phase]:
            model.run(phase, run)
    buckets = model.context.buckets
    ahead = Timeline.of(model.phases).each(lambda part: order_prefetch(part, 1))
    memory = plan_memory(ahead, buckets)
    show("forward of four layers, plan_memory", applied(model, ahead)[Phase.FORWARD], of=event_of)
    show_places(memory, model)
    late = {node for part in ahead.phases for node in late_gathers(part, latest_starts(part, model.context))}
    filled, memory = fill_arena(ahead, buckets, memory, late)
    show("forward of four layers, fill_arena", applied(model, filled)[Phase.FORWARD], of=event_of)
    show_places(memory, model)


def offloaded() -> None:
    """Four layers: what each saves leaves in forward and comes back in backward."""
    model = captured(Tiny(layers=4), torch.randn(4, 8))
    for phase in model.phases:
        for run in INSERTING[phase]:
            model.run(phase, run)
    kinds = saved_kinds(model.phases, 1, hardware("cpu"))
    for phase, module in offload_saved(model.phases, kinds).items():
        show(f"{phase} of four layers, offload_saved", module)


def applied(model: Captured, timeline: Timeline) -> dict[Phase, fx.GraphModule]:
    """Copies of the graphs with their events as in a timeline."""
    graphs = {phase: fx.GraphModule(module, copy.deepcopy(module.graph)) for phase, module in model.phases.items()}
    apply_decisions(graphs, Decisions(timeline, frozenset(), MemoryPlan({}, 0)))
    return graphs


def residual() -> None:
    """Two layers that add to what they were given, after an embedding."""
    captured(Residual(), torch.zeros(4, dtype=torch.int64), shows=True)


def rotated() -> None:
    """A table of cosines; a norm and an activation, which products read."""
    captured(Rotated(), torch.randn(4, 8), shows=True)


def deferred() -> None:
    """Two layers after an embedding: the first layer's product moves after the embedding's gradient."""
    model = captured(Embedded(), torch.zeros(4, dtype=torch.int64))
    show("backward of an embedding and two layers, as partitioned", model.phases[Phase.BACKWARD])
    model.run(Phase.BACKWARD, defer_wgrad)
    show("backward of an embedding and two layers, defer_wgrad", model.phases[Phase.BACKWARD])


def communicating() -> None:
    """Backward of a linear layer whose columns lie on two ranks: the gradient of its input is summed over them."""
    graph = fx.Graph()
    grad, x, weight = (graph.placeholder(name) for name in ("grad", "x", "weight"))
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    turned = graph.call_function(aten.permute.default, (grad, [1, 0]))
    product = graph.call_function(aten.mm.default, (turned, x))
    partial = graph.call_function(aten.mm.default, (grad, weight))
    start = graph.create_node("call_function", functional.all_reduce.default, (partial, "sum", "tp"), name="all_reduce")
    wait = graph.create_node("call_function", functional.wait_tensor.default, (start,), name="wait_tensor")
    graph.output((product, graph.call_function(aten.tanh_backward.default, (wait, x))))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(8, 8, device="meta")
    start.meta[GROUP] = ModelGroup("tp", 2)
    module = fx.GraphModule({}, graph)
    show("backward of a linear layer whose columns are cut, as traced", module)
    context = PassContext((), Options(), Phase.BACKWARD)
    show("backward of a linear layer whose columns are cut, order_collectives", order_collectives(module, context))


def replicas() -> None:
    """Two layers, two shards, two replicas of each."""
    model = captured(Tiny(), torch.randn(4, 8), replicas=2)
    for run in (insert_reduce_scatter, insert_all_reduce):
        model.run(Phase.BACKWARD, run)
    show("backward with two replicas of each shard, insert_all_reduce", model.phases[Phase.BACKWARD])


def mxfp8() -> None:
    """Two layers in MXFP8: the products, and what is gathered for them."""
    model = captured(Tiny(32), torch.randn(32, 32, dtype=torch.bfloat16), precision=fxshard.MXFP8(), shows=True)
    for phase in model.phases:
        for run in (insert_unshard, stage_quantized):
            model.run(phase, run)
            show(f"{phase} in MXFP8, {run.__name__}", model.phases[phase])


def opened() -> None:
    """Fused experts in MXFP8: products and activation again, and then each product."""
    captured(Stacked(), torch.randn(32, 32, dtype=torch.bfloat16), precision=fxshard.MXFP8(), shows=True)


def experts() -> None:
    """A loop over two expert modules."""
    model = captured(Experts(), torch.randn(8, 8))
    show("experts, as Dynamo captured them", model.dynamo)
    for run in (group_experts, fuse_grouped_swiglu):
        module = run(model.dynamo, model.context)
        show(f"experts, {run.__name__}", module)
    print(model.context.experts)


class Always(TorchExperts):
    """As ``torch``, and faster for every dense MLP, or so it says."""

    takes_dense = True


class Twice(nn.Module):
    """Each token once for either of its two experts, sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.register_buffer("experts", torch.tensor([1, 0, 2, 1, 0, 2, 2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[self.experts.argsort() // 2].tanh().sum()


def sorted_tokens() -> None:
    """A gather by a permutation, of which each row is taken twice."""
    captured(Twice(), torch.randn(4, 8), shows=True)


class Masked(nn.Module):
    """Attention as transformers writes it where the whole model is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        at = torch.arange(4)
        mask = at[None, None, None, :] <= at[None, None, :, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()


def masks() -> None:
    """One attention, with a mask that is the causal one."""
    model = captured(Masked(), torch.randn(1, 4, 8))
    show("attention, as Dynamo captured it", model.dynamo)
    show("attention, recognize_masks", recognize_masks(model.dynamo, model.context))
    print(model.context.attention)
    model.context.measures_logits = True
    show("attention, measure_logits", measure_logits(model.dynamo, model.context))


class Head(nn.Module):
    """A head and its loss, as many models end: each token is to predict the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        labels = torch.arange(8).view(2, 4)
        logits = self.head(hidden).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))


def losses() -> None:
    """One head, whose logits are small: chunks are asked for."""
    model = captured(Head(), torch.randn(2, 4, 8))
    show("a head and its loss, as Dynamo captured them", model.dynamo)
    context = replace(model.context, options=Options(debug=fxshard.Debug(chunk_loss=True)))
    show("a head and its loss, chunk_loss", chunk_loss(model.dynamo, context))
    print(context.loss)


class Adapted(nn.Module):
    """A layer with an adapter of rank 8, as peft has them."""

    def __init__(self, scaling: float) -> None:
        super().__init__()
        self.layer, self.a = (nn.Linear(512, out, bias=False, dtype=torch.bfloat16) for out in (512, 8))
        self.b = nn.Linear(8, 512, bias=False, dtype=torch.bfloat16)
        self.layer.requires_grad_(False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        wide = self.b(self.a(x))
        return torch.tanh(self.layer(x) + (wide if self.scaling == 1 else wide * self.scaling)).sum()


def adapters() -> None:
    """A layer with an adapter, planned for a machine that has kernels for it."""
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    model = captured(Adapted(2.0), x)
    show("a layer with an adapter, as Dynamo captured it", model.dynamo)
    show("a layer with an adapter, scale_narrow", scale_narrow(model.dynamo, model.context))
    torch.compiler.reset()
    model = captured(Adapted(1.0), x)
    show("joint graph of a layer with an adapter, as traced", model.joint)
    context = replace(model.context, planned_experts="auto", hardware=hardware("h200"))
    show("joint graph of a layer with an adapter, sum_products", sum_products(model.joint, context))


def dense() -> None:
    """One gated MLP, by an implementation that takes it."""
    add_implementation("always", Always)
    model = captured(Expert(), torch.randn(4, 8))
    show("a dense MLP, as Dynamo captured it", model.dynamo)
    context = replace(model.context, options=replace(model.context.options, experts="always"))
    show("a dense MLP, fuse_dense_swiglu", fuse_dense_swiglu(model.dynamo, context))
    print(context.experts)


def show_places(memory: MemoryPlan, model: Captured) -> None:
    """What lies where in the arena."""
    for (what, bucket, opened), slot in memory.slots.items():
        name = model.context.buckets[bucket].name
        print(f"{what} {name}, opened by event {opened}: bytes {slot.offset} to {slot.end}")


def show(
    title: str, module: fx.GraphModule, note: Any = lambda node: None, of: Callable[[fx.Node], Any] = lambda node: True
) -> None:
    """One line per node: what it is called, what it calls, with what. ``of``: for those nodes only."""
    print(f"\n== {title}")
    for node in filter(of, module.graph.nodes):
        remark = f"    # {note(node).name}" if note(node) is not None else ""
        if node.op == "placeholder":
            ref = node.meta.get(PARAM)
            print(f"{node.name}: input" + (f", parameter {ref.position} of bucket {ref.bucket}" if ref else ""))
        elif node.op == "output":
            print(f"return {node.args[0]}")
        else:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            arguments = [repr(arg) for arg in node.args] + [f"{key}={value!r}" for key, value in node.kwargs.items()]
            print(f"{node.name} = {target.removesuffix('.default')}({', '.join(arguments)}){remark}")


PARTS = (masks, losses, experts, dense, opened, mxfp8, schedule, residual, rotated, filled, communicating, deferred)
PARTS += (replicas, offloaded, sorted_tokens, adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the graphs in passes.md.")
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS])
    only = parser.parse_args().only
    for part in PARTS:
        if only in (None, part.__name__):
            torch.compiler.reset()
            part()


if __name__ == "__main__":
    main()
