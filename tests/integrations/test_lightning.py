"""Lightning's Trainer: a run with fxshard's strategy has the losses of one with FSDP2, and resumes bitwise."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fxshard
from tests.integrations.launched import launched, llama, rows
from tests.pool import Pool

INSTALLED = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name) is not None]
if not INSTALLED:
    pytest.skip("needs Lightning: pip install pytorch-lightning", allow_module_level=True)

STEPS, EPOCHS, PARTS = 10, 2, 2
"""Steps of an epoch, epochs, micro-batches of a step."""


def tools(package: str) -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``."""
    return importlib.import_module("lightning.pytorch" if package == "lightning" else package)


def own(package: str, **options: Any) -> Any:
    strategies: Any = importlib.import_module(f"fxshard.integrations.{package}")
    return strategies.FxshardStrategy(lowering="eager", **options)


def lit(package: str, **changes: Any) -> Any:
    """A LightningModule as its documentation writes them."""
    pl = tools(package)

    class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            self.teacher = nn.Linear(2, 2).requires_grad_(False)
            self.losses: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(float(self.all_gather(loss.detach()).sum()))
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch).loss, sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self) -> Any:
            decayed = [parameter for parameter in self.parameters() if parameter.requires_grad and parameter.ndim > 1]
            others = [parameter for parameter in self.parameters() if parameter.requires_grad and parameter.ndim < 2]
            groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return type("Lit", (Lit,), changes)()


def trainer(package: str, strategy: Any, folder: str, **arguments: Any) -> Any:
    pl = tools(package)
    saving = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True, every_n_epochs=1)
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 2, "max_epochs": EPOCHS, "accumulate_grad_batches": PARTS,
        "gradient_clip_val": 0.5, "callbacks": [saving], "logger": False, "enable_progress_bar": False,
        "enable_model_summary": True, "default_root_dir": folder, "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **{**defaults, **arguments})


def loaders() -> tuple[Any, Any]:
    """Batches of one row; Lightning shuffles them and deals them to the ranks."""
    made = torch.utils.data.DataLoader
    return made(rows(2 * PARTS * STEPS)), made(rows(4, length=10))  # type: ignore[arg-type]


def fit(package: str, strategy: Any, folder: str, module: Any = None, **arguments: Any) -> Any:
    module = lit(package) if module is None else module
    ckpt_path = arguments.pop("ckpt_path", None)
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers of data loaders
        tools(package).seed_everything(0)
        running = trainer(package, strategy, folder, **arguments)
        running.fit(module, *loaders(), ckpt_path=ckpt_path)
    return module, running


def fsdp2(package: str, folder: str) -> Any:
    """The same module as Lightning's own strategy for FSDP2 wants it."""
    from torch.distributed.fsdp import fully_shard

    def configure_model(self: Any) -> None:
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    strategy = tools(package).strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module, _ = fit(package, strategy, folder, lit(package, configure_model=configure_model))
    return module


