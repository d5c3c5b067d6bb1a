"""Hooks that make the output of an embedding require a gradient, as ``transformers`` and peft register them, go.

Where adapters are trained on frozen weights, no input of a checkpointed layer requires a gradient, and reentrant
checkpointing (``use_reentrant=True``) then computes none for what is inside. A compiled graph is not reentrant: what
requires a gradient is known from its parameters, so the hook changes no result. But it calls ``requires_grad_()`` on
a tensor in the middle of the graph, which Dynamo cannot trace.
"""

from __future__ import annotations

from torch import nn

_HOOKS = ("enable_input_require_grads.<locals>.", "make_inputs_require_grad")
"""Parts of their qualified names: the method of ``transformers``, and functions inside some of peft's."""


def drop_input_gradient_hooks(model: nn.Module) -> None:
    """Remove such hooks. Handles that the model keeps for them do no harm: removing a hook twice is nothing."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            name, home = getattr(hook, "__qualname__", ""), getattr(hook, "__module__", "") or ""
            if home.split(".")[0] in ("transformers", "peft") and any(part in name for part in _HOOKS):
                del module._forward_hooks[key]
