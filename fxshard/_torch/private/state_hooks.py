"""Hooks of state dicts, of which ``nn.Module`` has no public list. torch 2.11, 2.13."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import _WrappedHook

_KINDS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def copy_state_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` have the hooks of ``source``; those that are given their module are given ``target``."""
    for kind in _KINDS:
        hooks = getattr(source, kind).items()
        target.__dict__[kind] = OrderedDict((number, _of(hook, target)) for number, hook in hooks)


def _of(hook: Callable[..., Any], target: nn.Module) -> Callable[..., Any]:
    return _WrappedHook(hook.hook, target if hook.with_module else None) if isinstance(hook, _WrappedHook) else hook


def before_loading(module: nn.Module) -> list[Callable[..., None]]:
    return list(module._load_state_dict_pre_hooks.values())


def after_loading(module: nn.Module) -> list[Callable[..., None]]:
    return list(module._load_state_dict_post_hooks.values())
