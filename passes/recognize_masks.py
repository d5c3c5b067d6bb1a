"""Before autograd: attention whose mask is the causal one says ``is_causal`` instead of reading a mask.

Requires nothing; goes first. Provides calls of ``scaled_dot_product_attention`` without a mask, a line in the report
for each call that had one, and no node of a mask that is no longer used. A mask counts as causal if it depends on
numbers alone and each of its elements, computed for real, is that of the causal mask: True or 0 up to the diagonal,
False or -inf after it. The lowest finite number is another mask: where all scores of a row are that low, it shows.

Where key and value of such a call repeat their heads for groups of query heads, the call takes the heads themselves
(``enable_gqa``). Results are the same; gradients of key and value are sums over a group, which kernels may add up in
another order than the backward of a repetition does: they agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxshard._torch import private
from fxshard.passes.calls import TRANSFORMED, argument, place, rewrite_nested, shape, stand_in, value
from fxshard.passes.constant_values import NotConstant, constant_sources, constant_value
from fxshard.passes.context import PassContext
from fxshard.passes.grouped_heads import erase_repetition, heads_before_repetition
from fxshard.schedule.attention_report import CausalCall, MaskedCall


class Masked(Exception):
    """Why a call keeps its mask."""


def recognize_masks(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    masks = _Masks(module)
    rewrite_nested(module, lambda graph: _rewrite(graph, masks, context))
    return rewrite_nested(module, masks.erase_unused)


def _rewrite(graph: fx.Graph, masks: _Masks, context: PassContext) -> None:
    for node in list(graph.nodes):
        mask = _mask(node)
        if mask is None:
            continue
        try:
            masks.check_causal(mask)
            made = _make_causal(node)
        except Masked as reason:
            context.attention.masked.append(MaskedCall(place(node), str(reason)))
        else:
            context.attention.causal.append(CausalCall(place(made), "enable_gqa" in made.kwargs))


def _mask(node: fx.Node) -> fx.Node | None:
    """The mask of a call of attention that has one."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    mask = argument(node, 3, "attn_mask")
    return mask if isinstance(mask, fx.Node) else None


# -- masks -----------------------------------------------------------------------------------------------------------


class _Masks:
    """The masks of a captured graph. Layers share them: each is computed once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
        self._given = _checkpoint_arguments(module)
        self._reasons: dict[fx.Node, str | None] = {}
        """Why a mask is not causal; None where it is."""

    def check_causal(self, mask: fx.Node) -> None:
        while mask in self._given:
            mask = self._given[mask]
        if mask not in self._reasons:
            try:
                self._reasons[mask] = _difference(constant_value(mask, self._graphs))
            except NotConstant as error:
                self._reasons[mask] = str(error)
        reason = self._reasons[mask]
        if reason is not None:
            raise Masked(reason)

    def erase_unused(self, graph: fx.Graph) -> None:
        """What made causal masks in a graph, as far as nothing else takes it."""
        causal = [mask for mask, reason in self._reasons.items() if reason is None and mask.graph is graph]
        for node in sorted({source for mask in causal for source in constant_sources(mask)}, reverse=True):
            if not node.users:
                graph.erase_node(node)


def _checkpoint_arguments(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Input of a checkpointed region → the node that is given for it, where there is one call of the region."""
    given: dict[fx.Node, set[Any]] = {}
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if private.calls_checkpointed(node) and isinstance(node.args[0], fx.Node):
                region = getattr(part, str(node.args[0].target))
                for placeholder, source in zip(region.graph.find_nodes(op="placeholder"), node.args[1:], strict=True):
                    given.setdefault(placeholder, set()).add(source)
    single = {placeholder: next(iter(sources)) for placeholder, sources in given.items() if len(sources) == 1}
    return {placeholder: source for placeholder, source in single.items() if isinstance(source, fx.Node)}


