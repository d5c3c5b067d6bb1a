"""What ``te_mlp`` and the stand-in for Transformer Engine assume of it, looked up in its source, which need not import.

Skipped where Transformer Engine is not installed. Found to hold for 2.20.2.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fxshard.kernels import te_mlp
from tests.fused import te_fused_stand_in, te_stand_in

SPEC = importlib.util.find_spec("transformer_engine")
pytestmark = pytest.mark.skipif(SPEC is None or SPEC.origin is None, reason="Transformer Engine is not installed")
FUSED = "ops/fused/grouped_mlp.py", "_GroupedMLP_CuTeGEMMBase"


@cache
def source(file: str) -> ast.Module:
    assert SPEC is not None and SPEC.origin is not None
    return ast.parse((Path(SPEC.origin).parent / "pytorch" / file).read_text())


def function(file: str, *path: str) -> ast.FunctionDef:
    found: Any = source(file)
    for name in path:
        found = next(each for each in found.body if getattr(each, "name", None) == name)
    return found


def names(found: ast.FunctionDef) -> list[str]:
    arguments = found.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if each.arg != "self"]


def calls(found: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(found) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def taken(stand_in: Any) -> list[str]:
    return [name for name in inspect.signature(stand_in).parameters if name != "self"]


def test_the_operation_is_called_and_made_alike() -> None:
    stand_in = te_fused_stand_in.GroupedMLP_CuTeGEMMGLU
    assert names(function(*FUSED, "fuser_forward")) == taken(stand_in.fuser_forward)
    assert names(function(*FUSED, "fuser_backward")) == taken(stand_in.fuser_backward)
    assert names(function(*FUSED, "__init__")) == taken(stand_in)
    assert not names(function(*FUSED, "grouped_gemm_wgrad_kernel"))[1:]
    last = [each for each in ast.walk(function(*FUSED, "fuser_backward")) if isinstance(each, ast.Return)][-1]
    assert last.value is not None
    assert ast.unparse(last.value) == (
        "(grad_input, [fc1_grad_params, (), fc2_grad_params], [(None,), activation_grad_extra, fc2_grad_extra])"
    )


def test_what_it_keeps_for_backward() -> None:
    forward = function(*FUSED, "fuser_forward")
    (saving,) = calls(forward, "fc1_ctx.save_for_backward")
    kept = [ast.unparse(argument) for argument in saving.args]
    assert kept[te_mlp.BEFORE_TOKENS :] == [
        *("saved_fc1_x", "*fc1_weight_tensors", "activation_in", "scales", "saved_grouped_fc2_x", "*fc2_weight_tensors")
    ]
    offsets = [f"fc{number}_{what}_tensor_offsets" for number in (1, 2) for what in ("x", "out")]
    assert kept[: te_mlp.BEFORE_TOKENS] == ["split_sizes", "base_split_offsets", "split_points", *offsets]
    (places,) = calls(forward, "tex.splits_to_offsets_multi")
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in places.keywords}
    weights = ", ".join(f"fc{number}_weight_shape[{i}]" for number in (1, 2) for i in (1, 0))
    assert given["strides"] == f"[1, 1, {weights}]"
    assert given["include_leading_zero"] == "[False, True, True, True, True, True]"
    assert given["dtypes"] == f"[torch.int32{', torch.int64' * 5}]"


def test_what_backward_reads_of_its_contexts() -> None:
    backward = function(*FUSED, "fuser_backward")
    read = {
        node.attr
        for node in ast.walk(backward)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("fc1_ctx", "fc2_ctx")
    }
    asked = [
        ast.literal_eval(each.args[1]) for each in calls(backward, "getattr") if "_ctx" in ast.unparse(each.args[0])
    ]
    written = ast.parse(inspect.getsource(te_mlp))
    given = {
        node.attr for node in ast.walk(written) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {*read, *asked} <= given
    context = function("ops/op.py", "OperationContext")
    fields = {node.target.id for node in ast.walk(context) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert set(taken(te_fused_stand_in.OperationContext)) <= fields


def test_weight_gradients_that_are_put_aside() -> None:
    made = function("ops/fused/grouped_mlp.py", "_compute_grad_params")
    (put,) = calls(made, "fc_op.wgrad_store.put")
    assert [ast.unparse(each) for each in put.args] == ["[grouped_x, grouped_dy, wgrad_output]", "gemm_fn"]
    store = function("module/_common.py", "WeightGradStore", "put")
    assert [ast.unparse(each) for each in calls(store, "self.context.put")] == ["self.context.put([tensor_list, func])"]
    wgrad = function("ops/fused/grouped_mlp.py", "_cudnn_compute_wgrad")
    mine = taken(te_fused_stand_in._cudnn_compute_wgrad)
    assert names(wgrad)[: len(mine)] == mine and len(names(wgrad)) - len(mine) <= len(wgrad.args.defaults)
    grouped = function("tensor/storage/grouped_tensor_storage.py", "GroupedTensorStorage", "__new__")
    assert set(taken(te_fused_stand_in.GroupedTensorStorage)) <= set(names(grouped))


def test_linears_and_quantized_tensors_are_made_alike() -> None:
    linear = ("ops/basic/grouped_linear.py", "GroupedLinear")
    theirs = names(function(*linear, "__init__"))
    assert theirs[:3] == ["num_groups", "in_features", "out_features"]
    assert set(taken(te_stand_in.GroupedLinear)[3:]) <= set(theirs)
    assert names(function(*linear, "reset_recipe_state")) == taken(te_stand_in.GroupedLinear.reset_recipe_state)
    quantizer = function("ops/op.py", "BasicOperation", "get_quantizer")
    assert names(quantizer) == taken(te_stand_in.GroupedLinear.get_quantizer)
    tensor = names(function("tensor/mxfp8_tensor.py", "MXFP8Tensor", "__new__"))
    base = names(function("quantized_tensor.py", "QuantizedTensor", "__new__"))
    assert set(taken(te_fused_stand_in.MXFP8Tensor)) <= {*tensor, *base}
    forward = ast.unparse(function(*FUSED, "fuser_forward"))
    assert "if not is_quantized_tensor(weight):" in forward and "quantized_fc1_weights.append(weight)" in forward
