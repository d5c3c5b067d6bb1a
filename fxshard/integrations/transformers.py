"""transformers: a ``Trainer`` of any class, TRL's included, whose model fxshard shards and compiles.

from transformers import PreTrainedModel, Trainer
from fxshard.integrations.transformers import sharded

trainer = sharded(Trainer, zero=3)(model=model, args=args, train_dataset=data)
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

import fxshard
from fxshard import CheckpointError, ConfigError, ShardedModule
from fxshard.checkpoint import load_safetensors
from fxshard.frontend.pretrained import has_adapter, save_weights
from fxshard.integrations.accelerate import FOLDER, Accelerator

Class = TypeVar("Class", bound=type[Trainer])


def sharded(trainer: Class, **options: Any) -> Class:
    """A subclass of a ``Trainer`` that trains with fxshard. ``options``: what ``fxshard.compile`` is given.

    ``TrainingArguments(bf16=True)`` computes in bf16 with fp32 masters and reductions. Checkpoints have the weights as
    ``save_pretrained`` writes them, and a folder from which training resumes, on any number of ranks.
    ``fsdp``, ``deepspeed`` and ``torch_compile`` of the arguments stay unset.

    >>> trainer = sharded(Trainer, zero=3)(model=model, args=args, train_dataset=data)
    """
    own = {"__doc__": trainer.__doc__, "__module__": trainer.__module__, "_compile_options": options}
    return type(trainer.__name__, (_Sharded, trainer), own)  # type: ignore[return-value]


def _generates(args: Any) -> bool:
    """Whether metrics are those of generated tokens, as of a ``Seq2SeqTrainer``."""
    return bool(getattr(args, "predict_with_generate", False))


_Mixin: Any = object
"""Stands before a class of trainers, whichever it is."""


class _Sharded(_Mixin):
    """A ``Trainer`` whose model is sharded."""

    _compile_options: dict[str, Any] = {}
    accelerator: Any
    gather_function: Any
    _filters_losses = False

    # -- preparing ---------------------------------------------------------------------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wants = [name for name in ("compute_metrics", "preprocess_logits_for_metrics") if getattr(self, name, None)]
        if wants and not self._compile_options.get("return_logits", True) and not _generates(self.args):
            raise ConfigError(
                f"{wants[0]} gets logits, and with return_logits=False there are none where a loss is computed: the "
                "Trainer would leave metrics out without a word. Leave out return_logits, or the metrics"
            )
        reference = getattr(self, "ref_model", None)  # of TRL's DPOTrainer: as large as the model, and only read
        if isinstance(reference, nn.Module) and not getattr(self.args, "sync_ref_model", False):
            self.ref_model = self.accelerator.shard_frozen(reference)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        gather = self.gather_function
        self.accelerator = Accelerator(**self._accelerator_args, options=self._compile_options)
        settings = gather.keywords if isinstance(gather, functools.partial) else {}
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, **settings)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # The plain model is empty now: as with FSDP, this is the model from here on.
        self.model = self.callback_handler.model = self.model_wrapped
        return prepared

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """``logging_nan_inf_filter`` looks at each loss on the host, which waits for the device at every step.

        ``training_step`` here does the same on the device.
        """
        self._filters_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter, self._filters_losses = self._filters_losses, False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not self._filters_losses:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, mean)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``from_pretrained`` reads it; of one that is none of ``transformers``, the weights.

        Collective.
        """
        if not isinstance(self.model, ShardedModule):
            return super().save_model(output_dir, _internal_call)
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if isinstance(self.model._inner, PreTrainedModel) or has_adapter(self.model._inner):
            self.model.save_pretrained(folder)
        else:
            save_weights(self.model, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self._arguments_as_given(), folder / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _arguments_as_given(self) -> Any:
        given = copy.copy(self.args)
        given.logging_nan_inf_filter = self._filters_losses or self.args.logging_nan_inf_filter
        return given

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not isinstance(self.model, ShardedModule):
            return super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_sharded(self.model, Path(output_dir, FOLDER), self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        model = self.model_wrapped
        if checkpoint is None or not isinstance(model, ShardedModule):
            return super()._load_optimizer_and_scheduler(checkpoint)
        folder = Path(checkpoint, FOLDER)
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no folder {FOLDER!r}: it was saved by a Trainer without fxshard, whose optimizer "
                "state is not sharded; start from its weights instead (from_pretrained) and do not resume"
            )
        fxshard.load(model, folder, optimizer=self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target = self.model if model is None else model
        added = isinstance(target, PreTrainedModel) and has_adapter(target)  # transformers looks for whole weights then
        if Path(resume_from_checkpoint, FOLDER).is_dir() and (added or isinstance(target, ShardedModule)):
            return None  # _load_optimizer_and_scheduler loads what this folder has, weights included
        if not isinstance(target, ShardedModule):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_safetensors(target, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not isinstance(self.model, ShardedModule):
            return super()._load_best_model()
        best = Path(self.state.best_model_checkpoint)
        if Path(best, FOLDER).is_dir():
            fxshard.load(self.model, Path(best, FOLDER), weights_only=True)
        elif has_adapter(self.model._inner):
            raise CheckpointError(
                f"{best} has an adapter as peft writes it, and no folder {FOLDER!r}: leave save_only_model out, or "
                "load it with PeftModel.from_pretrained into a plain model"
            )
        else:
            load_safetensors(self.model, best)