def _difference(mask: torch.Tensor) -> str | None:
    """What tells a mask from the causal one; None if it is that."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return f"is not square: {tuple(mask.shape)}"
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        return f"holds {mask.dtype}"
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # the same memory again
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    with private.as_a_compiler():
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
        if mask.dtype != torch.bool:
            causal = torch.zeros(causal.shape, dtype=mask.dtype).masked_fill(~causal, -torch.inf)
        return None if torch.equal(mask, causal.expand_as(mask)) else "is not causal"


# -- calls -----------------------------------------------------------------------------------------------------------


def _make_causal(node: fx.Node) -> fx.Node:
    """Replace a call whose mask is causal."""
    query, key, values, mask = (argument(node, i, name) for i, name in enumerate(_OPERANDS))
    _check_operands(node, (query, key, values), mask)
    kwargs = {"dropout_p": argument(node, 4, "dropout_p", 0.0), **node.kwargs, "attn_mask": None, "is_causal": True}
    kwargs = {name: given for name, given in kwargs.items() if name not in _OPERANDS[:3]}
    heads = heads_before_repetition(node, query, key, values)
    if heads is not None:
        try:
            new = _replace(node, (query, *heads), {**kwargs, "enable_gqa": True}, fused=True)
        except Masked:  # no kernel takes them
            return _replace(node, (query, key, values), kwargs)
        erase_repetition((key, values), heads)
        return new
    return _replace(node, (query, key, values), kwargs)


def _replace(node: fx.Node, operands: tuple[Any, ...], kwargs: dict[str, Any], *, fused: bool = False) -> fx.Node:
    """Put another call in the place of ``node``. Its result lies in memory as that of ``node`` did: a view of it may
    depend on that. Where kernels differ in this, it is copied; mostly the model does so next, and finds it done.
    ``fused``: only if torch has a kernel for the call, and does not compute it in steps.
    """
    expected = value(node)
    assert expected is not None
    with private.as_fake_as(expected), torch.set_grad_enabled(expected.requires_grad):
        with _Kernel() as kernel:
            found = _computed(operands, kwargs, expected.dtype)
        if fused and not kernel.fused:
            raise Masked("is causal, but without it no kernel takes the call")
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise Masked("is causal, but without it the result has another shape or dtype")
        copies: tuple[tuple[Any, ...], ...] = ()
        if found.stride() != expected.stride():
            copies = (("contiguous",),)
            if expected.dim() == 4 and expected.transpose(1, 2).is_contiguous():
                copies = (("transpose", 1, 2), *copies, ("transpose", 1, 2))
            elif not expected.is_contiguous():
                raise Masked("is causal, but without it the result lies differently in memory")
        with node.graph.inserting_before(node):
            new = last = node.graph.call_function(F.scaled_dot_product_attention, operands, kwargs)
            last.meta["example_value"] = found
            for name, *args in copies:
                last, found = node.graph.call_method(name, (last, *args)), getattr(found, name)(*args)
                last.meta["example_value"] = found
                stand_in(last, node)
    stand_in(new, node)
    node.replace_all_uses_with(last)
    node.graph.erase_node(node)
    return new


def _computed(operands: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What torch gives for a call, in ``dtype`` as under autocast."""
    query, key, values = (tensor.to(dtype) for operand in operands if (tensor := value(operand)) is not None)
    try:
        return F.scaled_dot_product_attention(query, key, values, **kwargs)
    except RuntimeError as error:
        raise Masked(f"is causal, but torch refuses the call without it: {str(error).splitlines()[0]}") from error


class _Kernel(private.OperatorObserver):
    """Sees whether attention is one operator, as it is for torch's fused kernels, or computed in steps."""

    fused = False

    def before(self, operator: Any, args: Any, kwargs: Any) -> None:
        self.fused |= private.operator_name(operator).startswith("_scaled_dot_product")


_OPERANDS = ("query", "key", "value", "attn_mask")


def _check_operands(node: fx.Node, operands: Iterable[Any], mask: fx.Node) -> None:
    if argument(node, 5, "is_causal", False) is not False or node.meta.get(TRANSFORMED):
        raise Masked("is not all that this call masks by")
    if not all(private.is_plain(value(operand)) for operand in (node, *operands)):
        raise Masked("belongs to tensors of a class of their own")
    length, (query, key, _) = shape(mask)[-1], (shape(operand) for operand in operands)
    if not all(isinstance(size, int) and size == length for size in (query[-2], key[-2])):
        raise Masked("is not as long as queries and keys")
    batch = shape(node)[:-2]
    if len(query) - 2 != len(batch) or len(shape(mask)) > len(shape(node)):
        raise Masked("gives the result more dimensions than queries have")
    for size, own in zip(reversed(shape(mask)[:-2]), reversed(query[:-2]), strict=False):
        if size != 1 and not (isinstance(own, int) and own == size):
            raise Masked("gives the result another size than queries have")
