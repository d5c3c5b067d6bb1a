"""Masks of any size: at which size to compute one, and whether that says what it is at all others.

Where a size is open, as after the first batch of another length, a mask cannot be compared at every size. It is
computed at one that is larger than all numbers in what makes it, under these conditions:

- sizes are lengths only: ends of ``arange``, sizes of new tensors, expansions and views, ends of slices. None is added,
  compared or multiplied, and nothing counts from the end;
- every tensor of whole numbers is ``c ± i ± j`` for indices ``i`` and ``j``, which is looked at when it is computed. A
  table of another form, such as numbers of chunks, is refused; so is one of less than 32 bits, in which the numbers of
  a longer row would wrap around;
- what is true or false compares such numbers with each other, or the distance ``|c ± i ± j|`` with a constant, and is
  combined element by element;
- nothing differs along more than two dimensions.

Then an element of the mask depends on which sides of some lines the point (i, j) lies on, ``a·i + b·j = c`` where
``a`` and ``b`` are at most 2. Two such lines meet below twice the sum of their ``c``, so that every case that there is
at any size occurs there. That is mostly less than twice the sum of all constants: a window of 1024 shows at 2,100
tokens, whatever was traced. Constants may also be added to themselves: ``c`` of each line is looked at, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch import private

_SIZED = ("expand", "view", "reshape", "new_ones", "new_zeros", "new_full", "ones", "zeros", "full")
"""Calls that take sizes. What comes after those of ``full`` and ``new_full`` is a value."""
_ELEMENTWISE = frozenset(
    (
        *("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_ones", "new_zeros"),
        *("arange", "eye", "scalar_tensor", "lift_fresh", "_to_copy", "clone", "detach", "alias"),
        *("expand", "unsqueeze", "squeeze", "slice", "select", "permute", "transpose", "t", "index"),
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "tril", "triu"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
    )
)
"""What is true or false after these depends on the same indices as before."""
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_ON_NUMBERS = frozenset(("add", "sub", "rsub", "neg", "cumsum", "cat", "view", "_unsafe_view", "repeat"))
"""Of these it is looked at what they give: numbers of the form above, or the same everywhere."""


def is_open_size(node: fx.Node) -> bool:
    """An input that is a size, and no more than that: not one computed from others."""
    size = node.meta.get("example_value")
    return node.op == "placeholder" and isinstance(size, torch.SymInt) and str(size).isidentifier()


def computed_sizes(sources: Sequence[fx.Node]) -> tuple[dict[fx.Node, int], str | None]:
    """The sizes at which to compute the last of ``sources``, or why that would not say what it is at others."""
    opened = [node for node in sources if is_open_size(node)]
    for node in sources:
        if node not in opened and (reason := _other_use(node, opened)) is not None:
            return {}, reason
    base = _size_for(sum(_constants(source.args) + _constants(source.kwargs) for source in sources))
    return {node: base + 5 * i for i, node in enumerate(opened)}, None  # different ones: a mask may not be square


def shape_at(tensor: torch.Tensor, sizes: dict[fx.Node, int]) -> tuple[int, ...] | None:
    """The shape of a tensor at these sizes; None if it has another one that is open."""
    known = {str(node.meta["example_value"]): size for node, size in sizes.items()}
    shape = [known.get(size) if isinstance(size, str) else size for size in map(private.size_name, tensor.shape)]
    return None if None in shape else tuple(shape)  # type: ignore[arg-type]


def check_lines(distances: Sequence[int], sizes: dict[fx.Node, int]) -> str | None:
    """Why sizes do not say what there is where lines meet, of which these are the ``c``."""
    if _size_for(sum(sorted(distances)[-2:])) > min(sizes.values()):
        return f"compares positions with numbers that constants add up to, such as {max(distances)}, with an open size"
    return None


def _size_for(constants: int) -> int:
    return 2 * (8 + constants)


def _other_use(node: fx.Node, opened: Iterable[fx.Node]) -> str | None:
    """What a call does with open sizes, if it is not to take them as lengths."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    given = [*node.args, *node.kwargs.values()]
    if name == "getitem":
        index: tuple[Any, ...] = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        given = [begin for each in index for begin in ((each.start, each.step) if isinstance(each, slice) else (each,))]
        ends = [each.stop for each in index if isinstance(each, slice)]
        if any(isinstance(each, int) and each < 0 for each in (*given, *ends)):
            return f"depends on {node.name}, which counts from the end of an open size"
    elif name == "arange":
        lengths = node.args[:1] if len(node.args) == 1 else node.args[1:2]
        started = len(node.args) < 2 or (isinstance(node.args[0], int) and node.args[0] >= 0)
        given = [] if started and len(node.args) < 3 and lengths else given
    elif name in _SIZED:
        values = node.args[2 if node.op == "call_method" else 1 :]
        given = [*values, *node.kwargs.values()] if name.endswith("full") else []
    return f"depends on {node.name}, which computes with an open size" if _mentions(given, opened) else None


