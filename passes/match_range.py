"""Which keys a mask lets a query see, where that is a range around its own or up to it: all of them, a window, or its
document's; without those that are padding. Or every key there is: a mask that hides nothing.

What depends on numbers alone is computed and compared, element by element. Documents of packed rows depend on data; of
these the mask must say that two tokens have the same number, and the numbers must be such as never fall along a row:
counted up by ``cumsum`` of something that is true or false. Then the tokens before a query that have its number are a
range, and what is between two documents is never seen. Padding depends on data, too; a term of the mask that has one
value for all queries says which keys count, however it is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard._torch import private
from fxshard.kernels.window_op import UNLIMITED
from fxshard.passes.calls import argument, call, named_shape, named_sizes, shape, value
from fxshard.passes.constant_values import NotConstant, check_unwritten, constant_sources, constant_value
from fxshard.passes.open_sizes import is_open_size


@dataclass(frozen=True)
class Range:
    """The keys that a mask lets a query see: at most ``window``, its own the last, and ``ahead`` after it."""

    window: int
    ahead: int
    length: int
    documents: fx.Node | None = None
    """The number of each token's document, where a query sees its own document only."""
    key_mask: fx.Node | None = None
    """[batch, 1, 1, length], where keys are hidden from all queries: padding."""
    made_from: tuple[fx.Node, ...] = field(default=(), repr=False)
    """What made the mask and nothing else, as far as nothing else reads it."""
    hides_nothing: bool = False
    """Whether every query sees every key, also those after its own."""

    @property
    def causal(self) -> bool:
        return self.data is None and self.window == self.length and self.ahead == 0 and not self.hides_nothing

    @property
    def whole(self) -> bool:
        """Whether every query sees every key, but for what depends on data."""
        return self.window == self.length and self.ahead == self.length - 1

    @property
    def data(self) -> fx.Node | None:
        """What the mask depends on besides numbers."""
        return self.documents if self.documents is not None else self.key_mask


def match_range(mask: fx.Node, graphs: Sequence[fx.Graph]) -> Range:
    """What ``mask`` lets a query see; :class:`NotConstant` says why it is no such range."""
    try:
        sources = constant_sources(mask)
    except NotConstant as reason:
        return _of_data(mask, graphs, reason)
    found = constant_value(mask, graphs)
    if found.dim() > 1 and hides_nothing(found):
        length = found.shape[-1]
        return Range(length, length - 1, length, made_from=tuple(sources), hides_nothing=True)
    return Range(*window_of(found), found.shape[-1], made_from=tuple(sources))


def hides_nothing(mask: torch.Tensor) -> bool:
    """Whether a mask is true everywhere, or adds 0 to all scores."""
    with private.as_a_compiler():
        return bool((mask if mask.dtype == torch.bool else mask == 0).all()) and mask.numel() > 0


