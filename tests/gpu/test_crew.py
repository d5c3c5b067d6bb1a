"""On a GPU: what a crew of processes compiled ahead, or an earlier start scheduled, is found, and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import hashlib, json, sys, time
from functools import partial
from pathlib import Path
from unittest import mock
import torch, fxshard
from torch._dynamo.utils import counters
from fxshard.helpers import crew
from fxshard.models import Llama, LlamaConfig

fxshard.compile
there = Path(sys.argv[1])
helpers = crew.hired()
if helpers is not None:
    helpers.publish(partial(Path.touch, there))
    while not there.exists():
        time.sleep(0.1)
torch.manual_seed(0)
with torch.device("cuda"):
    plain = Llama(LlamaConfig(vocab=512, dim=256, layers=6, heads=4, hidden=704))
    tokens = torch.randint(0, 512, (2, 128))
bf16 = fxshard.Precision(param=torch.bfloat16, reduce=torch.float32)
optimizer = fxshard.AdamW() if len(sys.argv) > 2 else None
model = fxshard.compile(plain, precision=bf16, lowering="inductor", optimizer=optimizer)
with mock.patch("fxshard.backend.abridge", wraps=fxshard.backend.abridge) as abridge:
    loss = model(tokens, tokens)
loss.backward()
stayed = crew.hired() is not None
digest = hashlib.sha256()
for name, parameter in model.named_parameters():
    if "embed" not in name:  # added up by atomic additions
        digest.update(parameter.grad.cpu().numpy().tobytes())
found = counters["inductor"]
if optimizer is not None:
    model.optimizer.step()
print(json.dumps({
    "loss": float(loss), "digest": digest.hexdigest(), "hits": found["fxgraph_cache_hit"],
    "misses": found["fxgraph_cache_miss"], "stayed": stayed, "left": crew.hired() is not None,
    "finished": helpers.finished if helpers is not None else 0, "traced": abridge.called,
    "imported": "torch._inductor.lowering" in sys.modules,
}))
"""


def step(helpers: int, directory: Path, *optimizer: str) -> dict[str, object]:
    """The first step of a program with so many helpers; what it keeps is in ``directory``."""
    directory.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FXSHARD_HELPERS": str(helpers),
        "FXSHARD_REMEMBER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"),
    }
    command = [sys.executable, "-c", SCRIPT, str(directory / "there"), *optimizer]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(ran.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_what_a_crew_compiled_is_found_and_computes_the_same(tmp_path: Path) -> None:
    alone, helped = step(0, tmp_path / "alone"), step(8, tmp_path / "helped")
    assert alone["hits"] == 0 and alone["finished"] == 0
    assert helped["hits"] == alone["misses"], "each segment was compiled elsewhere"
    assert helped["stayed"] is False and helped["left"] is False
    again = step(8, tmp_path / "helped")
    assert again["misses"] == 0 and again["imported"] is False
    assert (helped["loss"], helped["digest"]) == (alone["loss"], alone["digest"]) == (again["loss"], again["digest"])


def test_a_crew_stays_for_a_first_step_where_there_is_memory(tmp_path: Path) -> None:
    """And ends with it: to take its contexts down would hold up a first backward."""
    alone, helped = step(0, tmp_path / "alone", "adamw"), step(8, tmp_path / "helped", "adamw")
    assert alone["stayed"] is False
    assert helped["stayed"] is True and helped["left"] is False
    assert (helped["loss"], helped["digest"]) == (alone["loss"], alone["digest"])


def test_a_second_start_recalls_and_computes_the_same(tmp_path: Path) -> None:
    first, second = step(0, tmp_path / "cache"), step(0, tmp_path / "cache")
    assert first["traced"] is True and second["traced"] is False
    assert second["misses"] == 0 and second["hits"] == first["misses"]
    assert first["imported"] is True and second["imported"] is False
    assert (first["loss"], first["digest"]) == (second["loss"], second["digest"])
