"""Before autograd: attention whose mask is the causal one, a window, one of documents, one of padding, or hides nothing
reads no mask of queries and keys.

Requires nothing; goes first. Provides calls of ``scaled_dot_product_attention`` that say ``is_causal`` or have no mask,
and ``fxshard::window_attention`` for masks that let each query see a range of keys up to its own, where there is a
kernel for it; a line in the report for each call that had a mask, and no node of a mask that is no longer used. A mask
counts if it depends on numbers alone and each of its elements, computed for real, is what is expected: True or 0 where
a key is seen, False or -inf elsewhere. The lowest finite number is another mask: where all scores of a row are that
low, it shows. Documents packed into a row, and padding, depend on data (see ``match_range``).

Where key and value of such a call repeat their heads for groups of query heads, the call takes the heads themselves.
Results are the same; gradients of key and value are sums over a group, which kernels may add up in another order than
the backward of a repetition does: they agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from fxshard._torch import private
from fxshard.kernels.window_op import UNLIMITED, document_bounds, runs_well, window_attention
from fxshard.passes.calls import (
    TRANSFORMED,
    argument,
    named_shape,
    named_sizes,
    place,
    rewrite_nested,
    shape,
    stand_in,
    value,
)
from fxshard.passes.constant_values import NotConstant
from fxshard.passes.context import PassContext
from fxshard.passes.grouped_heads import erase_repetition, heads_before_repetition
from fxshard.passes.match_range import Range, match_range
from fxshard.schedule.attention_report import CausalCall, MaskedCall, UnmaskedCall, WindowCall


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
            seen = masks.range_of(mask)
            if seen.causal or seen.hides_nothing:
                made = _leave_mask_out(node, seen)
            else:
                _check_wanted(node, seen, context)
                made = _make_window(node, seen, masks)
        except Masked as reason:
            context.attention.masked.append(MaskedCall(place(node), str(reason)))
            continue
        if seen.causal:
            context.attention.causal.append(CausalCall(place(made), "enable_gqa" in made.kwargs))
        elif seen.hides_nothing:
            context.attention.unmasked.append(UnmaskedCall(place(made)))
        else:
            window = seen.window if seen.window < seen.length else None
            ahead = seen.ahead if seen.ahead < seen.length - 1 else None
            documents, padding = seen.documents is not None, seen.key_mask is not None
            context.attention.windows.append(WindowCall(place(made), window, documents, padding, ahead))


def _mask(node: fx.Node) -> fx.Node | None:
    """The mask of a call of attention that has one."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    mask = argument(node, 3, "attn_mask")
    return mask if isinstance(mask, fx.Node) else None


# -- masks -----------------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What is given for an input of a checkpointed region."""

    call: fx.Node
    position: int
    source: fx.Node


