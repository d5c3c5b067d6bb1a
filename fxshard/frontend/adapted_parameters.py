"""LoRA on parameters (``target_parameters`` of peft, for stacked experts) that Dynamo can trace.

peft's wrapper registers a parametrization on the layer inside each forward, which makes a module and a parameter there.
Here the adapted weight is a value: it is computed before the layer is called, and lent to that one call. Parameters,
their names, methods and results are those of peft's wrapper.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import nn
from torch.func import functional_call


class ParamWrapper(lora.ParamWrapper):  # type: ignore[misc]  # peft asks for it by this name
    """Adapts one parameter of a layer; of several, each wraps the wrapper of the one before."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not adapters:
            return super().forward(x, *args, **kwargs)  # without adapters peft registers nothing
        self._check_forward_args(x, *args, **kwargs)
        name, layer = self.parameter_name, self.base_layer
        while isinstance(layer, lora.ParamWrapper):
            name, layer = f"base_layer.{name}", layer.base_layer
        return functional_call(self.base_layer, {name: self._adapted(adapters)}, (x, *args), kwargs, tie_weights=False)

    def _adapted(self, adapters: list[str]) -> torch.Tensor:
        weight: torch.Tensor = self.get_param()
        with torch.autocast(weight.device.type, enabled=False):  # it would change the dtype of the weight
            if len(adapters) == 1 and self.num_experts > 1:
                left, right, scaling = self.get_delta_factors(adapters[0])
                return torch.baddbmm(weight, left, right, alpha=scaling)
            return weight + sum(self.get_delta_weight(name) for name in adapters)


def adapt_in_forward(model: nn.Module) -> None:
    """Give peft's wrappers of parameters in ``model`` the forward above, in place."""
    for module in model.modules():
        if type(module) is lora.ParamWrapper:
            module.__class__ = ParamWrapper
