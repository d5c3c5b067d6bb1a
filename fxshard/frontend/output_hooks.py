"""Hooks with which models of ``transformers`` collect hidden states, attentions and router logits.

A model registers them in its first forward that is asked for such outputs, and holds a lock meanwhile, which Dynamo
cannot trace. They are registered before any graph is captured, whether outputs are asked for or not: a model may ask
its vision tower for them inside its forward, and a hook that collects nothing leaves nothing in a graph.
"""

from __future__ import annotations

import sys

from torch import nn

INSTALLED = "_output_capturing_hooks_installed"


def install_output_hooks(model: nn.Module) -> None:
    """Have the models of ``transformers`` inside ``model``, itself included, register their hooks.

    From the outside in, as ``transformers`` does it: a model registers those of the models inside it, too.
    """
    collecting = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(collecting, "maybe_install_capturing_hooks", None)
    if install is None:  # no model of transformers, or of a release in which layers collect their outputs otherwise
        return
    for module in model.modules():
        if isinstance(module, sys.modules["transformers"].PreTrainedModel) and not any(
            getattr(inner, INSTALLED, False) for inner in module.modules()
        ):
            install(module)


def collects_outputs(model: nn.Module) -> bool:
    """Whether hooks in ``model`` append to a list; those of checkpointed layers do so inside what is checkpointed."""
    return any(getattr(module, INSTALLED, False) for module in model.modules())
