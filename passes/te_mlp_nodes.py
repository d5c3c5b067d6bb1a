"""Experts of Transformer Engine's fused grouped MLP in a joint graph: phases that read quantized weights.

Before, forward is one node and backward another, which computes forward again. After, forward returns what backward
reads, each weight gradient is a node of its own, and weights are quantized where they are used, rowwise in forward and
columnwise in backward, like those of any product in MXFP8: if they rest quantized, ``stage_quantized`` gives the nodes
what was gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard._torch.errors import ConfigError
from fxshard.kernels.choose import implementation
from fxshard.kernels.mxfp8 import COLUMNWISE, ROWWISE
from fxshard.kernels.op import grouped_swiglu, grouped_swiglu_gradients
from fxshard.kernels.te_mlp_op import te_mlp_backward, te_mlp_forward, te_mlp_wgrad
from fxshard.passes.context import PassContext
from fxshard.passes.matrix_products import Operand, call_at, stacked, unpacked_at, untransposed
from fxshard.passes.mxfp8_nodes import Mxfp8Nodes
from fxshard.schedule.params import param_inputs

_PERMUTE = torch.ops.aten.permute.default
_INPUTS = 9
"""Tokens, offsets, three weights, three biases and routing weights: what both nodes of the same experts take."""


def open_te_mlp(graph: fx.Graph, context: PassContext) -> bool:
    """Whether there were such experts."""
    forwards = _nodes(graph, grouped_swiglu)
    backwards = {node.args[1 : 1 + _INPUTS]: node for node in _nodes(graph, grouped_swiglu_gradients)}
    for node in forwards:
        _check_policy(graph, node, context)
        backward = backwards.get(node.args[:_INPUTS])
        kept = _open_forward(graph, node, trains=backward is not None)
        if backward is not None:
            _open_backward(graph, backward, kept)
    return bool(forwards)


def _nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=target)
    return [node for node in found if implementation(node.args[-1]).takes_quantized]


def _check_policy(graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
    refs = param_inputs(graph)
    for weight in (node.args[2], node.args[4]):
        base, _ = untransposed(weight)  # type: ignore[arg-type]
        for each in (base, *stacked(base)):
            if each in refs and context.bucket(refs[each]).float8 is not None:
                name = context.bucket(refs[each]).params[refs[each].position]
                raise ConfigError(
                    f'experts="{node.args[-1]}" multiplies in MXFP8, and fxshard.Float8 chooses {name!r} for float8: '
                    'leave experts out of Float8, or use experts="auto"'
                )


def _open_forward(graph: fx.Graph, node: fx.Node, *, trains: bool) -> list[fx.Node]:
    """What backward reads: tokens and their scales, pre-activations, activations and their scales."""
    with graph.inserting_before(node):
        args = (*node.args[:2], *_weights(graph, node, node.args, ROWWISE), *node.args[8:-1], trains)
        out, *kept = unpacked_at(node, te_mlp_forward, *args)
    _substitute(graph, node, {0: out})
    return kept


def _open_backward(graph: fx.Graph, node: fx.Node, kept: list[fx.Node]) -> None:
    grad, _, offsets, gate, _, down, *_ = node.args
    tokens, tokens_scales, pre, hidden, hidden_scales = kept
    with graph.inserting_before(node):
        weights = _weights(graph, node, node.args[1:], COLUMNWISE)
        args = (grad, offsets, pre, *weights, *node.args[9:-1])
        grad_x, grad_weights, *columns, gate_bias, down_bias = unpacked_at(node, te_mlp_backward, *args)

        def gradient(of_out: list[fx.Node], operand: tuple[fx.Node, fx.Node], weight: Any) -> fx.Node:
            dtype = weight.meta["val"].dtype
            made = call_at(node, te_mlp_wgrad, *of_out, *operand, offsets, dtype)
            return call_at(node, _PERMUTE, made, [0, 2, 1])

        of_gate = gradient(columns[:2], (tokens, tokens_scales), gate)
        of_down = gradient(columns[2:], (hidden, hidden_scales), down)
    results = {0: grad_x, 1: of_gate, 3: of_down, 4: gate_bias, 6: down_bias, 7: grad_weights}
    _substitute(graph, node, results)


def _weights(graph: fx.Graph, node: fx.Node, inputs: Any, axis: int) -> tuple[Any, ...]:
    """Both stacks, quantized, and the biases, as the operators take them."""
    _, _, gate, _, down, gate_bias, _, down_bias, *_ = inputs
    copies: list[fx.Node] = []
    for weight in (gate, down):
        base, turned = untransposed(weight)
        if not turned:
            raise ConfigError(
                f'experts="{node.args[-1]}": Transformer Engine reads weights that lie [experts, out, in], and '
                f'{base.name} does not; use experts="auto"'
            )
        operand = Operand(base, axis)
        copies += Mxfp8Nodes(graph, ()).quantize(operand, base, node)[operand]
    return *copies, gate_bias, down_bias


def _substitute(graph: fx.Graph, node: fx.Node, results: dict[int, fx.Node]) -> None:
    for part in list(node.users):
        new = results.get(part.args[1])  # type: ignore[arg-type]
        if new is not None:
            part.replace_all_uses_with(new)
        if not part.users:
            graph.erase_node(part)
    graph.erase_node(node)
