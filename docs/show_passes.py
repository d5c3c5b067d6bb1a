"""Print the graphs in passes.md: two linear layers, sharded over two ranks by ZeRO-3, pass by pass.

python docs/show_passes.py
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxshard import _compat
from fxshard.config import Options
from fxshard.events import Phase
from fxshard.passes.context import GRADS, PARAM, ParamRef, PassContext
from fxshard.passes.keep_resident import keep_resident
from fxshard.passes.order_prefetch import order_prefetch
from fxshard.passes.pipeline import FARTHEST, INSERTING
from fxshard.passes.plan_memory import plan_memory
from fxshard.passes.recompute_param_views import recompute_param_views
from fxshard.passes.split_segments import split_segments
from fxshard.plan.buckets import plan_buckets
from fxshard.plan.hardware import hardware
from fxshard.plan.units import find_units


class Tiny(nn.Module):
    """Two layers, so that there is one to prefetch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def main() -> None:
    model = Tiny()
    plans = plan_buckets(model, find_units(model), zero=3, ranks=2)
    refs = {
        id(model.get_parameter(name)): ParamRef(plan.index, position)
        for plan in plans
        for position, name in enumerate(plan.params)
    }
    context = PassContext(plans, Options(), Phase.FORWARD, "cpu×2", ranks=2, hardware=hardware("cpu"))
    graphs: dict[Phase, fx.GraphModule] = {}

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = _compat.inductor_joint_passes(joint)
        for node, ref in zip(joint.graph.find_nodes(op="placeholder"), tied, strict=False):
            node.meta[PARAM] = ref
        joint = recompute_param_views(joint, context)
        show("joint graph, recompute_param_views", joint, lambda node: node.meta.get("recompute"))
        forward, backward = _compat.min_cut_partition(joint, inputs, **kwargs)
        backward.graph.output_node().meta[GRADS] = tuple(tied)
        graphs.update({Phase.FORWARD: forward, Phase.BACKWARD: backward})
        return forward, backward

    def capture(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tied[:] = [refs.get(id(_compat.graph_input_example(n))) for n in graph.graph.find_nodes(op="placeholder")]
        return _compat.aot_autograd(
            fw_compiler=untouched,
            bw_compiler=untouched,
            partition_fn=partition,
            decompositions=_compat.inductor_decompositions(),
        )(graph, inputs)

    def untouched(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return graph.forward

    tied: list[ParamRef | None] = []
    torch.compile(model, backend=capture, fullgraph=True)(torch.randn(4, 8))

    for phase, module in graphs.items():
        show(f"{phase}, as partitioned", module)
        for run in (*INSERTING[phase], order_prefetch):
            module = run(module, replace(context, phase=phase))
            show(f"{phase}, {run.__name__}", module)
        graphs[phase] = module
    keep_resident(graphs, context)
    for phase, module in graphs.items():
        show(f"{phase}, keep_resident", module)
    for phase, module in graphs.items():
        order_prefetch(module, replace(context, phase=phase, ahead=FARTHEST, by_deadline=True))
        show(f"{phase}, order_prefetch by deadlines", module)
    print("\n== plan_memory")
    for (what, bucket, opened), slot in plan_memory(graphs, context).slots.items():
        print(f"{what} {plans[bucket].name}, opened by event {opened}: bytes {slot.offset} to {slot.end}")
    for phase, module in graphs.items():
        split = split_segments(module, replace(context, phase=phase))
        show(f"{phase}, split_segments", split)
        for name, segment in split.named_children():
            assert isinstance(segment, fx.GraphModule)
            show(f"{phase}, {name}", segment)


def show(title: str, module: fx.GraphModule, note: Any = lambda node: None) -> None:
    """One line per node: what it is called, what it calls, with what."""
    print(f"\n== {title}")
    for node in module.graph.nodes:
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


if __name__ == "__main__":
    main()
