"""Writing layers that were not traced into the graph of a model's twin."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxshard import _compat
from fxshard.repetition.alike import VALUES, equal
from fxshard.repetition.stand_ins import Path, enter, forget, leave, pass_by
from fxshard.repetition.twins import Twins


class NotAlike(Exception):
    """What layers are called with or do differs, or cannot be told: trace all of them."""


def refill(module: fx.GraphModule, twins: Twins) -> int:
    """Write all layers into the graph of a twin; how many were not there. Raises :class:`NotAlike`.

    Their parameters become inputs of the graph. Dynamo, which is to call it, looks them up as it does others, in the
    twin.
    """
    marks = [node for node in module.graph.nodes if _is_mark(node)]
    if any(_is_mark(node) for inner in _inner_graphs(module) for node in inner.nodes):
        raise NotAlike("layers are called inside of another graph")
    if not marks:
        return 0
    forget(twins.token)
    more = _compat.does_more_than_compute()
    if more is not None:
        raise NotAlike(f"the model {more}")
    _Writing(module, twins).write()
    return sum(node.target is pass_by for node in marks)


def _is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (enter, leave, pass_by)


def _inner_graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for each in module.modules():
        if each is not module and isinstance(each, fx.GraphModule):
            yield each.graph


@dataclass(frozen=True)
class _Body:
    """A layer that was traced: the nodes between those that say where it begins and ends."""

    path: Path
    enter: fx.Node
    inside: tuple[fx.Node, ...]
    leave: fx.Node

    @property
    def given(self) -> dict[fx.Node, int]:
        """Which node is which of the tensors that it was called with."""
        return {user: int(user.args[1]) for user in self.enter.users}  # type: ignore[arg-type]

    @property
    def result(self) -> Any:
        return self.leave.args[2]


class _Writing:
    def __init__(self, module: fx.GraphModule, twins: Twins) -> None:
        self.module, self.graph, self.twins = module, module.graph, twins
        self.position: dict[fx.Node, tuple[int, int]] = {}
        """Where each input stands: behind which of the twin's, and as which of the new ones there."""
        self.input = {id(_compat.graph_input_example(node)): node for node in self.graph.find_nodes(op="placeholder")}
        self.last: fx.Node | None = None
        """The last input that was used so far."""
        self.bodies: dict[Path, list[_Body]] = {}
        self.places = {path: _places(layer) for path, layer in twins.leaders.items()}
        self.outside = {path: _tensors_outside(layer, twins.original) for path, layer in twins.leaders.items()}

    def write(self) -> None:
        for body in self._bodies():
            self.bodies.setdefault(body.path, []).append(body)
            _put_inputs_where_they_are_used(body)
        self.position = {node: (i, 0) for i, node in enumerate(self.graph.find_nodes(op="placeholder"))}
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target is pass_by:
                self._write_layer(node)
            self._use(node.all_input_nodes)
        for bodies in self.bodies.values():
            for body in bodies:
                _substitute(body.leave, body.result)
                _substitute(body.enter, body.enter.args[3:])
        self.graph.lint()
        self.module.recompile()

    def _bodies(self) -> Iterator[_Body]:
        begun: fx.Node | None = None
        inside: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is enter:
                begun, inside = node, []
            elif node.op == "call_function" and node.target is leave:
                if begun is None or begun.args[1] != node.args[1]:
                    raise NotAlike(f"{_said(node)} returns without having been called")
                body = _Body(node.args[1], begun, tuple(inside), node)
                _check(body)
                yield body
                begun = None
            elif begun is not None and node not in begun.users:
                inside.append(node)

    def _write_layer(self, call: fx.Node) -> None:
        """Write a layer in place of the node that it left."""
        path, leader, said, *tensors = _arguments(call)
        bodies = self.bodies.get(leader, ())
        body = next((each for each in bodies if _called_alike(each, said, tensors) and _returns(each, call)), None)
        if body is None:
            raise NotAlike(f"{_said(call)} is called with something else than {'.'.join(leader)}")
        env: dict[fx.Node, fx.Node] = {node: tensors[i] for node, i in body.given.items()}
        stack = _Moved(body.enter, call)
        for node in body.inside:
            for ref in node.all_input_nodes:
                if ref.op == "placeholder" and ref not in env:
                    env[ref] = self._input_like(ref, leader, path)
            with self.graph.inserting_before(call):
                env[node] = self.graph.node_copy(node, env.__getitem__)
            stack.move(env[node])
            self._use(env[node].all_input_nodes)
        _substitute(call, fx.map_arg(body.result, env.__getitem__))

    def _input_like(self, node: fx.Node, leader: Path, path: Path) -> fx.Node:
        """What a layer takes where its leader takes ``node``: its own parameter, or the same."""
        tensor = _compat.graph_input_example(node)
        found = self.places[leader].get(id(tensor))
        if found is None:
            return node
        inside, kind, name = found
        own: torch.Tensor = getattr(self.twins.followers[path].layer.get_submodule(inside), kind)[name]
        if own is tensor:
            return node
        if id(tensor) in self.outside[leader]:
            raise NotAlike(f"{node} belongs to {'.'.join(leader)} and to something else")
        if id(own) not in self.input:
            self.input[id(own)] = self._new_input(node, own, leader, path)
        return self.input[id(own)]

    def _new_input(self, like: fx.Node, tensor: torch.Tensor, leader: Path, path: Path) -> fx.Node:
        """An input behind those that were used so far, as if Dynamo had come here."""
        after = self.last or like
        with self.graph.inserting_after(after):
            node = _compat.another_input(like, tensor, leader, path[-1])
        if node is None:
            raise NotAlike(f"{like} was not found where it belongs")
        self.position[node] = (self.position[after][0], self.position[after][1] + 1)
        self._use([node])
        return node

    def _use(self, nodes: Sequence[fx.Node]) -> None:
        used = [node for node in nodes if node in self.position]
        if used:
            self.last = max([*used, *([self.last] if self.last is not None else [])], key=self.position.__getitem__)


