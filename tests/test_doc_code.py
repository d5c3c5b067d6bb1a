"""The Python in the README and in the pages for users runs as printed, and calls what there is.

A page is one session: its blocks run in order, in one process, with a small model in place of the reader's. Nothing is
compiled by Inductor here, which would not change what a page says.
"""

import ast
import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import fxshard
from fxshard.bench.models import Llama, LlamaConfig
from fxshard.passes.context import PassContext
from tests.checkpoint.test_megatron import as_megatron_has_it
from tests.checkpoint.test_megatron import save as save_as_megatron
from tests.thorough import thorough

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
PAGES.remove("docs/api.md")  # signatures, made from the code

NOT_RUN = {
    "docs/howto/expert-groups.md": "64 GPUs",
    "docs/howto/hsdp.md": "64 GPUs",
    "docs/howto/tensor-parallel.md": "64 GPUs; examples/tensor_parallel.py is run on four processes",
    "docs/howto/pipeline-parallel.md": "64 GPUs; examples/pipeline_parallel.py is run on four processes",
    "docs/howto/context-parallel.md": "32 GPUs; examples/context_parallel.py is run on two processes",
    "docs/howto/multi-node.md": "GPUs",
    "docs/howto/float8.md": "a model whose linears are large enough to gain",
    "docs/howto/torchtitan.md": "torchtitan, which needs Triton",
    "docs/howto/fabric.md": "a process of its own, as tests/integrations/test_fabric.py has",
}
"""Pages whose code needs what is not here, and what that is. What it calls is looked up all the same."""


def blocks(page: str) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^ *```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


WITH_CODE = [page for page in PAGES if blocks(page)]
CONFIG = LlamaConfig(vocab=64, dim=32, layers=1, heads=2, hidden=64)


class Transformer(nn.Module):
    """A model whose modules all know how to initialise themselves."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(config.dim, config.dim) for _ in range(2))


def my_pass(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return module


def what_readers_have() -> dict[str, Any]:
    """Names that the pages use for the reader's own things."""
    x, y = torch.randint(CONFIG.vocab, (2, 2, 8)).unbind()
    plain = Llama(CONFIG)

    def train(model: fxshard.ShardedModule, *batch: torch.Tensor) -> None:
        model(*batch).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    names = {
        "torch": torch,
        "nn": nn,
        "fx": fx,
        "fxshard": fxshard,
        "PassContext": PassContext,
        "Transformer": Transformer,
    }
    names |= {"MyModel": lambda: Llama(CONFIG), "config": CONFIG, "my_pass": my_pass, "plain": plain, "train": train}
    names |= {"x": x, "y": y, "tokens": x, "targets": y, "inputs": (x, y), "step": 100}
    return names | {"loader": [(x, y)] * 2, "batches": [(x, y)] * 3, "micro_batches": [(x, y)] * 2}


def pretrained(folder: str, *, experts: bool = False) -> None:
    """A small model as the hub has large ones."""
    transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")
    sizes = {"vocab_size": CONFIG.vocab, "hidden_size": CONFIG.dim, "intermediate_size": CONFIG.hidden}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {**heads, "num_hidden_layers": CONFIG.layers, "eos_token_id": 2}
    if experts:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    else:
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(folder)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Other tools start process groups, set variables and numbers of threads: not for the tests after this one.

    Some of them fork, which must not happen once torch has used several threads.
    """
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate.state" in sys.modules:
        state: Any = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


TESTED_ELSEWHERE = tuple(f"docs/howto/{name}.md" for name in ("accelerate", "budget", "huggingface", "peft", "trainer"))
"""Examples, and tests of budgets and integrations, do the same; these take long to capture."""


@pytest.mark.parametrize(
    "page", [thorough(page) if page in TESTED_ELSEWHERE else page for page in WITH_CODE if page not in NOT_RUN]
)
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("nothing_left")
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("compile", "plan", "shard"):
        monkeypatch.setattr(fxshard, name, functools.partial(getattr(fxshard, name), lowering="eager"))
    names = what_readers_have()
    started = [Llama(CONFIG)]  # where a page goes on with a model, it is one that trains
    if not re.search(r"\bmodel = ", blocks(page)[0]):
        started = [fxshard.compile(started[0], optimizer=fxshard.AdamW())]
    names["model"] = started[0]
    if page == "docs/howto/checkpoints.md":
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["model"].optimizer)
        fxshard.checkpoint.save_safetensors(names["model"], "path/to/Qwen3-0.6B")
        save_as_megatron(Path("runs/gpt"), as_megatron_has_it(Llama(CONFIG), CONFIG.heads, CONFIG.heads))
    if page in ("docs/howto/accelerate.md", "docs/howto/trainer.md"):
        pytest.importorskip("accelerate", reason="needs Accelerate: pip install '.[integrations]'")
        names["rows"] = [(x, y) for x, y in zip(names["x"], names["y"], strict=True)] * 4
    if page == "docs/howto/peft.md":
        pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
        pretrained("path/to/Qwen3-30B-A3B", experts=True)
    if page in ("docs/howto/huggingface.md", "docs/howto/trainer.md", "docs/howto/peft.md"):
        pretrained("path/to/Qwen3-0.6B")
        names["data"] = [{"input_ids": row, "labels": row} for row in names["x"]]
        names["batches"] = [{"input_ids": names["x"], "labels": names["x"]}] * 2
    for number, code in enumerate(blocks(page)):
        small = code.replace("layers=4", "layers=1")
        exec(compile(small, f"{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", WITH_CODE)
def test_what_is_called_is_there(page: str) -> None:
    """Names of fxshard exist and take the arguments that they are given."""
    for code in blocks(page):
        for call in ast.walk(ast.parse(code)):
            if isinstance(call, ast.Call) and (function := named(call.func)) is not None:
                keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
                inspect.signature(function).bind_partial(*call.args, **keywords)


def named(node: ast.expr) -> Callable[..., Any] | None:
    """What ``fxshard.x`` or ``fxshard.x.y`` is; None for what does not begin with ``fxshard``."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not (isinstance(node, ast.Name) and node.id == "fxshard" and path):
        return None
    return functools.reduce(getattr, path, fxshard)  # type: ignore[return-value]


def test_the_list_of_passes_is_what_it_prints() -> None:
    passes = fxshard.PASSES.after("insert_reshard", my_pass).without("defer_wgrad")
    assert f"```\n{passes}\n```" in (ROOT / "docs" / "howto" / "own-pass.md").read_text()
