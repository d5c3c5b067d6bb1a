"""Models of ``transformers`` that compute a loss: no key/value cache, unless the caller asks for one.

``config.use_cache`` is True by default, for generation. In training every layer would return its keys and values: they
live until the caller drops them, autograd makes a zero gradient for each, and layers whose results leave the model one
by one are not folded.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

CACHE = "use_cache"


def without_cache(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, with ``use_cache=False`` where a loss is computed and nothing else is said."""
    said = CACHE in kwargs or kwargs.get("past_key_values") is not None or len(args) > 1
    computes_loss = kwargs.get("labels") is not None or (model.training and torch.is_grad_enabled())
    if said or not computes_loss or not _takes_cache(type(_of_transformers(model))):
        return dict(kwargs)
    return {**kwargs, CACHE: False}


def _of_transformers(model: nn.Module) -> nn.Module | None:
    """The model of ``transformers`` that a model is, or that peft's adapters were put into."""
    transformers = sys.modules.get("transformers")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if transformers is not None and isinstance(inner, transformers.PreTrainedModel) else None


@functools.cache
def _takes_cache(kind: type) -> bool:
    forward = getattr(kind, "forward", None)
    return forward is not None and CACHE in inspect.signature(forward).parameters