def _tensors_outside(layer: nn.Module, model: nn.Module) -> set[int]:
    """The tensors of all modules but those of a layer."""
    own = set(layer.modules())
    modules = [module for module in model.modules() if module not in own]
    return {id(each) for module in modules for each in [*module._parameters.values(), *module._buffers.values()]}


def _places(layer: nn.Module) -> dict[int, tuple[str, str, str]]:
    """{identity of a tensor: submodule, ``_parameters`` or ``_buffers``, name}"""
    return {
        id(tensor): (inside, kind, name)
        for inside, module in layer.named_modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def _check(body: _Body) -> None:
    """Refuse what another layer's copy could not stand for."""
    if not _is_value(body.enter.args[2]):
        raise NotAlike(f"{_said(body.enter)} is called with something that it may write to")
    inside, given = set(body.inside), body.given
    met = set(given)
    for node in body.inside:
        if node.op in ("get_attr", "call_module") or _is_mark(node):
            raise NotAlike(f"{_said(body.enter)} has {node.op} {node.target}")
        for ref in node.all_input_nodes:
            if ref not in inside and ref not in given and ref.op != "placeholder":
                raise NotAlike(f"{_said(body.enter)} uses {ref}, which it was not given")
            met.add(ref)
        if any(user not in inside and user is not body.leave for user in node.users):
            raise NotAlike(f"{node} in {_said(body.enter)} is used behind it")
    tensors = [_value(node) for node in body.enter.args[3:]]
    returned: list[fx.Node] = []
    fx.map_arg(body.result, returned.append)
    results = [_value(node) for node in returned]
    if any(not isinstance(each, torch.Tensor) or _compat.free_symbols(each) for each in [*tensors, *results]):
        raise NotAlike(f"{_said(body.enter)} takes or returns something whose size is not known")
    memory = [_compat.memory_of(each) for each in results]
    before = {_compat.memory_of(value) for node in met - inside if isinstance(value := _value(node), torch.Tensor)}
    if len(set(memory)) < len(memory) or set(memory) & before or not inside.issuperset(returned):
        raise NotAlike(f"{_said(body.enter)} returns what was there before, or something twice")


def _put_inputs_where_they_are_used(body: _Body) -> None:
    """What the model and then a layer is called with, Dynamo has met when the layer was entered. Without a mark it
    would have met it where it is used, behind the parameters that are used there.
    """
    order = body.enter.graph.find_nodes(op="placeholder")
    for taken, i in body.given.items():
        given: fx.Node = body.enter.args[3 + i]  # type: ignore[assignment]
        if given.op != "placeholder" or next(iter(given.users)) is not body.enter:
            continue
        met: list[fx.Node] = []
        for node in body.inside:
            met += [ref for ref in node.all_input_nodes if ref.op == "placeholder"]
            if taken in node.all_input_nodes:
                break
        later = [ref for ref in met if order.index(ref) > order.index(given)]
        if later:
            max(later, key=order.index).append(given)


def _called_alike(body: _Body, said: Any, tensors: Sequence[fx.Node]) -> bool:
    own = body.enter.args[3:]
    return (
        equal(body.enter.args[2], said)
        and len(own) == len(tensors)
        and [own.index(node) for node in own] == [tensors.index(node) for node in tensors]
        and all(_kind(_value(a)) == _kind(_value(b)) for a, b in zip(own, tensors, strict=True))
    )


def _returns(body: _Body, call: fx.Node) -> bool:
    """Whether what Dynamo was told that a layer returns is what ``body`` returns; its leader may have been called again
    in between with something else.
    """
    told, real = (
        [_kind(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(_value(node))]
        for node in (call, body.leave)
    )
    return equal(told, real)


def _is_value(said: Any) -> bool:
    return all(map(_is_value, said)) if type(said) is tuple else isinstance(said, (*VALUES, fx.Node))


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    shape = (tuple(value.shape), value.stride(), value.storage_offset())
    return type(value), *shape, value.dtype, value.device, value.layout, value.requires_grad


def _arguments(mark: fx.Node) -> tuple[Any, ...]:
    """What a mark says, but for the token."""
    return mark.args[1:]


def _said(mark: fx.Node) -> str:
    return ".".join(mark.args[1])  # type: ignore[arg-type]


def _substitute(node: fx.Node, value: Any) -> None:
    """Let all users of a node use ``value``, a node or a tuple of them, and remove it."""
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
    elif node.users:
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise NotAlike(f"{user} uses all of what {node} is")
            _substitute(user, value[user.args[1]])
    node.graph.erase_node(node)


class _Moved:
    """Notes at nodes that are copied from one layer to another in which modules they stand."""

    def __init__(self, enter: fx.Node, call: fx.Node) -> None:
        self._from, self._to = _innermost(enter), _innermost(call)

    def move(self, node: fx.Node) -> None:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                f"{key} {self._to}": (self._path(path), kind) for key, (path, kind) in stack.items()
            }

    def _path(self, path: str) -> str:
        inside = path.removeprefix(self._from)
        return self._to + inside if path != inside and inside[:1] in ("", ".") else path


def _innermost(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(list(stack.values())[-1][0])
