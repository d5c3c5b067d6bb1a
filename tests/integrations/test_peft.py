"""peft: adapters train on sharded base weights, and are saved as peft saves them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.kernels.blockwise import dequantize, nf4_pairs, quantize
from tests.integrations.launched import launched, llama, rows
from tests.pool import Pool
from tests.thorough import thorough

pytest.importorskip("peft", reason="needs peft: pip install peft")

STEPS = 3


def adapted(dora: bool, checkpointed: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj"] if dora else ["q_proj", "v_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config)
    if checkpointed:
        model.train().gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def batch(step: int, ranks: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([rows(2 * STEPS)[2 * step + rank]["input_ids"] for rank in ranks])
    return {"input_ids": tokens, "labels": tokens}


def train(model: nn.Module, ranks: list[int]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, ranks)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(folder: str, dora: bool, checkpointed: bool) -> dict[str, Any]:
    # DoRA asks for the module of a parameter's class, which Dynamo cannot trace: its graph breaks.
    model = fxshard.compile(adapted(dora, checkpointed), lowering="eager", fullgraph=not dora)
    before = model.full_state_dict()
    losses = train(model, [dist.get_rank()])
    model.save_pretrained(folder)
    after = model.full_state_dict()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        "losses": losses,
        "changed": sorted(name for name in after if not torch.equal(before[name], after[name])),
        "frozen": frozen,
        "trained": {name: after[name] for name in after if "lora_" in name},
        "counted": model.get_nb_trainable_parameters(),
    }


@pytest.mark.shows("I5")
@pytest.mark.parametrize(("dora", "checkpointed"), [thorough(False, False), thorough(True, False), (False, True)])
def test_adapters_train_and_the_base_stays(ranks: Pool, tmp_path: Path, dora: bool, checkpointed: bool) -> None:
    from peft import PeftModel

    found = ranks(2, run, str(tmp_path), dora, checkpointed)
    plain = adapted(dora, checkpointed)
    expected = train(plain, [0, 1])
    means = [sum(losses) / 2 for losses in zip(*(each["losses"] for each in found), strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)
    mine = found[0]
    assert mine["changed"] and not mine["frozen"] & {*mine["changed"]}, "base weights are bitwise what they were"
    assert mine["counted"] == plain.get_nb_trainable_parameters()
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    weights = loaded.state_dict()
    assert len(mine["trained"]) == len([name for name in weights if "lora_" in name]) > 0
    for name, value in mine["trained"].items():
        assert torch.equal(weights[name], value), name
    assert not (tmp_path / "model.safetensors").exists()


def small() -> nn.Module:
    """Adapters in a model that is captured sooner than a Llama, and whose blocks of 64 weights have one scale each."""
    from peft import LoraConfig, get_peft_model

    from tests.integrations.tiny import tiny

    return get_peft_model(tiny(hidden_size=64), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def peft_trainer(folder: Path) -> Any:
    """With the best adapter at the end. The rate is so large that it is the one of the first evaluation."""
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, per_device_eval_batch_size=1, max_steps=4, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_steps=2,
        learning_rate=0.3, lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    own = sharded(Trainer, lowering="eager")
    return own(model=small(), args=args, train_dataset=rows(12), eval_dataset=rows(2))


def resumed_adapters(folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader

    from tests.pool import forget

    mine, again = Path(folder, "mine"), Path(folder, "again")
    with launched():
        straight = peft_trainer(mine)
        straight.train()
        best = straight.evaluate()["eval_loss"]
        straight.accelerator.wait_for_everyone()
        if straight.is_world_process_zero():
            shutil.copytree(mine / "checkpoint-2", again / "checkpoint-2")
        straight.accelerator.wait_for_everyone()
        logs = [straight.state.log_history]
    forget()
    with launched():
        resumed = peft_trainer(again)
        resumed.train(resume_from_checkpoint=True)
        logs.append(resumed.state.log_history)
    losses = [[entry.get("loss", entry.get("eval_loss")) for entry in log] for log in logs]
    return {
        "straight": losses[0][:6],
        "resumed": losses[1][:6],
        "best": (best, straight.state.best_metric, losses[0][5]),
        "stored": list(FileSystemReader(mine / "checkpoint-2" / "fxshard").read_metadata().state_dict_metadata),
        "files": sorted(path.name for path in (mine / "checkpoint-2").iterdir()),
    }


@pytest.mark.thorough
def test_checkpoints_of_a_trainer_have_the_adapter_alone_and_resume(ranks: Pool, tmp_path: Path) -> None:
    (found,) = ranks(1, resumed_adapters, str(tmp_path))
    assert found["resumed"] == found["straight"] and len(set(found["straight"])) == 6
    of_model = [key for key in found["stored"] if key.startswith("model.")]
    assert len(of_model) == 4 and all("lora_" in key for key in of_model)
    assert "adapter_model.safetensors" in found["files"] and "model.safetensors" not in found["files"]
    last, best, other = found["best"]
    assert last == best != other, "the best adapter was loaded at the end"


def quantized(folder: str, format: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """QLoRA: every rank has the same batches, so that the mean of gradients is each of them."""
    from tests.integrations.tiny import tiny

    model = fxshard.compile(fxshard.quantize_frozen(small(), format), lowering="eager")
    losses = train(model, [0])
    model.save_pretrained(folder)
    whole = fxshard.compile(fxshard.quantize_frozen(tiny(hidden_size=64).requires_grad_(False), format))
    with pytest.raises(fxshard.ConfigError, match=rf"kept in {format}.*fxshard.save"):  # a base without an adapter
        whole.save_pretrained(folder)
    return losses, {name: value for name, value in model.full_state_dict().items() if "lora_" in name}


def smoothed(folder: str) -> list[list[float]]:
    """Losses of a Trainer that smooths labels, with fxshard and without: it shifts them by the class of the model."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    found = []
    for cls in (sharded(Trainer, lowering="eager"), Trainer):
        args = TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=2, logging_steps=1, learning_rate=1e-1,
            label_smoothing_factor=0.1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        with launched():
            model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
            trainer = cls(model=model, args=args, train_dataset=rows(4))
            trainer.train()
            assert isinstance(trainer.model, PeftModel), "how TRL and Trainer ask for adapters"
            found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_a_trainer_sees_the_model_of_peft(ranks: Pool, tmp_path: Path) -> None:
    mine, peer = ranks(1, smoothed, str(tmp_path))[0]
    assert mine == pytest.approx(peer, rel=1e-5) and len(mine) == 2