def window_of(mask: torch.Tensor) -> tuple[int, int]:
    """How many keys up to its own a mask lets each query see, and how many after it, if it sees all of these."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        raise NotConstant(f"is not square: {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise NotConstant(f"holds {mask.dtype}")
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # the same memory again
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    with private.as_a_compiler():
        seen = mask if mask.dtype == torch.bool else mask == 0
        if not mask.numel() or not (mask.dtype == torch.bool or torch.equal(~seen, mask == -torch.inf)):
            raise NotConstant("is not causal")
        one = seen.flatten(0, -3)[0] if mask.dim() > 2 else seen
        window, ahead = int(one[-1].sum()), int(one[0].sum()) - 1
        expected = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(ahead)
        expected &= ~expected.tril(-window)
        if not window or ahead < 0 or not torch.equal(seen, expected.expand_as(seen)):
            raise NotConstant("is not causal")
    return window, ahead


# -- data ------------------------------------------------------------------------------------------------------------


def _of_data(mask: fx.Node, graphs: Sequence[fx.Graph], reason: NotConstant) -> Range:
    """A mask that is true where numbers and one term of data say so, documents or padding; else ``reason`` stands."""
    between: list[fx.Node] = []
    fixed, of_data = [], []
    for term in _terms(mask, between):
        try:
            constant_sources(term)
        except NotConstant:
            of_data.append(term)
        else:
            fixed.append(term)
    sizes = named_shape(mask)
    if len(of_data) != 1 or len(sizes) < 2:
        raise reason
    (term,) = of_data
    queries, keys = sizes[-2:]
    key_mask = term if _hides_keys(term) and named_shape(term) == (sizes[0], 1, 1, keys) else None
    documents = _documents(term, graphs, between) if key_mask is None else None
    if queries != keys or (key_mask is None and (documents is None or named_shape(documents) != (sizes[0], keys))):
        raise reason
    check_unwritten(between if documents is None else [*between, documents], graphs)
    sources = sorted({source for term in fixed for source in constant_sources(term)})
    found = _of_numbers(fixed, sources, graphs, (queries, keys))
    if found is None:
        raise reason
    window, ahead, length = found
    made_from = {*between, *sources} - {key_mask}
    return Range(window, ahead, length, documents, key_mask, tuple(made_from))


def _of_numbers(
    terms: list[fx.Node], sources: list[fx.Node], graphs: Sequence[fx.Graph], sizes: tuple[int | str, int | str]
) -> tuple[int, int, int] | None:
    """The window of those terms of a mask that depend on numbers alone, and the length that it was found at."""
    seen = torch.ones((), dtype=torch.bool)
    with private.as_a_compiler():
        for term in terms:
            seen = seen & constant_value(term, graphs, sources)
    if hides_nothing(seen):
        length = sizes[1] if isinstance(sizes[1], int) else UNLIMITED
        return length, length - 1, length
    shapes = [shape for shape in map(named_shape, terms) if len(shape) > 1]
    if any({shape[dim] for shape in shapes} - {1} != {size} for dim, size in zip((-2, -1), sizes, strict=True)):
        return None
    return (*window_of(seen), seen.shape[-1])


def _hides_keys(term: fx.Node) -> bool:
    found = value(term)
    return found is not None and found.dtype == torch.bool and private.is_plain(found)


_AND = (operator.and_, torch.logical_and, torch.bitwise_and, "__and__", "logical_and", "bitwise_and")
_EQUAL = (operator.eq, torch.eq, "eq", "__eq__")


def _terms(node: fx.Node, between: list[fx.Node]) -> Iterable[fx.Node]:
    """What must be true for ``node`` to be; ``between`` gets the nodes on the way, the last included."""
    between.append(node)
    inputs = [arg for arg in node.args if isinstance(arg, fx.Node) and not is_open_size(arg)]
    bools = all((found := value(arg)) is not None and found.dtype == torch.bool for arg in (node, *inputs))
    if bools and node.target in _AND and len(node.args) == len(inputs) == 2 and not node.kwargs:
        for part in inputs:
            yield from _terms(part, between)
    elif bools and node.op == "call_method" and node.target in ("to", "expand") and len(inputs) == 1:
        yield from _terms(inputs[0], between)
    else:
        yield node


def _documents(node: fx.Node, graphs: Sequence[fx.Graph], between: list[fx.Node]) -> fx.Node | None:
    """The numbers of documents that ``node`` compares, of every query with every key: [batch, length]."""
    if node.target not in _EQUAL or len(node.args) != 2 or node.kwargs:
        return None
    sides: Any = node.args
    if not all(isinstance(side, fx.Node) and side.target is operator.getitem for side in sides):
        return None
    numbers = sides[0].args[0]
    found = value(numbers)
    if sides[1].args[0] is not numbers or found is None or not _never_falls(numbers):
        return None
    batch, length = named_sizes(found.shape)
    indices = [side.args[1] for side in sides]
    if not all(isinstance(index, tuple) and len(index) == 2 for index in indices):
        return None
    rows = (batch, 1, 1, 1)
    ways = ((1, 1, length, 1), (1, 1, 1, length))
    for first, second in (ways, ways[::-1]):
        pairs = [(indices[0], first), (indices[1], second)]
        if all(_indexes(index, (rows, way), graphs, between) for index, way in pairs):
            between.extend(sides)
            return numbers  # type: ignore[no-any-return]
    return None


def _indexes(
    index: tuple[Any, ...],
    shapes: tuple[tuple[int | str, ...], ...],
    graphs: Sequence[fx.Graph],
    between: list[fx.Node],
) -> bool:
    """Whether tensors of indices are 0, 1, 2, …, in these shapes."""
    for given, wanted in zip(index, shapes, strict=True):
        if not isinstance(given, fx.Node) or named_shape(given) != wanted:
            return False
        try:
            found = constant_value(given, graphs)
        except NotConstant:
            return False
        if not torch.equal(found.flatten(), torch.arange(found.numel())):
            return False
    between.extend(source for given in index for source in constant_sources(given))
    return True


def _never_falls(node: Any) -> bool:
    """Whether the numbers of a matrix never fall along a row: they count what is true."""
    if call(node) != "cumsum" or len(shape(node)) != 2 or argument(node, 2, "dtype") is not None:
        return False
    counted = value(node.args[0])
    return counted is not None and counted.dtype == torch.bool and argument(node, 1, "dim") in (-1, 1)
