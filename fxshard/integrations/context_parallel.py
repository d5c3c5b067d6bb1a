"""Context parallelism: each rank has a part of every sequence, and attention gathers keys and values.

from fxshard.integrations.context_parallel import ContextParallel

context = ContextParallel(mesh["cp"])
tokens, labels, positions = context.shard(tokens, labels, positions)  # this rank's parts
attended = context.attention(query, key, value, is_causal=True)       # in forward, for scaled_dot_product_attention
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import ConfigError
from fxshard._torch.private.attention import gathered, lower_right_attention


class ContextParallel:
    """The ranks of a mesh dimension that share sequences.

    A sequence is cut into two pieces for each rank, and rank ``r`` of ``n`` has pieces ``r`` and ``2 n - 1 - r``: with
    causal attention all ranks have the same work. It is the layout of ``torch.distributed.tensor.experimental``'s
    ``context_parallel``. Keys and values travel together, in one all-gather per call, their gradients in one
    reduce-scatter; both are events of the schedule.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ConfigError(
                f"ContextParallel: the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; pass the one along "
                'which sequences are cut, mesh["cp"]'
            )
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group().group_name

    def shard(self, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
        """This rank's part of whole sequences along ``dim``: tokens, labels (shifted already), positions."""
        return tuple(self._part(tensor, dim) for tensor in tensors)

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Where this rank's tokens stand in sequences of ``length`` tokens: shape (1, its tokens)."""
        return self._part(torch.arange(length, device=device).unsqueeze(0), 1)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """``scaled_dot_product_attention`` of this rank's queries to the keys of whole sequences.

        All of shape (batch, heads, this rank's tokens, width). There are no masks and no dropout.
        """
        if self.ranks == 1:
            return nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.size(2) % 2 or query.size(2) != key.size(2):
            raise ConfigError(
                f"ContextParallel.attention: {query.size(2)} queries and {key.size(2)} keys on this rank; all have "
                "the same even number of both, as shard() gives them"
            )
        key, value = self._all(key, value)
        if not is_causal:
            return nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
        piece = query.size(2) // 2
        parts = []
        for own, number in zip(query.split(piece, 2), self._numbers(), strict=True):
            seen = (number + 1) * piece
            parts.append(lower_right_attention(own, key[:, :, :seen], value[:, :, :seen], scale, enable_gqa))
        return torch.cat(parts, 2)

    def _numbers(self) -> tuple[int, int]:
        """The numbers of this rank's pieces."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.size(dim)
        if length % (2 * self.ranks):
            raise ConfigError(
                f"ContextParallel.shard: sequences of {length} tokens (dimension {dim} of shape {list(tensor.shape)}) "
                f"cannot be cut into {2 * self.ranks} equal pieces, two for each of {self.ranks} ranks; pad them to a "
                f"multiple of {2 * self.ranks}"
            )
        pieces = tensor.chunk(2 * self.ranks, dim)
        return torch.cat([pieces[number] for number in self._numbers()], dim)

    def _all(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in order."""
        batch, heads, length, width = key.shape
        if value.shape != key.shape:
            raise ConfigError(
                f"ContextParallel.attention: keys {list(key.shape)} and values {list(value.shape)} travel together, "
                "and must have one shape"
            )
        both = torch.stack([key, value]).view(2, batch, heads, 2, length // 2, width)
        ranks = gathered(both.unsqueeze(0), self.group)  # rank, key or value, batch, head, half, token, width
        first, second = ranks.unbind(4)
        pieces = torch.cat([first, second.flip(0)])  # in the order of the sequence
        whole = pieces.permute(1, 2, 3, 0, 4, 5).reshape(2, batch, heads, self.ranks * length, width)
        return whole[0], whole[1]


def use_in(model: Any, context: ContextParallel) -> None:
    """Let a model of ``transformers`` attend to whole sequences. It then takes this rank's part of them, with
    ``position_ids`` and ``shift_labels``, and no ``attention_mask``.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None or dropout or sliding_window is not None:
            raise ConfigError(
                f"context parallelism in {type(module).__name__}: an attention mask, dropout or a sliding window; "
                "attention is to whole sequences, causal or full"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        grouped = query.size(1) != key.size(1)
        found = context.attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped)
        return found.transpose(1, 2).contiguous(), None

    name = f"fxshard_context_parallel_{context.group}"  # of this mesh: two models may have different ones
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *args, **kwargs: None)
    model.set_attn_implementation(name)
