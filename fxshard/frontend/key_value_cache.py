"""Models of ``transformers`` that compute a loss: no key/value cache, unless the caller asks for one.

``config.use_cache`` is True by default, for generation. In training every layer would return its keys and values: they
live until the caller drops them, autograd makes a zero gradient for each, and layers whose results leave the model one
by one are not folded.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

CACHE = "use_cache"


def without_cache(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, with ``use_cache=False`` where a loss is computed and nothing else is said."""
    said = CACHE in kwargs or kwargs.get("past_key_values") is not None or len(args) > 1
    computes_loss = kwargs.get("labels") is not None or (model.training and torch.is_grad_enabled())
    if said or not computes_loss or not _takes_cache(model):
        return dict(kwargs)
    return {**kwargs, CACHE: False}


def _takes_cache(model: nn.Module) -> bool:
    """Whether a model is one of ``transformers``, or peft's adapters in one, whose forward may fill a cache."""
    transformers = sys.modules.get("transformers")
    base: Any = getattr(model, "get_base_model", lambda: model)
    inner = base()
    return (
        transformers is not None
        and isinstance(inner, transformers.PreTrainedModel)
        and _names_cache(type(inner).forward)
    )


@functools.cache
def _names_cache(forward: Callable[..., Any]) -> bool:
    return CACHE in inspect.signature(forward).parameters
