"""One bucket in this rank's memory: its shard, its gradient, and the parameters users see."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from fxshard._torch import private
from fxshard.planner.bucket_plan import BucketPlan
from fxshard.planner.float8_copies import Float8Copies
from fxshard.planner.gathered import RestingCopies
from fxshard.planner.layout import Fragment
from fxshard.planner.parts import row_offsets
from fxshard.planner.state import state_shape
from fxshard.runtime.channels import Channels
from fxshard.runtime.home import Home
from fxshard.runtime.optimizer_steps import guard, mark
from fxshard.runtime.parameter_methods import FullTensor, Hook, RefusedHook, RegisterAfterAccumulation
from fxshard.runtime.rows import rows_of
from fxshard.runtime.uneven_rows import Cut, tell_gradient, uneven


def _nothing() -> None:
    pass


class Bucket:
    """Flat memory and the views of it.

    ``master`` is this rank's shard, what the optimizer updates. ``full`` exists only where unsharded parameters are
    resident; a master of the compute dtype is then a slice of it. ``copies`` are the quantized parameters at rest,
    where they are quantized. ``grad`` is the reduced gradient of the shard: it exists from the backward that needs it
    until forward finds that nothing holds its gradients any more, so that it shares memory with activations.
    ``grad_full`` exists only where full gradients are kept (ZeRO-1).
    """

    def __init__(self, plan: BucketPlan, channels: Channels, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.channels = channels
        self.mesh = channels.mesh
        self.tensor = channels.tensor
        layout = plan.layout
        self.rank = channels.shard if layout.ranks > 1 else 0
        begin = self.rank * layout.shard_numel
        holds_full = plan.resident and not plan.rests_quantized
        self.full = self._empty(layout.numel, plan.param_dtype) if holds_full else None
        self.copies: RestingCopies | Float8Copies | None = None
        if plan.rests_quantized:
            kind = RestingCopies if plan.float8 is None else Float8Copies
            self.copies = kind(plan, self.rank, device)
        if self.full is not None and plan.master_dtype == plan.param_dtype:
            self.master = self.full[begin : begin + layout.shard_numel]
        else:
            self.master = self._empty(layout.shard_numel, plan.master_dtype)
        self.grad: torch.Tensor | None = None
        self.home: Home | None = None
        """Where the gradient lives once a captured program writes it."""
        self.kept: torch.Tensor | None = None
        """Full gradients of this rank's own micro-batches inside ``no_sync``, not reduced yet."""
        self.kept_for: frozenset[int] = frozenset()
        """The parameters, by position, that those micro-batches used."""
        self.discarded = False
        """Whether the last backward was for gradients of inputs alone."""
        self.steps = 0
        """Steps of optimizers over its parameters, and checkpoints and state dicts that were loaded into them."""
        self.counts_steps = plan.resident
        """Whether steps of optimizers that gather what they change themselves count as changes, too."""
        keeps_full = plan.trainable and layout.ranks > 1 and not plan.placement.grad
        self.grad_full = self._empty(layout.numel, plan.reduce_dtype) if keeps_full else None
        self.fragments = layout.fragments(self.rank)
        self.gaps = layout.gaps()
        self.params: list[nn.Parameter] = []
        self.grads: list[torch.Tensor] = []
        self.hooks: dict[int, dict[int, Hook]] = {}
        """What to call once parameters, by position, have their gradients."""
        self._wrappers: dict[tuple[str, torch.Size], tuple[private.UnevenDTensor, Cut | None]] = {}
        """What makes a DTensor of a parameter's rows, or of a number for each row, and how they are cut, if that is not
        as torch cuts them."""
        self._handed_out: dict[str, torch.Tensor] = {}
        """What state dicts hold of the shard, kept to see what is written through them."""
        self.gathered_version = -1
        """The shard's version when it was last gathered."""

    # -- filling -----------------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's rows out of full parameters; of tensor-parallel ones, out of this rank's parts."""
        if not values.keys() & self.plan.layout.index.keys():
            return
        self.changed()
        with torch.no_grad():
            for fragment in self.fragments:
                if fragment.numel and fragment.name in values:
                    self.local(fragment.name).copy_(self.rows(fragment.name, values[fragment.name]))

    def make_params(self, originals: Mapping[str, nn.Parameter]) -> None:
        """The parameters users see: sharded over the mesh, plain tensors where there is none."""
        for fragment in self.fragments:
            original = originals[fragment.name]
            parameter = nn.Parameter(self.as_param(self.master, fragment.name), original.requires_grad)
            parameter.__dict__.update(original.__dict__)
            part = self.tensor is not None and self.tensor.pieces[fragment.name].dim is not None
            if self.mesh is not None and (self.plan.layout.ranks > 1 or part):
                parameter.full_tensor = FullTensor(self, fragment.name)  # type: ignore[attr-defined]
                mark(parameter)
                if parameter.requires_grad:
                    torch.Tensor.register_post_accumulate_grad_hook(parameter, tell_gradient)
            hooks = RegisterAfterAccumulation(self, len(self.params))
            parameter.register_post_accumulate_grad_hook = hooks  # type: ignore[method-assign]
            parameter.register_hook = RefusedHook(fragment.name)  # type: ignore[method-assign]
            self.params.append(parameter)
            guard(parameter, self)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        return zip(self.plan.params, self.params, strict=True)

    def fragment(self, name: str) -> Fragment:
        """Which rows of a parameter this rank has."""
        return self.fragments[self.plan.layout.index[name]]

    # -- views -------------------------------------------------------------------------------------------------------

    def local(self, name: str) -> torch.Tensor:
        """This rank's rows of a parameter's master."""
        return self.as_rows(self.master, name)

    def as_rows(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's rows of a parameter in a flat shard."""
        return self.shaped(self.flat_part(flat, name), name)

    def as_param(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter-shaped tensor (a DTensor where there is a mesh) over this rank's rows in a flat shard."""
        return self.wrap(self.flat_part(flat, name), name)

    def wrap(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's elements of a parameter, wherever they lie, as a parameter-shaped tensor."""
        local = self.shaped(part, name)
        return local if self.mesh is None else self._wrapped(local, name)

    def _wrapped(self, local: torch.Tensor, name: str, field: str = "", all_rows: bool = True) -> torch.Tensor:
        assert self.mesh is not None
        tensor = self.tensor if self.tensor is not None and name in self.tensor.placed else None
        mesh = self.mesh if tensor is None else tensor.mesh
        shape = torch.Size(state_shape(field, self.shape(name)))
        if (name, shape) not in self._wrappers:
            make = private.UnevenDTensor(
                local,
                mesh,
                shape,
                sharded=self.plan.layout.ranks > 1,
                tensor_parallel=tensor is not None,
                tensor_dim=tensor.pieces[name].dim if tensor is not None else None,
            )
            self._wrappers[name, shape] = make, self._cut(name, mesh.ndim - (1 if tensor is None else 2))
        make, cut = self._wrappers[name, shape]
        if cut is None:
            return make(local)
        return uneven(make(local), cut if all_rows else replace(cut, counts=None))

    def _cut(self, name: str, along: int) -> Cut | None:
        """How the rows of a parameter are cut along a dimension of the mesh; None: as ``torch.chunk`` would do it."""
        layout = self.plan.layout
        if not layout.spec(name).shape:
            return None
        counts = tuple(layout.fragment(rank, name).rows for rank in range(layout.ranks))
        even = math.ceil(sum(counts) / layout.ranks)
        chunks = tuple(min(even, max(sum(counts) - rank * even, 0)) for rank in range(layout.ranks))
        return None if counts == chunks else Cut(counts, along, self.offsets(name))

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter."""
        if self.tensor is not None:
            return torch.Size(self.tensor.pieces[name].shape)
        return torch.Size(self.plan.layout.spec(name).shape)

    def offsets(self, name: str, fragment: Fragment | None = None) -> tuple[int, ...]:
        """Where in the whole parameter this rank's rows begin, or those of ``fragment``."""
        row = (fragment or self.fragment(name)).row_start
        return row_offsets(self.shape(name), row) if self.tensor is None else self.tensor.pieces[name].offsets(row)

    def rows(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what all shards of a parameter make; a view."""
        fragment = self.fragment(name)
        return part[fragment.row_start : fragment.row_stop] if part.ndim else part

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What a whole tensor, shaped like a parameter, has for this tensor-parallel rank; a view."""
        return whole if self.tensor is None else self.tensor.pieces[name].of(whole)

    def as_state(
        self,
        part: torch.Tensor,
        name: str,
        written: Callable[[], None] = _nothing,
        fragment: Fragment | None = None,
        field: str = "",
    ) -> torch.Tensor:
        """``wrap`` for state dicts: torch's checkpoints ask such tensors where their rows lie, and get it right.

        ``fragment``: which rows, where they are not all that this rank holds. ``field``: which state of the parameter.
        """
        local = self.shaped(part, name, fragment, field)
        if self.mesh is None:
            return local
        whole = torch.Size(state_shape(field, self.shape(name)))
        rows = rows_of(local, self.offsets(name, fragment), whole, written)
        return self._wrapped(rows, name, field, all_rows=not (fragment is not None and self.plan.shares_state))

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, own in self.named() if own is parameter)

    def hand_out(self, name: str) -> torch.Tensor:
        """A parameter for a state dict, the same tensor each time. What is written to it changes the parameter."""
        if name not in self._handed_out:
            master = self.master  # and not this bucket, which would then wait for the garbage collector
            self._handed_out[name] = self.as_state(
                self.flat_part(master, name), name, lambda: torch.autograd.graph.increment_version([master])
            )
        return self._handed_out[name]

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every parameter as a view of a gathered (or full gradient) buffer."""
        return tuple(flat[slot.offset : slot.end].view(slot.spec.shape) for slot in self.plan.layout.slots)

    def resident_views(self) -> tuple[torch.Tensor | None, ...]:
        """What a graph is given of parameters that stay unsharded."""
        if self.copies is not None:
            return self.copies.views()
        assert self.full is not None, f"{self.plan.name} is not resident"
        return self.views(self.full)

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gathered buffer."""
        shard = self.plan.layout.shard_numel
        return flat[self.rank * shard : (self.rank + 1) * shard]

    def staging(self) -> torch.Tensor:
        """The full gradient's memory, idle while parameters are gathered, as bytes of a staging buffer (ZeRO-1)."""
        assert self.grad_full is not None
        if self.kept is not None:  # gradients that no_sync left there are not reduced yet
            return torch.empty(self.plan.gathered_bytes, dtype=torch.uint8, device=self.device)
        return self.grad_full.view(torch.uint8)[: self.plan.gathered_bytes]

    # -- freshness ---------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the shard changed since it was last gathered.

        Every in-place operation counts up the version that the flat shard shares with its views, and so does every
        optimizer step (``optimizer_steps``). Ranks run the same program, so they agree.
        """
        return self.version != self.gathered_version

    def gathered(self) -> None:
        self.gathered_version = self.version

    def changed(self) -> None:
        """The shard is changed: called on every rank, also on one that holds no row of what is changed."""
        torch.autograd.graph.increment_version([self.master])

    def loaded(self) -> None:
        """Other values were loaded: as after a step, a forward that ran before has no backward any more."""
        self.steps += 1

    @property
    def version(self) -> int:
        """Counts the changes of the shard."""
        # A DTensor counts operations on itself, not on the rows it wraps: both counters are needed.
        # The rows count for themselves, too: they were wrapped detached.
        with private.plain_attributes():
            own = sum(parameter._version + private.local_version(parameter) for parameter in self.params)
            # Rows in state dicts are views of the shard and count with it; only their DTensors count for themselves.
            return self.master._version + own + sum(tensor._version for tensor in self._handed_out.values())

    @property
    def lags(self) -> bool:
        """Whether what was gathered is a copy that does not follow the shard by itself."""
        return self.plan.layout.ranks > 1 or self.full is None or self.plan.master_dtype != self.plan.param_dtype

    # -- gradients ---------------------------------------------------------------------------------------------------

    def hold_gradient(self) -> torch.Tensor:
        """The gradient of the shard, made when it is first needed."""
        if self.grad is None:
            at_home = self.home.lend() if self.home is not None else None
            self.grad = at_home if at_home is not None else torch.empty_like(self.master)
            self.grads = [self.as_param(self.grad, name) for name in self.plan.params]
        return self.grad

    def release_gradient(self) -> None:
        """``zero_grad``: forget what was kept, and free the gradient's memory if no parameter holds it."""
        self.kept, self.kept_for = None, frozenset()
        self.reclaim_gradient()

    def reclaim_gradient(self) -> None:
        """Free the gradient's memory if no parameter holds it."""
        if self.grad is not None and all(parameter.grad is None for parameter in self.params):
            self.grad, self.grads = None, []

    def drop_gradient(self) -> None:
        """Forget the gradient, and let parameters forget it."""
        for parameter in self.params:
            parameter.grad = None
        self.grad, self.grads = None, []

    def prepare_accumulation(self) -> bool:
        """Whether gradients are there already; if so, bring what is there into ``grad``."""
        if all(parameter.grad is None for parameter in self.params):
            return False
        self.hold_gradient()
        self.adopt_gradients()
        with torch.no_grad():
            for parameter, own in zip(self.params, self.grads, strict=True):
                if parameter.grad is None:
                    own.zero_()
        return True

    def add_gradient(self, name: str, full: torch.Tensor) -> None:
        """Add this rank's rows of a reduced gradient to the shard's."""
        if not self.prepare_accumulation():
            self.hold_gradient().zero_()
        assert self.grad is not None
        if self.fragment(name).numel:
            self.as_rows(self.grad, name).add_(self.rows(name, full))
        self.publish_gradients([self.plan.layout.index[name]])

    def adopt_gradients(self) -> None:
        """Copy gradients that a user put in place of ours into the flat gradient."""
        if any(parameter.grad is not None for parameter in self.params):
            self.hold_gradient()
        with torch.no_grad():
            for parameter, own in zip(self.params, self.grads, strict=False):  # none, where no parameter has one
                if parameter.grad is not None and parameter.grad is not own:
                    own.copy_(parameter.grad)
                    parameter.grad = own
        if self.mesh is None and self.grad is not None:
            self._take_back_moved(self.grad)

    def _take_back_moved(self, flat: torch.Tensor) -> None:
        """``parameter.grad.data = t`` moves our own view of a gradient to other memory."""
        for i, (fragment, parameter) in enumerate(zip(self.fragments, self.params, strict=True)):
            at = flat.data_ptr() + fragment.offset * flat.element_size()
            if fragment.numel and parameter.grad is self.grads[i] and self.grads[i].data_ptr() != at:
                moved, self.grads[i] = self.grads[i], self.as_param(flat, fragment.name)
                parameter.grad = self.grads[i]
                with torch.no_grad():
                    self.grads[i].copy_(moved)

    def publish_gradients(self, positions: Collection[int]) -> None:
        """Let parameters have their part of the gradient: those of which there is one."""
        self.discarded = False
        for i in positions:
            self.params[i].grad = self.grads[i]

    @property
    def with_gradient(self) -> list[int]:
        """Positions of the parameters that have a gradient."""
        return [i for i, parameter in enumerate(self.params) if parameter.grad is not None]

    @property
    def reducing(self) -> dist.ProcessGroup | None:
        """The group that reduces full gradients; None where no other rank has a part in them."""
        return self.channels.reducing(self.plan)

    def bytes_at_rest(self) -> dict[str, int]:
        """What this rank holds for the bucket, counted from the storages that exist."""
        master = self.master.untyped_storage().nbytes()
        param = self.full.untyped_storage().nbytes() if self.full is not None else 0
        mixed = self.plan.master_dtype != self.plan.param_dtype
        if self.copies is not None:
            param = self.copies.memory.untyped_storage().nbytes() + self.plan.scale_bytes
        elif not mixed:  # the master is the parameters, or a slice of them
            param, master = param or master, 0
        kept = self.kept if self.kept is not self.grad_full else None
        grads = [
            tensor.untyped_storage().nbytes() for tensor in (self.grad, self.grad_full, kept) if tensor is not None
        ]
        return {"param": param, "grad": sum(grads), "state": master}

    def flat_part(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's elements of a parameter in a flat shard."""
        fragment = self.fragment(name)
        return flat[fragment.offset : fragment.offset + fragment.numel]

    def shaped(self, part: torch.Tensor, name: str, fragment: Fragment | None = None, field: str = "") -> torch.Tensor:
        """Flat elements in the shape of this rank's rows of a parameter, or of the rows of a ``fragment``."""
        fragment, spec = fragment or self.fragment(name), self.plan.layout.spec(name)
        return part.view((fragment.rows, *state_shape(field, spec.shape)[1:])) if spec.shape else part.view(())

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)