def runs(package: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module, running = fit(package, own(package), folder)
    found["straight"], found["validated"] = module.losses, module.validated
    found["rate"] = running.optimizers[0].param_groups[0]["lr"]
    found["held"] = module.model.bytes_at_rest()["param"] / sum(p.nbytes for p in llama().parameters())
    found["files"] = sorted(path.name for path in Path(folder).iterdir())
    first = str(Path(folder, "epoch=0.ckpt"))
    module, running = fit(package, own(package), str(Path(folder, "again")), ckpt_path=first)
    found["resumed"], found["resumed rate"] = module.losses, running.optimizers[0].param_groups[0]["lr"]
    with launched():
        again = lit(package)
        evaluating = trainer(package, own(package), folder)
        evaluating.validate(again, loaders()[1], ckpt_path=str(Path(folder, "last.ckpt")), verbose=False)
        found["loaded"] = again.validated
    peer = fsdp2(package, str(Path(folder, "peer")))
    found["peer"], found["peer validated"] = peer.losses, peer.validated
    return found


@pytest.mark.shows("I6")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", INSTALLED[:1])
def test_trains_evaluates_saves_and_resumes(package: str, ranks: Pool, tmp_path: Path) -> None:
    for found in ranks(2, runs, package, str(tmp_path)):
        assert len(found["straight"]) == EPOCHS * STEPS * PARTS
        assert found["straight"] == pytest.approx(found["peer"], rel=1e-5)
        assert found["validated"] == pytest.approx(found["peer validated"], rel=1e-5)
        assert found["resumed"] == found["straight"][STEPS * PARTS :], "the second epoch, bitwise"
        assert found["loaded"] == found["validated"][-1:]
        assert found["rate"] == found["resumed rate"] == pytest.approx(1e-2 * 0.9 ** (EPOCHS * STEPS))
        assert found["held"] < 0.6, "a rank holds half of the model"
        assert {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"} <= set(found["files"])


def message(package: str, folder: str, module: Any = None, strategy: Any = None, **arguments: Any) -> str:
    """What a run is refused with."""
    with pytest.raises(fxshard.FxshardError) as caught:
        fit(package, own(package) if strategy is None else strategy, folder, module, devices=1, **arguments)
    return str(caught.value)


def refusals(package: str, folder: str) -> dict[str, str]:
    pl = tools(package)
    weights = str(Path(folder, "weights.ckpt"))
    _, running = fit(package, own(package), folder, devices=1, max_steps=1, limit_val_batches=0)
    running.save_checkpoint(weights, weights_only=True)
    apart = lit(package)
    apart.head = nn.Linear(2, 2)
    nothing = lit(package)
    nothing.requires_grad_(False)
    several = lit(package, configure_optimizers=lambda self: [torch.optim.SGD(self.parameters()) for _ in range(2)])
    several.automatic_optimization = False  # Lightning wants it for two
    stray = nn.Linear(2, 2)
    elsewhere = lit(package, configure_optimizers=lambda self: torch.optim.SGD(stray.parameters()))
    file = Path(folder, "plain.ckpt")
    torch.save({}, file)
    return {
        "autocast": message(package, folder, precision="bf16-mixed"),
        "half": message(package, folder, precision="bf16-true"),
        "apart": message(package, folder, apart),
        "nothing": message(package, folder, nothing),
        "several": message(package, folder, several, accumulate_grad_batches=1, gradient_clip_val=None),
        "elsewhere": message(package, folder, elsewhere),
        "two optimizers": message(package, folder, strategy=own(package, optimizer=fxshard.AdamW())),
        "twice": message(package, folder, lit(package, configure_model=compiled)),
        "compiled": message(package, folder, torch.compile(lit(package))),
        "norms": message(package, folder, sync_batchnorm=True),
        "plugin": message(package, folder, plugins=[pl.plugins.io.AsyncCheckpointIO()]),
        "weights": message(package, folder, ckpt_path=weights),
        "file": message(package, folder, ckpt_path=str(file)),
    }


SAID = {
    "autocast": "precision=fxshard.Precision", "half": "precision=fxshard.Precision", "apart": "model, head. Put",
    "nothing": "nothing. Put", "several": "2 optimizers", "two optimizers": r"return self\.model\.optimizer",
    "compiled": "without torch.compile", "norms": "sync_batchnorm", "twice": "compiled already",
    "file": "load_from_checkpoint", "plugin": "AsyncCheckpointIO",
    "elsewhere": r"none of the LightningModule's", "weights": r"fxshard\.load\(self\.model, path, weights_only=True\)",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_what_is_refused(ranks: Pool, tmp_path: Path) -> None:
    (found,) = ranks(1, refusals, INSTALLED[0], str(tmp_path))
    for case, text in found.items():
        assert re.search(SAID[case], text), f"{case}: {text}"


def by_hand(self: Any, batch: Any, index: int) -> None:
    optimizer = self.optimizers()
    loss = self.model(**batch).loss
    self.losses.append(float(loss.detach()))
    optimizer.zero_grad()
    self.manual_backward(loss)
    self.clip_gradients(optimizer, 0.01, "value")
    optimizer.step()


def compiled(self: Any) -> None:
    if not isinstance(self.model, fxshard.ShardedModule):  # Lightning calls it for every stage
        self.model = fxshard.compile(self.model, lowering="eager")


def kinds(package: str, folder: str) -> dict[str, list[float]]:
    """The losses of ways to optimize that Lightning's users have."""
    short: dict[str, Any] = {"devices": 1, "max_steps": 3, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    short |= {"use_distributed_sampler": False, "limit_val_batches": 0}
    value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    manual = {"training_step": by_hand, "automatic_optimization": False}
    ours = lit(package, configure_optimizers=lambda self: self.model.optimizer)
    early = lit(package, configure_optimizers=lambda self: self.made)
    early.made = adamw(early.model.parameters())
    stepped = lit(package, configure_optimizers=lambda self: adamw(self.model.parameters()), **manual)
    there = lit(package, configure_model=compiled, configure_optimizers=lambda self: adamw(self.model.parameters()))
    plain_strategy = type(own(package))()
    own_adamw = own(package, optimizer=fxshard.AdamW(lr=1e-2, weight_decay=1e-2))
    return {
        "fxshard.AdamW": fit(package, own_adamw, folder, ours, **{**short, **value})[0].losses,
        "made in __init__": fit(package, own(package), folder, early, **{**short, **value})[0].losses,
        "compiled in configure_model": fit(package, plain_strategy, folder, there, **{**short, **value})[0].losses,
        "stepped by hand": fit(package, own(package), folder, stepped, **short)[0].losses,
    }


@pytest.mark.timeout(300)
def test_ways_to_optimize(ranks: Pool, tmp_path: Path) -> None:
    model, losses = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for row in rows(3):
        loss = model(**{name: value[None] for name, value in row.items()}).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    (found,) = ranks(1, kinds, INSTALLED[0], str(tmp_path))
    for kind, seen in found.items():
        assert seen == pytest.approx(losses, rel=1e-5), kind


def with_adapter() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)  # type: ignore[arg-type]


def stages(package: str, folder: str) -> dict[str, Any]:
    """Fit, validate, test and predict with one Trainer, of a model with an adapter."""

    def test_step(self: Any, batch: Any, index: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self: Any, batch: Any, index: int) -> float:
        return float(self.model(**batch).loss)

    def adamw(self: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = lit(package, test_step=test_step, predict_step=predict_step, configure_optimizers=adamw)
    module.model = with_adapter()
    saving = tools(package).callbacks.ModelCheckpoint(folder, filename="best", monitor="val_loss")
    short: dict[str, Any] = {"devices": 1, "max_epochs": 1, "limit_train_batches": 3, "accumulate_grad_batches": 1}
    short |= {"gradient_clip_val": None, "use_distributed_sampler": False, "callbacks": [saving]}
    _, running = fit(package, own(package), folder, module, **short)
    batches = loaders()[1]
    with launched():
        (validated,) = running.validate(module, batches, verbose=False)
        (tested,) = running.test(module, batches, ckpt_path="best", verbose=False)
        predicted = running.predict(module, batches)
    stored = dcp.FileSystemReader(Path(folder, "best.ckpt")).read_metadata().state_dict_metadata
    found = {"losses": module.losses, "validated": validated["val_loss"], "tested": tested["test_loss"]}
    return {**found, "predicted": predicted, "stored": list(stored)}


@pytest.mark.timeout(300)
def test_stages_with_an_adapter(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the integrations extra")
    model, losses = with_adapter(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for row in rows(3):
        loss = model(**{name: value[None] for name, value in row.items()}).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    evaluated = [float(model(**{name: value[None] for name, value in row.items()}).loss) for row in rows(4, length=10)]
    (found,) = ranks(1, stages, INSTALLED[0], str(tmp_path))
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["predicted"] == pytest.approx(evaluated, rel=1e-5)
    assert found["validated"] == found["tested"] == pytest.approx(sum(evaluated) / 4, rel=1e-5)
    assert any("lora_A" in name for name in found["stored"])
    assert not any("embed_tokens" in name or "base_layer" in name for name in found["stored"])


def script(folder: str) -> None:
    """The page's script, in a process that is one of one."""
    page = (Path(__file__).parents[2] / "docs/howto/fabric.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Trainer" in block)
    assert len(code.splitlines()) <= 40
    code = code.replace("lightning.pytorch", INSTALLED[0] if INSTALLED[0] != "lightning" else "lightning.pytorch")
    code = code.replace("integrations.lightning", f"integrations.{INSTALLED[0]}")
    with launched(), contextlib.chdir(folder):
        exec(code.replace("zero=3", 'zero=3, lowering="eager"'), {"llama": llama, "data": rows(8)})


@pytest.mark.timeout(300)
def test_the_script_of_the_page_runs(ranks: Pool, tmp_path: Path) -> None:
    ranks(1, script, str(tmp_path))
    assert list(tmp_path.rglob("*.ckpt")), "and saves checkpoints"
