"""``transformers.Trainer`` with fxshard: the losses, evaluations and checkpoints of ``Trainer`` with FSDP2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import fxshard
from tests.integrations.launched import VOCAB, launched, llama, rows, with_fsdp2
from tests.pool import Pool
from tests.thorough import thorough

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")
pytest.importorskip("transformers", reason="needs the hf extra: pip install '.[hf]'")

STEPS = 8
FSDP2 = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def trainer(folder: Path, own: bool, peer: dict[str, Any] | None = FSDP2, **settings: Any) -> Any:
    """A Trainer with fxshard, or with FSDP2 (``peer=None``: DDP), over 24 rows.

    Four of them make a batch on two ranks: an epoch is six steps.
    """
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS // 2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"eval_strategy": "steps", "eval_steps": STEPS // 2, **settings, **((not own and peer) or {})},
    )
    cls = sharded(Trainer, lowering="eager") if own else with_fsdp2(Trainer) if peer else Trainer
    return cls(model=llama(), args=args, train_dataset=rows(24), eval_dataset=rows(4))


def history(done: Any) -> list[tuple[float, ...]]:
    """What a Trainer logged: (loss, gradient norm, learning rate) of steps, (loss,) of evaluations."""
    found: list[tuple[float, ...]] = []
    for entry in done.state.log_history:
        if "eval_loss" in entry:
            found.append((entry["eval_loss"],))
        elif "loss" in entry:
            found.append((entry["loss"], float(entry["grad_norm"]), entry["learning_rate"]))
    return found


def runs(folder: str) -> dict[str, Any]:
    """fxshard, FSDP2, and fxshard resumed in the middle of the first epoch."""
    import transformers

    from tests.pool import forget

    mine, again, peer = (Path(folder, name) for name in ("mine", "again", "peer"))
    found: dict[str, Any] = {}
    with launched():
        straight = trainer(mine, own=True)
        found["before training"] = straight.evaluate()["eval_loss"]
        straight.train()
        found["fxshard"] = history(straight)
        straight.save_model(str(mine / "saved"))
        found["weights"] = straight.model.full_state_dict()
        straight.accelerator.wait_for_everyone()
        if straight.is_world_process_zero():
            shutil.copytree(mine / f"checkpoint-{STEPS // 2}", again / f"checkpoint-{STEPS // 2}")
        straight.accelerator.wait_for_everyone()
    forget()
    with launched():
        resumed = trainer(again, own=True, eval_strategy="no")
        resumed.train(resume_from_checkpoint=True)
        found["resumed"] = history(resumed)
    with launched():
        other = trainer(peer, own=False, save_strategy="no")
        other.train()
        found["peer is FSDP2"] = any(isinstance(part, FSDPModule) for part in other.model_wrapped.modules())
        found["fsdp2"] = history(other)
    loaded = transformers.LlamaForCausalLM.from_pretrained(mine / "saved")
    found["loaded"] = dict(loaded.state_dict())
    found["files"] = sorted(path.name for path in (mine / f"checkpoint-{STEPS}").iterdir())
    return found


@pytest.fixture(scope="module")
def found(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks(2, runs, str(tmp_path_factory.mktemp("trainer")))[0]


@pytest.mark.shows("I1")
def test_losses_are_those_of_fsdp2(found: dict[str, Any]) -> None:
    assert found["peer is FSDP2"]
    assert len(found["fxshard"]) == STEPS + 2
    for mine, peer in zip(found["fxshard"], found["fsdp2"], strict=True):
        assert mine == pytest.approx(peer, rel=1e-5)
    assert found["fxshard"][-1][0] < found["before training"]


def filtered(folder: str, keep: bool) -> dict[str, Any]:
    """Losses that a Trainer logs every three steps if it reports NaN for two of them, and its argument afterwards."""
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    class Unlucky(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            return loss * float("nan") if self.state.global_step in (1, 4) else loss

    found: dict[str, Any] = {}
    for name, cls in (("fxshard", sharded(Unlucky, lowering="eager")), ("plain", Unlucky)):
        args = TrainingArguments(
            str(Path(folder, name)), per_device_train_batch_size=1, max_steps=6, logging_steps=3, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", logging_nan_inf_filter=keep,
        )  # fmt: skip
        with launched():
            done = cls(model=llama(), args=args, train_dataset=rows(6))
            done.train()
            found[name] = [entry["loss"] for entry in done.state.log_history if "loss" in entry]
            found[name + " argument"] = done.args.logging_nan_inf_filter
    return found


@pytest.mark.parametrize("keep", [thorough(True), thorough(False)])
def test_losses_that_are_not_finite_are_left_out_of_the_log_as_the_trainer_does(
    ranks: Pool, tmp_path: Path, keep: bool
) -> None:
    found = ranks(1, filtered, str(tmp_path), keep)[0]
    assert found["fxshard"] == pytest.approx(found["plain"], rel=1e-5, nan_ok=True)
    assert all(loss == loss for loss in found["fxshard"]) == keep
    assert found["fxshard argument"] == found["plain argument"] == keep


@pytest.mark.shows("I3")
def test_a_run_resumed_in_the_middle_of_an_epoch_continues_bitwise(found: dict[str, Any]) -> None:
    *steps, last_evaluation = found["fxshard"]
    assert found["resumed"] == steps and len(last_evaluation) == 1


def test_what_was_saved_is_a_model_of_transformers(found: dict[str, Any]) -> None:
    weights, loaded = found["weights"], found["loaded"]
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert {"config.json", "model.safetensors", "scheduler.pt", "fxshard", "trainer_state.json"} <= {*found["files"]}
    assert "optimizer.pt" not in found["files"]


def best_and_smoothed(folder: str) -> dict[str, Any]:
    """Label smoothing, bf16 and the best model at the end; a second ``train`` of the same Trainer."""
    found: dict[str, Any] = {}
    settings = {"label_smoothing_factor": 0.1, "load_best_model_at_end": True, "save_total_limit": 1}
    with launched():
        mine = trainer(Path(folder, "mine"), own=True, **settings)
        mine.train()
        found["mine"] = history(mine)
        found["best"] = mine.evaluate()["eval_loss"], mine.state.best_metric
        mine.train()
        found["mine again"] = history(mine)
    with launched():
        # With DDP: FSDP2 renames the model's class, by which the Trainer knows that labels are to be shifted.
        peer = trainer(Path(folder, "peer"), own=False, peer=None, **settings)
        peer.train()
        found["peer"] = history(peer)
        peer.train()
        found["peer again"] = history(peer)
    return found


@pytest.mark.thorough
def test_label_smoothing_and_the_best_model(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(2, best_and_smoothed, str(tmp_path))[0]
    for mine, peer in zip(found["mine"], found["peer"], strict=True):
        assert mine == pytest.approx(peer, rel=1e-5)
    for mine, peer in zip(found["mine again"], found["peer again"], strict=True):
        assert mine == pytest.approx(peer, rel=1e-4), "the second call of train() goes on with weights and moments"
    last, best = found["best"]
    assert last == best


def refusal(folder: str) -> str:
    from transformers import Trainer, TrainingArguments

    with launched():
        args = TrainingArguments(folder, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
        plain = Trainer(model=llama(), args=args, train_dataset=rows(4))
        plain.train()
        plain._save_checkpoint(plain.model, None)
    with launched():
        mine = trainer(Path(folder), own=True)
        with pytest.raises(fxshard.CheckpointError) as caught:
            mine.train(resume_from_checkpoint=True)
        return str(caught.value)


def test_a_checkpoint_of_a_plain_trainer_is_not_resumed(ranks: Pool, tmp_path: Path) -> None:
    assert "without fxshard" in ranks(1, refusal, str(tmp_path))[0]


def metrics_of_logits(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    args = TrainingArguments(folder, use_cpu=True, report_to=[])
    with launched(), pytest.raises(fxshard.ConfigError, match="compute_metrics gets logits, and with return_logits"):
        sharded(Trainer, return_logits=False)(model=llama(), args=args, compute_metrics=len)


def test_metrics_need_logits(ranks: Pool, tmp_path: Path) -> None:
    ranks(1, metrics_of_logits, str(tmp_path))


class Rating(torch.nn.Module):
    """None of ``transformers``, which a Trainer takes as well: its loss stands in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)
        self.tied = torch.nn.Linear(8, VOCAB)
        self.tied.weight = self.head.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        logits = self.tied(hidden) + self.head(hidden.tanh())
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rated(folder: str) -> dict[str, list[float]]:
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    found: dict[str, Any] = {}
    for name, cls in (("mine", sharded(Trainer, lowering="eager")), ("peer", Trainer)):
        args = TrainingArguments(
            str(Path(folder, name)), per_device_train_batch_size=2, max_steps=4, logging_steps=1, learning_rate=0.1,
            save_strategy="steps" if name == "mine" else "no", save_steps=2, use_cpu=True, report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        with launched():
            made = cls(model=Rating(), args=args, train_dataset=rows(16))
            made.train()
            found[name] = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
            if name == "mine":
                made.save_model(folder)
                with pytest.raises(AttributeError):
                    made.model.save_pretrained(folder)
    with launched():
        args.output_dir, args.save_strategy = str(Path(folder, "mine")), "no"
        again = sharded(Trainer, lowering="eager")(model=Rating(), args=args, train_dataset=rows(16))
        again.train(resume_from_checkpoint=str(Path(folder, "mine", "checkpoint-2")))
        found["again"] = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    plain = Rating()
    plain.load_state_dict(load_file(Path(folder, "model.safetensors")))
    with torch.no_grad():
        row = {name: value[None] for name, value in rows(1)[0].items()}
        found["loaded"] = [plain(**row)["loss"].item(), made.model.cpu()(**row)["loss"].item()]
    return found


def test_a_module_of_torch_alone_is_saved_and_resumed(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(1, rated, str(tmp_path))[0]
    assert found["mine"] == pytest.approx(found["peer"], rel=1e-5) and found["again"] == found["mine"]
    assert found["loaded"][0] == pytest.approx(found["loaded"][1], rel=1e-5)
    assert not (tmp_path / "config.json").exists()


def noisy(folder: str, lengths: list[int], fullgraph: bool) -> list[list[float]]:
    """Losses with NEFTune, of a Trainer with fxshard and of a plain one, on rows of these lengths."""
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    found = []
    for cls in (sharded(Trainer, lowering="eager", fullgraph=fullgraph), Trainer):
        args = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=len(lengths), logging_steps=1, learning_rate=1e-1,
            neftune_noise_alpha=5.0, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        with launched():
            data = [rows(len(lengths), length)[i] for i, length in enumerate(lengths)]
            trainer = cls(model=llama(), args=args, train_dataset=data)
            trainer.train()
            found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


@pytest.mark.parametrize(("lengths", "fullgraph"), [([8, 8, 8], True), thorough([8, 9, 10], False)])
def test_noise_on_embeddings(ranks: Pool, tmp_path: Path, lengths: list[int], fullgraph: bool) -> None:
    mine, peer = ranks(1, noisy, str(tmp_path), lengths, fullgraph)[0]
    assert mine == pytest.approx(peer, rel=1e-5) and len({*mine}) == 3
