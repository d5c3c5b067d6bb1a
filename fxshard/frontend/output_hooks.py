"""Hooks with which models of ``transformers`` collect hidden states, attentions and router logits.

A model registers them in its first forward that is asked for such outputs, by arguments or by its configuration, and
holds a lock meanwhile, which Dynamo cannot trace. They are registered before the graph is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

OUTPUTS = "output_"
INSTALLED = "_output_capturing_hooks_installed"


def models_with_outputs(model: nn.Module) -> list[nn.Module]:
    """The models of ``transformers`` inside ``model``, itself included, from the outside in."""
    if "transformers.utils.output_capturing" not in sys.modules:
        return []
    pretrained = sys.modules["transformers"].PreTrainedModel
    return [module for module in model.modules() if isinstance(module, pretrained)]


def install_output_hooks(models: Sequence[nn.Module], kwargs: Mapping[str, Any]) -> None:
    """Have ``models`` register their hooks, if a call with ``kwargs`` needs them.

    From the outside in, as ``transformers`` does it: a model registers those of the models inside it, too.
    """
    if not models or not (_asks(kwargs) or any(_asks(vars(module.config)) for module in models)):
        return
    install = sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks
    for module in models:
        if not any(getattr(inner, INSTALLED, False) for inner in module.modules()):
            install(module)


def _asks(options: Mapping[str, Any]) -> bool:
    """Whether a call or a configuration asks for outputs of layers: all of them, or those of a list of layers."""
    return any(
        name.lstrip("_").startswith(OUTPUTS) and isinstance(value, bool | list | tuple | set) and bool(value)
        for name, value in options.items()
    )