def _mentions(given: Any, nodes: Iterable[fx.Node]) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(tuple(given), found.append)  # type: ignore[arg-type]
    return any(node in found for node in nodes)


def _constants(given: Any) -> int:
    """The sum of the sizes of all numbers among arguments."""
    if isinstance(given, slice):
        return _constants((given.start, given.stop, given.step))
    if isinstance(given, dict):
        return _constants(tuple(given.values()))
    if isinstance(given, (tuple, list)):
        return sum(map(_constants, given))
    if isinstance(given, float) and not abs(given) < 1e30:
        return 0  # -inf, or the lowest number there is: no position is compared with these
    return int(abs(given)) + 1 if isinstance(given, int | float) else 0


def why_not_everywhere(name: str, args: Sequence[Any], result: Any) -> str | None:
    """What makes the result of an ATen operator depend on the size at which it was computed; None if nothing does."""
    if name == "abs" and _is_table(args[0]):
        return None  # a distance: nothing but a comparison takes it
    if name not in _ELEMENTWISE and name not in _ON_NUMBERS:
        return f"is computed by {name} with an open size"
    if name in ("slice", "select") and any(isinstance(each, int) and each < 0 for each in args[2:3]):
        return f"is computed by {name} from the end of an open size"
    if name == "slice" and len(args) > 4 and args[4] != 1:
        return "is computed by slice with steps, with an open size"
    if name == "arange" and len(args) > 2 and args[2] != 1:
        return "is computed by arange with steps, with an open size"
    if name == "index" and not all(_is_table(each) and bool((each >= 0).all()) for each in args[1] if each is not None):
        return "is computed by index with an open size"
    if name in _COMPARISONS and not _are_comparable(args):
        return f"is computed by {name} with an open size, of a distance and what is no constant"
    if not isinstance(result, torch.Tensor) or not result.numel() or _is_uniform(result):
        return None
    if name in ("view", "_unsafe_view") and _long(args[0]) == _long(result):
        return None  # dimensions of one come or go
    if result.is_floating_point():
        known = (result == 0) | (result == 1) | (result == -torch.inf) | (result == torch.finfo(result.dtype).min)
        formed = name in _ELEMENTWISE and bool(known.all())
    elif result.dtype == torch.bool:
        formed = name in _ELEMENTWISE
    else:
        formed = result.dtype in (torch.int32, torch.int64) and _is_table(result)
    formed = formed and sum(_varies(result, dim) for dim in range(result.dim())) <= 2
    return None if formed else f"is computed by {name} with an open size, and takes another form at each"


def line(name: str, args: Sequence[Any], result: Any) -> int:
    """``c`` of the lines at which the result of an ATen operator changes between true and false, at most."""
    if name in ("tril", "triu"):
        return abs(args[1]) if len(args) > 1 else 0
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dtype != torch.bool and each.numel()]
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bool or not tensors:
        return 0
    numbers = [each for each in args if isinstance(each, int | float)]
    first = [each for each in (*(each.flatten()[0].item() for each in tensors), *numbers) if abs(each) < 1e30]
    if len(tensors) == len(first) == 2 and all(map(_is_table, tensors)):
        return abs(int(first[0] - first[1]))
    return sum(int(abs(each)) for each in first)


def _long(tensor: torch.Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _varies(tensor: torch.Tensor, dim: int) -> bool:
    """Whether elements along a dimension differ."""
    return tensor.shape[dim] > 1 and tensor.stride(dim) != 0 and bool((tensor != tensor.narrow(dim, 0, 1)).any())


def _is_uniform(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _are_comparable(operands: Sequence[Any]) -> bool:
    """Whether none of them is a distance, or all others are constants."""
    varying = [each for each in operands if isinstance(each, torch.Tensor) and each.numel() and not _is_uniform(each)]
    whole = [each for each in varying if each.dtype != torch.bool and not each.is_floating_point()]
    return len(varying) < 2 or all(map(_is_table, whole))


def _is_table(numbers: torch.Tensor) -> bool:
    """Whether whole numbers are a constant plus or minus some of their indices."""
    if numbers.dtype == torch.bool or numbers.is_floating_point():
        return False
    first = numbers[(0,) * numbers.dim()]
    expected = first.clone()
    for dim, size in enumerate(numbers.shape):
        if size > 1:
            step = numbers[tuple(int(d == dim) for d in range(numbers.dim()))] - first
            if abs(int(step)) > 1:
                return False
            expected = expected + step * torch.arange(size).view(-1, *[1] * (numbers.dim() - dim - 1))
    return bool((numbers == expected).all())
