"""How models of ``transformers`` are called: without what they would do for nothing.

**No key/value cache where a loss is computed**, unless the caller asks for one. ``config.use_cache`` is True by
default, for generation. In training every layer would return its keys and values: they live until the caller drops
them, autograd makes a zero gradient for each, and layers whose results leave the model one by one are not folded.

**No mask that hides nothing.** Tokenizers and collators give an ``attention_mask`` with every batch, of ones where no
row is padded, which means the same as none. ``transformers`` looks at its values and leaves it out, but cannot where
its forward is captured whole; and kernels that read a mask take three times as long as those for causal attention. So
it is looked at here, ahead of the call. On a GPU the host waits for that, as it does in ``transformers``.

**A classifier's kind of problem** is decided by its first forward with labels, and written to ``config.problem_type``:
here it is ahead of the call, or the second step would compile another graph.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

CACHE = "use_cache"
MASK = "attention_mask"


class Calls:
    """The calls of one model.

    The first batch decides about masks: if no row of it is padded, masks that hide nothing are left out of all calls;
    otherwise all masks are given, and none is looked at. Padded batches are mostly padded, and with and without a mask
    a model has two graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masks_left_out: bool | None = None

    @property
    def padded(self) -> bool:
        """Whether rows of the first batch were padded to the longest: those of the next are to another length."""
        return self._masks_left_out is False

    def keywords(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments to call the model with."""
        _decide_problem(self._model, kwargs)
        return self._without_full_mask(args, _without_cache(self._model, args, kwargs))

    def _without_full_mask(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        mask = kwargs.get(MASK)
        if self._masks_left_out is False or not _is_mask(mask) or not _takes(self._model, MASK):
            return kwargs
        if len(args) > 1 or kwargs.get("position_ids") is not None:
            return kwargs  # without a mask, positions that start anew within a row would begin another document
        full = bool((mask == 1).all())
        if self._masks_left_out is None:
            self._masks_left_out = full
        return {name: given for name, given in kwargs.items() if name != MASK} if full else kwargs


def _is_mask(mask: Any) -> TypeGuard[torch.Tensor]:
    """One number for each token, that can be looked at."""
    if type(mask) is not torch.Tensor or mask.is_meta or mask.is_floating_point():
        return False
    return mask.dim() == 2 and mask.numel() > 0


def _without_cache(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``use_cache=False`` where a loss is computed and nothing else is said."""
    said = CACHE in kwargs or kwargs.get("past_key_values") is not None or len(args) > 1
    computes_loss = kwargs.get("labels") is not None or (model.training and torch.is_grad_enabled())
    if said or not computes_loss or not (_takes(model, CACHE) or _passes_cache_on(model)):
        return dict(kwargs)
    return {**kwargs, CACHE: False}


_CLASSIFIERS = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Video", "Audio"))


def _decide_problem(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """As the classifiers of ``transformers`` do when they are first given labels, where all of them agree.

    What several numbers for each row mean they do not agree about: for DeBERTa's, they are probabilities. Nor about
    labels below zero: DeBERTa's ignore all of them, the others -100; here DeBERTa's do as the others.
    """
    config: Any = getattr(_base(model), "config", None)
    labels = kwargs.get("labels")
    named = type(_base(model)).__name__.endswith(_CLASSIFIERS) and _takes(model, "labels")
    if not named or not isinstance(labels, torch.Tensor) or getattr(config, "problem_type", "") is not None:
        return
    if config.num_labels == 1 and labels.is_floating_point():
        config.problem_type = "regression"
    elif config.num_labels > 1 and labels.dtype in (torch.long, torch.int) and labels.dim() == 1:
        config.problem_type = "single_label_classification"


def _takes(model: nn.Module, name: str) -> bool:
    """Whether a model is one of ``transformers``, or peft's adapters in one, and may be called without an argument."""
    transformers = sys.modules.get("transformers")
    inner = _base(model)
    return (
        transformers is not None
        and isinstance(inner, transformers.PreTrainedModel)
        and name in _optional(type(inner).forward)
    )


def _passes_cache_on(model: nn.Module) -> bool:
    """Whether it takes a key/value cache, and hands keyword arguments that it does not name to the model inside it,
    which makes one: so do vision-language models (Qwen3-VL, InternVL, LLaVA) and Granite's mixtures of experts.
    """
    return _takes(model, "past_key_values") and _takes_any_keyword(type(_base(model)).forward)


def _base(model: nn.Module) -> nn.Module:
    get_base: Any = getattr(model, "get_base_model", lambda: model)
    return get_base()  # type: ignore[no-any-return]


@functools.cache
def _optional(forward: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(each.name for each in parameters if each.default is not each.empty)


@functools.cache
def _takes_any_keyword(forward: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())
