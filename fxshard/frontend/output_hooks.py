"""Hooks with which models of ``transformers`` collect hidden states, attentions and router logits.

A model registers them in its first forward that is asked for such outputs, by arguments or by its configuration, and
holds a lock meanwhile, which Dynamo cannot trace. They are registered before the graph is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

OUTPUTS = "output_"
INSTALLED = "_output_capturing_hooks_installed"


def install_output_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Have the models inside ``model`` register their hooks, if a call with ``kwargs`` needs them.

    From the outside in, as ``transformers`` does it: a model registers those of the models inside it, too.
    """
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    if install is None:
        return
    pretrained = [m for m in model.modules() if isinstance(m, sys.modules["transformers"].PreTrainedModel)]
    if not _asks(kwargs) and not any(_asks(vars(module.config)) for module in pretrained):
        return
    for module in pretrained:
        if not any(getattr(inner, INSTALLED, False) for inner in module.modules()):
            install(module)


def _asks(options: Mapping[str, Any]) -> bool:
    """Whether a call or a configuration asks for outputs of layers: all of them, or those of a list of layers."""
    return any(
        name.lstrip("_").startswith(OUTPUTS) and isinstance(value, bool | list | tuple | set) and bool(value)
        for name, value in options.items()
    )
