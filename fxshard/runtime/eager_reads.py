"""Parameters that code between two graphs reads: unsharded when it does, and their gradients reduced after autograd.

Dynamo leaves code that it cannot trace to Python. Between calls a parameter has no memory, and reading it there would
read freed memory. While a model with graph breaks runs, every operation outside a graph is therefore looked at first.

An extension that is given the address of a parameter is no operation of torch's. Modules whose forward Dynamo was told
to leave alone, as those of Transformer Engine are, may call one: their parameters are unsharded before each forward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.runtime.bucket import Bucket
from fxshard.runtime.engine import Engine
from fxshard.runtime.hollow import hollow_like, is_hollow

Place = tuple[int, int]
"""A parameter as (bucket, position in it)."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class EagerReads(private.OperatorObserver):
    """A context in which operations on hollow parameters find them unsharded.

    The bucket of a parameter that is read gets memory of its own, outside the arena, because autograd keeps what it
    saved until backward. It stays until a forward finds that the shard has changed. Gradients reach such a parameter
    through autograd; each is averaged over the ranks and added to what the graphs reduced.
    """

    def __init__(self, engine: Engine, hollow: dict[Place, nn.Parameter], model: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        """{parameter: file and line of the code that read it first}"""
        self._engine = engine
        self._hollow = hollow
        self._place = {id(parameter): place for place, parameter in hollow.items()}
        self._copies: dict[int, tuple[torch.Tensor, Place]] = {}
        self._filled: dict[int, int] = {}  # {bucket: version of the shard that was gathered}
        self._hooked: set[int] = set()
        self._left_alone = {
            self._place[id(parameter)]: f"{type(module).__name__}.forward, which Dynamo leaves alone"
            for module in model.modules()
            if private.leaves_alone(module.forward)
            for parameter in module.parameters()
            if id(parameter) in self._place
        }

    def __enter__(self) -> EagerReads:
        for index, version in list(self._filled.items()):
            if self._engine.buckets[index].version != version:
                self._empty(index)
        self._engine.reuses(self._filled)
        for place, where in self._left_alone.items():
            self._fill(place, where)
        self._engine.observed = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._engine.observed = False
        self._copies.clear()

    def before(self, operator: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Called ahead of each operation that runs outside a graph."""
        self._refuse_writes(operator, args, kwargs)
        for value in tree_leaves((args, kwargs)):
            if type(value) not in (torch.Tensor, nn.Parameter):
                continue
            place = self._place.get(id(value))
            if not is_hollow(value):
                if place is not None and operator is not torch.ops.aten.detach.default:
                    self._note(place)  # it was filled with others of its bucket
            else:
                place = place or self._copies.get(id(value), (None, None))[1]
                if place is None:
                    raise StateError(
                        f"{user_code()}: code outside the captured graphs applies {operator} to the memory of "
                        "a sharded parameter through .data or a view; use the parameter itself, or move the code "
                        "into the graph"
                    )
                if operator is torch.ops.aten.detach.default:  # looks at no memory; torch itself does this to inputs
                    return partial(self._remember, place)
                self._fill(place)
                if value is not self._hollow[place]:
                    value.data = self._hollow[place].data
        return None

    def _refuse_writes(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Raise if a parameter is written: that is a gathered copy, or none yet, and the shards would not change."""
        for value in tree_leaves(private.written_arguments(operator, args, kwargs) or []):
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            filled = {private.memory_of(self._hollow[index, 0]): (index, 0) for index in self._filled}
            place = self._place.get(id(value)) or self._copies.get(id(value), (None, None))[1]
            place = place or filled.get(private.memory_of(value))
            if place is not None:
                name = self._engine.buckets[place[0]].plan.params[place[1]]
                raise StateError(
                    f"{user_code()}: {private.operator_name(operator)} changes {name!r}, or what is gathered with it, "
                    "inside of forward, where parameters are copies of what the ranks hold: change it outside "
                    "of forward, below torch.no_grad(), or make it a buffer"
                )

    def _remember(self, place: Place, result: torch.Tensor) -> None:
        self._copies[id(result)] = (result, place)

    def _note(self, place: Place, where: str | None = None) -> None:
        plan = self._engine.buckets[place[0]].plan
        name = plan.params[place[1]]
        if plan.quantized:  # Python would multiply in bf16 what was chosen for less
            policy = "MXFP8" if plan.float8 is None else "Float8"
            raise StateError(
                f"{where or user_code()}: {name!r} is to run in {policy}, but code between graphs reads it, where "
                "nothing is quantized: mend the graph break, or add it to "
                f"{policy}(exclude=(..., {name.removesuffix('.weight')!r}))"
            )
        if name not in self.places:
            self.places[name] = where or user_code()

    def _fill(self, place: Place, where: str | None = None) -> None:
        index, _ = place
        bucket = self._engine.buckets[index]
        self._note(place, where)
        if is_hollow(self._hollow[place]):
            views = self._engine.unsharded(index)
            for i, view in enumerate(views):
                self._hollow[index, i].data = view
        self._filled[index] = bucket.version
        if index not in self._hooked:
            self._hooked.add(index)
            self._follow(index, bucket)

    def _follow(self, index: int, bucket: Bucket) -> None:
        """See changes of the shard, and gradients, from now on."""
        bucket.counts_steps = True
        if bucket.plan.trainable:
            for i in range(len(bucket.params)):
                self._hollow[index, i].register_post_accumulate_grad_hook(partial(_collect, self._engine, (index, i)))

    def _empty(self, index: int) -> None:
        for i in range(len(self._engine.buckets[index].params)):
            hollow = self._hollow[index, i]
            hollow.data = hollow_like(hollow)
        del self._filled[index]


def unseen_read(error: RuntimeError, model: nn.Module) -> StateError | None:
    """What to say where code between graphs was stopped at the address of a hollow parameter; None: it was not that."""
    if "Cannot access data pointer of Tensor" not in str(error):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "the model", error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        module = frame.f_locals.get("self")
        if id(module) in names:
            found = f"{type(module).__name__} {names[id(module)]!r} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return StateError(
        f"{found}: code between graphs took the address of a sharded parameter, which has no memory there. fxshard "
        "gathers what operations of torch read, and cannot see an extension or numpy. Before fxshard.compile, set "
        "module.forward = torch.compiler.disable(module.forward) for such modules: the parameters of a module that "
        "Dynamo leaves alone are gathered before each forward"
    )


def _collect(engine: Engine, place: Place, parameter: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        engine.gradients.add_gradient(*place, gradient)


def user_code() -> str:
    """File and line of the innermost caller that belongs neither to torch nor to fxshard."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown code"