class _Masks:
    """The masks of a captured graph. Layers share them: each is looked at once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
        self._given = _checkpoint_arguments(module)
        self._found: dict[fx.Node, Range | str] = {}
        """What a mask lets a query see, or why it is no range."""
        self._bounds: dict[fx.Node, fx.Node] = {}
        """Numbers of documents → where these begin and end."""

    def range_of(self, mask: fx.Node) -> Range:
        while mask in self._given:
            mask = self._given[mask].source
        if mask not in self._found:
            try:
                self._found[mask] = match_range(mask, self._graphs)
            except NotConstant as error:
                self._found[mask] = str(error)
        found = self._found[mask]
        if isinstance(found, str):
            raise Masked(found)
        return found

    def check_reachable(self, mask: fx.Node, seen: Range) -> None:
        """A call in a checkpointed region is given data in the place of its mask, which nothing else there reads."""
        if seen.data is not None and mask.graph is not seen.data.graph:
            given = self._given[mask]
            if given.source.graph is not seen.data.graph or len(mask.users) > 1:
                raise Masked(f"{_what(seen)}, but something else reads it in a checkpointed region")

    def data(self, mask: fx.Node, seen: Range) -> fx.Node | None:
        """Where documents begin and end, or which keys count, in the graph that ``mask`` stands in."""
        if seen.data is None:
            return None
        made = seen.data if seen.documents is None else self._bounds_of(seen.documents)
        if mask.graph is made.graph:
            return made
        call, position, _ = self._given[mask]
        call.update_arg(position, made)
        mask.meta["example_value"] = made.meta["example_value"]
        return mask

    def _bounds_of(self, documents: fx.Node) -> fx.Node:
        if documents not in self._bounds:
            numbers = value(documents)
            assert numbers is not None
            with private.as_fake_as(numbers):
                found = document_bounds(numbers)
            with documents.graph.inserting_after(documents):
                made = documents.graph.call_function(document_bounds, (documents,))
            made.meta["example_value"] = found
            self._bounds[documents] = made
        return self._bounds[documents]

    def erase_unused(self, graph: fx.Graph) -> None:
        """What made recognised masks in a graph, as far as nothing else takes it."""
        found = [each for each in self._found.values() if isinstance(each, Range)]
        for node in sorted(
            {source for each in found for source in each.made_from if source.graph is graph}, reverse=True
        ):
            if not node.users and node.op != "placeholder":
                graph.erase_node(node)


def _checkpoint_arguments(module: fx.GraphModule) -> dict[fx.Node, _Given]:
    """Input of a checkpointed region → what is given for it, where there is one call of the region."""
    given: dict[fx.Node, list[_Given | None]] = {}
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if private.calls_checkpointed(node) and isinstance(node.args[0], fx.Node):
                region = getattr(part, str(node.args[0].target))
                inputs = region.graph.find_nodes(op="placeholder")
                for position, (placeholder, source) in enumerate(zip(inputs, node.args[1:], strict=True), 1):
                    each = _Given(node, position, source) if isinstance(source, fx.Node) else None
                    given.setdefault(placeholder, []).append(each)
    return {placeholder: each[0] for placeholder, each in given.items() if len(each) == 1 and each[0] is not None}


# -- calls -----------------------------------------------------------------------------------------------------------


def _leave_mask_out(node: fx.Node, seen: Range) -> fx.Node:
    """Replace a call whose mask is causal, or hides nothing."""
    query, key, values, mask = (argument(node, i, name) for i, name in enumerate(_OPERANDS))
    _check_operands(node, (query, key, values), mask, square=seen.causal)
    scale = argument(node, 6, "scale")
    if seen.causal and scale is not None and not scale > 0:
        raise Masked(f"is causal, but scores are multiplied by {scale}: kernels without a mask make NaN of that")
    kwargs = {"dropout_p": argument(node, 4, "dropout_p", 0.0), **node.kwargs}
    kwargs |= {"attn_mask": None, "is_causal": seen.causal}
    kwargs = {name: given for name, given in kwargs.items() if name not in _OPERANDS[:3]}
    heads = heads_before_repetition(node, query, key, values)
    if heads is not None:
        try:
            new = _replace_plain(node, (query, *heads), {**kwargs, "enable_gqa": True}, fused=True)
        except Masked:  # no kernel takes them
            return _replace_plain(node, (query, key, values), kwargs)
        erase_repetition((key, values), heads)
        return new
    return _replace_plain(node, (query, key, values), kwargs)


def _check_wanted(node: fx.Node, seen: Range, context: PassContext) -> None:
    """A window, documents or padding: is there a kernel that takes the call?"""
    query = value(argument(node, 0, "query"))
    wanted = context.options.debug.window_attention
    what = _what(seen)
    if wanted is False:
        raise Masked(f"{what}: Debug(window_attention=False)")
    machine = context.hardware if context.planned_experts is not None else None
    planned = machine is not None and machine.capability is not None
    if query is None or (wanted is None and not runs_well(query, planned=planned)):
        raise Masked(f"{what}: there are kernels for that on CUDA, in half precision")
    if wanted is None and seen.key_mask is not None and seen.whole:
        raise Masked(f"{what} from queries that see all other keys: torch's kernels with a mask are as fast")
    if argument(node, 4, "dropout_p", 0.0) != 0.0:
        raise Masked(f"{what}, but the call has dropout")


def _what(seen: Range) -> str:
    if seen.documents is not None:
        return "separates documents"
    if seen.key_mask is not None:
        return "hides padding"
    return f"is a window of {seen.window}" + (f" and {seen.ahead} after it" if seen.ahead else "")


def _make_window(node: fx.Node, seen: Range, masks: _Masks) -> fx.Node:
    """Replace a call whose mask lets each query see a range of keys."""
    query, key, values, mask = (argument(node, i, name) for i, name in enumerate(_OPERANDS))
    _check_operands(node, (query, key, values), mask)
    heads = heads_before_repetition(node, query, key, values) or (key, values)
    tensors = [value(operand) for operand in (query, *heads)]
    expected = value(node)
    q, k, v = tensors
    assert expected is not None and q is not None and k is not None and v is not None
    of_query, of_key, of_value = (named_sizes(each.shape) for each in (q, k, v))
    alike = q.dim() == k.dim() == 4 and of_key == of_value and (of_query[0], of_query[3]) == (of_key[0], of_key[3])
    many, few = of_query[1], of_key[1]
    if not alike or not (isinstance(many, int) and isinstance(few, int) and many % few == 0):
        raise Masked("is a range of keys, but queries, keys and values differ in more than their heads")
    if not all(each.dtype == expected.dtype for each in (q, k, v)):
        raise Masked("is a range of keys, but queries, keys and values differ in more than their heads")
    if seen.data is not None and named_shape(mask)[0] != of_query[0]:
        raise Masked(f"{_what(seen)} in one row for all sequences")
    if any(private.chooses_attention(other) for other in node.graph.nodes):
        raise Masked("is a range of keys, but the model chooses its kernels for attention itself")
    masks.check_reachable(mask, seen)
    scale = argument(node, 6, "scale")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if not isinstance(scale, float):
        raise Masked(f"is a range of keys, but scores are multiplied by {scale}")
    data = masks.data(mask, seen)
    bounds, key_mask = (data, None) if seen.documents is not None else (None, data)
    is_open = bool(private.free_symbols(q.shape[2]))
    window = UNLIMITED if seen.window == seen.length and is_open else seen.window
    ahead = UNLIMITED if seen.ahead == seen.length - 1 and is_open else seen.ahead

    def compute(expected: torch.Tensor) -> torch.Tensor:
        return window_attention(q, k, v, value(bounds), value(key_mask), window, ahead, scale)

    made = _replace(node, window_attention, (query, *heads, bounds, key_mask, window, ahead, scale), {}, compute)
    if heads != (key, values):
        erase_repetition((key, values), heads)
    return made


def _replace_plain(node: fx.Node, operands: tuple[Any, ...], kwargs: dict[str, Any], *, fused: bool = False) -> fx.Node:
    """``fused``: only if torch has a kernel for the call, and does not compute it in steps."""

    def compute(expected: torch.Tensor) -> torch.Tensor:
        with _Kernel() as kernel:
            found = _computed(operands, kwargs, expected.dtype)
        if fused and not kernel.fused:
            raise Masked("is not needed, but without it no kernel takes the call")
        return found

    return _replace(node, F.scaled_dot_product_attention, operands, kwargs, compute)


def _replace(
    node: fx.Node,
    target: Callable[..., Any],
    operands: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> fx.Node:
    """Put another call in the place of ``node``. Its result lies in memory as that of ``node`` did: a view of it may
    depend on that. Where kernels differ in this, it is copied; mostly the model does so next, and finds it done.
    """
    expected = value(node)
    assert expected is not None
    with private.as_fake_as(expected), torch.set_grad_enabled(expected.requires_grad):
        found = compute(expected)
        if named_sizes(found.shape) != named_sizes(expected.shape) or found.dtype != expected.dtype:
            raise Masked("is recognised, but without it the result has another shape or dtype")
        copies: tuple[tuple[Any, ...], ...] = ()
        if named_sizes(found.stride()) != named_sizes(expected.stride()):
            copies = (("contiguous",),)
            if expected.dim() == 4 and expected.transpose(1, 2).is_contiguous():
                copies = (("transpose", 1, 2), *copies, ("transpose", 1, 2))
            elif not expected.is_contiguous():
                raise Masked("is recognised, but without it the result lies differently in memory")
        with node.graph.inserting_before(node):
            new = last = node.graph.call_function(target, operands, kwargs)
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
        raise Masked(f"is not needed, but torch refuses the call without it: {str(error).splitlines()[0]}") from error


class _Kernel(private.OperatorObserver):
    """Sees whether attention is one operator, as it is for torch's fused kernels, or computed in steps."""

    fused = False

    def before(self, operator: Any, args: Any, kwargs: Any) -> None:
        self.fused |= private.operator_name(operator).startswith("_scaled_dot_product")