def two_adapters() -> Any:
    """One that trains, with the head and an adapter on the embeddings, and one that does not."""
    from peft import LoraConfig, get_peft_model

    from tests.integrations.tiny import tiny

    first = LoraConfig(
        r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["head"], init_lora_weights=False
    )
    model = get_peft_model(tiny(), first)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    return model


def saved_adapters(folder: str) -> None:
    with launched():
        model = fxshard.compile(two_adapters(), lowering="eager")
        model.save_pretrained(Path(folder, "mine"))
        # As scripts for Accelerate write it.
        model.save_pretrained(Path(folder, "given"), is_main_process=True, state_dict=model.full_state_dict())


def test_files_are_those_of_peft_with_other_adapters_heads_and_embeddings(ranks: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    two_adapters().save_pretrained(tmp_path / "peft")
    ranks(2, saved_adapters, str(tmp_path))
    for file in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        expected = load_file(tmp_path / "peft" / file)
        for folder in ("mine", "given"):
            written = load_file(tmp_path / folder / file)
            assert written.keys() == expected.keys() and len(written) > 1
            assert all(torch.equal(written[name], expected[name]) for name in written)


def with_adapter_of_transformers() -> Any:
    """A model that has its adapter by ``add_adapter`` of ``transformers``, and is none of peft's."""
    from peft import LoraConfig

    from tests.integrations.tiny import tiny

    model = tiny()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["head"], init_lora_weights=False))
    return model


def save_adapter_of_transformers(folder: str) -> None:
    fxshard.compile(with_adapter_of_transformers(), lowering="eager").save_pretrained(folder)


