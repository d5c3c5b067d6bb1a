"""Before the partitioner: drop ``detach``, which autograd leaves in a joint graph and which does nothing there.

Inductor's joint passes do this where Inductor lowers. Left in, backward of one layer refers to them in an order of its
own, and layers that repeat could not be told to.
"""

from __future__ import annotations

import torch
from torch import fx


def remove_detach(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        (source,) = node.all_input_nodes
        if all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    return module
