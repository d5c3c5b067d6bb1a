"""extern_tables: cos and sin of positions are torch's kernels, computed once a step."""

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import fxshard
from fxshard.passes.extern_tables import extern_tables
from fxshard.schedule.params import ParamRef
from tests.passes.graphs import Draft, aten, context
from tests.thorough import thorough
from tests.training import step_both

WEIGHT = ParamRef(0, 0)


def calls(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def rotary(*, of_a_parameter: bool = False, said: CheckpointPolicy | None = None) -> fx.GraphModule:
    """Angles, their cos in another dtype seen through a view, times a parameter."""
    draft = Draft()
    weight = draft.input("weight", 8, 4, param=WEIGHT)
    angles = weight if of_a_parameter else draft.input("angles", 8, 4)
    table = draft.call(aten.mul.Tensor, draft.call(aten.cos.default, angles), 2.0)
    if said is not None:
        table.meta["recompute"] = said
    return draft.output(draft.call(aten.mul.Tensor, weight, draft.call(aten.view.default, table, [8, 4])))


def test_a_table_is_computed_by_torch_and_saved_where_layers_read_it() -> None:
    module = extern_tables(rotary(), context())
    assert calls(module)[0] == "fxshard.cos.default"
    said = {node.name: node.meta["recompute"] for node in module.graph.nodes if "recompute" in node.meta}
    assert said == {"mul": CheckpointPolicy.MUST_SAVE}  # the table itself, not the view of it, nor the cos before it


def test_what_depends_on_a_parameter_is_left_to_the_compiler() -> None:
    assert calls(extern_tables(rotary(of_a_parameter=True), context()))[0] == "aten.cos.default"


def test_what_the_model_says_stands() -> None:
    module = extern_tables(rotary(said=CheckpointPolicy.MUST_RECOMPUTE), context())
    assert [n.meta["recompute"] for n in module.graph.nodes if "recompute" in n.meta] == [
        CheckpointPolicy.MUST_RECOMPUTE
    ]


class Turned(nn.Module):
    """Layers that turn what they are given by angles, as rotary embeddings do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.register_buffer("frequency", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[0], device=x.device).unsqueeze(-1) * self.frequency
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x)
            left, right = x.chunk(2, -1)
            x = torch.tanh(x * cos + torch.cat((-right, left), -1) * sin)
        return x.square().mean()


@pytest.mark.parametrize("lowering", ["eager", thorough("inductor")])
def test_gradients_are_plain_torchs_and_backward_computes_no_table(lowering: str) -> None:
    torch.manual_seed(0)
    plain, twin = Turned(2), Turned(2)
    twin.load_state_dict(plain.state_dict())
    model = fxshard.compile(twin, optimizer=fxshard.AdamW(lr=0.1), lowering=lowering)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    x = torch.randn(4, 16)
    for _ in range(3):
        loss, expected = step_both(model, plain, optimizer, x)
        torch.testing.assert_close(loss, expected, rtol=0 if lowering == "eager" else 1e-6, atol=0)
    assert "fxshard.cos.default" in calls(model.graphs["forward"])
    assert not [call for call in calls(model.graphs["backward"]) if ".cos." in call or ".sin." in call]