def test_an_adapter_of_transformers_is_saved_as_it_does(ranks: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with_adapter_of_transformers().save_pretrained(theirs)
    ranks(2, save_adapter_of_transformers, str(mine))
    assert {path.name for path in mine.iterdir()} == {path.name for path in theirs.iterdir()}
    written, expected = (load_file(folder / "adapter_model.safetensors") for folder in (mine, theirs))
    assert written.keys() == expected.keys() and len(expected) == 3
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def resumed_with_adapter_of_transformers(folder: str) -> list[list[Any]]:
    """The log of a run, of one that resumes it, and of its own ``train`` again, from the checkpoint in the middle."""
    from transformers import Trainer, TrainingArguments

    from fxshard.integrations.transformers import sharded

    args = TrainingArguments(
        folder, per_device_train_batch_size=1, max_steps=2, logging_steps=1, save_steps=1, learning_rate=0.1,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    found = []
    with launched():
        for again in (False, True):
            model = with_adapter_of_transformers()
            trainer = sharded(Trainer, lowering="eager")(model=model, args=args, train_dataset=rows(4))
            for checkpoint in [f"{folder}/checkpoint-1"] if again else [None, f"{folder}/checkpoint-1"]:
                trainer.train(resume_from_checkpoint=checkpoint)
                found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_an_adapter_of_transformers_resumes(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks(1, resumed_with_adapter_of_transformers, str(tmp_path))[0]
    assert len(first) == 2 and others == [first, first]


@pytest.mark.parametrize("name", ["merge_and_unload", "merge_adapter", "unmerge_adapter", "unload"])
def test_methods_that_peft_hands_out_of_other_modules(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = fxshard.compile(get_peft_model(llama(), adapters), lowering="eager")
    with pytest.raises(fxshard.StateError, match=rf"{name}\(\) would change parameters"):
        getattr(model, name)()


def test_gradients_of_inputs_asked_for_after_compile() -> None:
    """peft's model hands out the method of the model of ``transformers`` inside of it."""
    model = fxshard.compile(small(), lowering="eager")
    model.enable_input_require_grads()
    assert train(model, [0]) == train(small(), [0])


def prompted(hidden: int) -> Any:
    """A model with prompts that are learned: themselves, or by a network with ``hidden`` units that makes them."""
    from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model

    sizes: dict[str, Any] = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    config = PromptEncoderConfig(**sizes, encoder_hidden_size=hidden) if hidden else PromptTuningConfig(**sizes)
    torch.manual_seed(0)
    return get_peft_model(llama(), config)


def save_prompts(folder: str, hidden: int) -> dict[str, torch.Tensor]:
    precision = fxshard.Precision(param=torch.bfloat16)
    model = fxshard.compile(prompted(hidden), lowering="eager", precision=precision)
    train(model, [dist.get_rank()])
    model.save_pretrained(folder)
    state = model.full_state_dict()
    train(model, [dist.get_rank()])  # weights that were lent are taken back
    return state


@pytest.mark.parametrize("hidden", [thorough(0), 16])
def test_prompts_are_computed_from_masters_and_saved(ranks: Pool, tmp_path: Path, hidden: int) -> None:
    from peft import PeftModel

    plain = prompted(hidden)
    plain.load_state_dict(ranks(2, save_prompts, str(tmp_path), hidden)[0])
    loaded = PeftModel.from_pretrained(llama(), str(tmp_path))
    found = loaded.prompt_encoder["default"].embedding.weight
    torch.testing.assert_close(found, plain.get_prompt_embedding_to_save("default"), check_dtype=True)


@pytest.mark.thorough
@pytest.mark.parametrize("format", [thorough("int8"), "nf4"])
def test_qlora_is_bitwise_lora_on_rounded_weights(ranks: Pool, tmp_path: Path, format: str) -> None:
    from peft import PeftModel

    from tests.integrations.tiny import tiny

    found = ranks(2, quantized, str(tmp_path), format)
    plain = small()
    with torch.no_grad():
        for name, module in plain.named_modules():
            if name.endswith("base_layer"):
                rounded = quantize(module.weight, format)
                pairs = nf4_pairs() if format == "nf4" else None
                module.weight.copy_(dequantize(*rounded, pairs, torch.float32))
    expected = train(plain, [0])
    weights = plain.state_dict()
    for losses, trained in found:
        assert losses == expected
        assert len(trained) == 4 and all(torch.equal(value, weights[name]) for name, value in trained.items())
    loaded = PeftModel.from_pretrained(tiny(hidden_size=64), tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in found[0][1].items())