_OPERANDS = ("query", "key", "value", "attn_mask")
_NUMBERS = ((4, "dropout_p"), (6, "scale"))


def _check_operands(node: fx.Node, operands: Iterable[Any], mask: fx.Node, *, square: bool = True) -> None:
    """``square``: whether it matters which key a query is next to."""
    if argument(node, 5, "is_causal", False) is not False or node.meta.get(TRANSFORMED):
        raise Masked("is not all that this call masks by")
    if not all(private.is_plain(value(operand)) for operand in (node, *operands)):
        raise Masked("belongs to tensors of a class of their own")
    if any(isinstance(argument(node, i, name), fx.Node) for i, name in _NUMBERS):
        raise Masked("comes with a rate of dropout or a scale that changes from call to call")
    query, key, _ = (named_shape(operand) for operand in operands)
    seen = named_shape(mask)
    for size, own in zip(seen[-2:], (query[-2], key[-2]), strict=True):
        if size != own and (square or size != 1):
            raise Masked("is not as long as queries and keys")
    if len(query) != len(shape(node)) or len(seen) > len(query):
        raise Masked("gives the result more dimensions than queries have")
    for size, own in zip(reversed(seen[:-2]), reversed(query[:-2]), strict=False):
        if size not in (1, own):
            raise Masked("gives the result another size than queries have")
