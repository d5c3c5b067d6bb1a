"""``save_pretrained`` of a sharded model: the files that ``transformers`` writes, without the model in one place."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch.errors import CheckpointError, ConfigError
from fxshard.frontend.exporting import SafetensorsWriter, refuse_groups, whole_tensors
from fxshard.frontend.frozen_linears import FrozenLinear
from fxshard.passes.options import bytes_in
from fxshard.runtime.borrowed import lent

if TYPE_CHECKING:
    from fxshard.frontend.module import ShardedModule


def save_pretrained(
    model: ShardedModule,
    save_directory: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    **unknown: Any,
) -> None:
    """Write a folder that ``from_pretrained`` reads: configuration, generation configuration, weights. Collective.

    Units are gathered one after the other, and the first rank writes; its memory holds a unit and a file of at most
    ``max_shard_size``. ``dtype``: what floating-point weights are converted to; by default they are saved as they are
    kept, in full. Files of an earlier save in the same folder are replaced once all new ones are written. Of a peft
    model the adapter is written, as peft does. ``state_dict``: whole tensors to write in place of the model's own.
    ``is_main_process`` and ``save_function``, which scripts for Accelerate give, change nothing.
    """
    model._sharding.agreement.meet("save_pretrained()")
    unknown = {name: value for name, value in unknown.items() if name not in ("is_main_process", "save_function")}
    if has_adapter(model._inner):
        return save_adapter(model, save_directory, state_dict, **unknown)
    kept = next((part for part in model._inner.modules() if isinstance(part, FrozenLinear)), None)
    if kept is not None:
        raise ConfigError(
            f"save_pretrained: frozen weights are kept in {kept.format}, and are not what they were; save what trains "
            "with fxshard.save(model, path, frozen=False), and take the frozen weights from where they came"
        )
    if unknown:
        raise ConfigError(
            f"save_pretrained({', '.join(unknown)}=...): a sharded model writes its own weights, from its first rank; "
            "it takes save_directory, max_shard_size, dtype and state_dict. Call it on every rank"
        )
    if not _of_transformers(model._inner):
        raise ConfigError(
            f"save_pretrained() of {type(model._inner).__name__} is not that of transformers, and would write sharded "
            "weights: write them with fxshard.checkpoint.save_safetensors(model, folder), or load "
            "model.full_state_dict() into a plain model and save that one"
        )
    save_weights(model, save_directory, max_shard_size=max_shard_size, dtype=dtype, state_dict=state_dict)


def save_weights(
    model: ShardedModule,
    directory: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model without adapter; of one that is none of ``transformers`` the weights alone. Collective."""
    refuse_groups(model._sharding)
    plain, agreement = model._inner, model._sharding.agreement
    final, size = Path(directory), bytes_in(max_shard_size)
    if size is None:
        raise ConfigError(f'max_shard_size={max_shard_size!r}: expected bytes, or a number with a unit, as "5GB"')
    aside = final.with_name(final.name + ".partial")
    first = model._sharding.channels.is_first
    export = _Export(plain, aside, size, dtype) if first else None
    failed = _attempt(export.begin) if export is not None else None
    given = any(agreement.share(state_dict is not None))
    if given and first and failed is None:
        failed = _attempt(_check_whole, state_dict)
    if not any(agreement.share(failed)):
        own = model._tensors()
        for names, value in _named_as(own, state_dict or {}) if given else whole_tensors(own, model._sharding.buckets):
            if export is not None and failed is None:  # after a failure the other ranks are still gathering
                failed = _attempt(export.add, names, value)
        if export is not None and failed is None:
            failed = _attempt(export.finish, final)
    if first:
        shutil.rmtree(aside, ignore_errors=True)
    problem = next((each for each in agreement.share(failed) if each), None)
    if problem is not None:
        raise CheckpointError(f"{final} was not saved: {problem}")


def _attempt(do: Callable[..., object], *args: Any) -> str | None:
    """Why something could not be done: the other ranks are told, and all raise the same."""
    try:
        do(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Export:
    """What the first rank writes."""

    def __init__(self, plain: nn.Module, aside: Path, file_bytes: int, dtype: torch.dtype | None) -> None:
        self._plain, self._aside, self._dtype = plain, aside, dtype
        self._writer = SafetensorsWriter(aside, file_bytes)
        self._tied = _tied(plain)
        self._left_out = getattr(plain, "_keys_to_ignore_on_save", None) or ()
        self._kept: torch.dtype | None = None

    def begin(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)

    def add(self, names: tuple[str, ...], value: torch.Tensor) -> None:
        """A tensor under the name that ``transformers`` reads: one of them where it is tied."""
        if value.is_floating_point():
            value = value if self._dtype is None else value.to(self._dtype)
            self._kept = self._kept or value.dtype
        if not _of_transformers(self._plain):
            for each in names:  # all that its state dict has
                self._writer.add(each, value)
            return
        name = next((name for name in names if name not in self._tied), names[0])
        if name not in self._left_out:
            for stored, part in _as_stored(self._plain, {name: value}).items():
                self._writer.add(stored, part)

    def finish(self, final: Path) -> None:
        self._writer.close()
        if _of_transformers(self._plain):
            self._write_configuration(self._plain.config)
        final.mkdir(parents=True, exist_ok=True)
        new = {file.name for file in self._aside.iterdir()}
        for old in final.iterdir():
            if old.name not in new and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name):
                old.unlink()
        for name in new:
            (self._aside / name).replace(final / name)

    def _write_configuration(self, config: Any) -> None:
        before = config.dtype, config.architectures
        # As transformers does; what is written is what the files have, not what this model computes in.
        config.dtype, config.architectures = str(self._kept).removeprefix("torch."), [type(self._plain).__name__]
        config.save_pretrained(self._aside)
        config.dtype, config.architectures = before
        if callable(can := getattr(self._plain, "can_generate", None)) and can():
            self._plain.generation_config.save_pretrained(self._aside)  # type: ignore[operator, union-attr]


def _of_transformers(plain: nn.Module) -> bool:
    """Whether a model is one of ``transformers``; a ``Trainer`` takes others, too."""
    return hasattr(plain, "save_pretrained") and hasattr(getattr(plain, "config", None), "save_pretrained")


def _tied(plain: nn.Module) -> Collection[str]:
    """Names that ``transformers`` may tie to others when it loads, and does not store then."""
    found = getattr(plain, "all_tied_weights_keys", None) or getattr(plain, "_tied_weights_keys", None)
    return found or ()


def _named_as(
    own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors of a whole state dict, each once, with all the names that the model has for it."""
    names: dict[int, list[str]] = {}
    for name in state:
        names.setdefault(id(own.get(name, state[name])), []).append(name)
    for each in names.values():
        yield tuple(each), state[each[0]]


def _check_whole(state: Mapping[str, torch.Tensor] | None) -> None:
    """Of a ``state_dict`` that was given: what the first rank has, which writes."""
    if not state or any(isinstance(value, DTensor) for value in state.values()):
        raise ConfigError(
            f"save_pretrained(state_dict=...): these tensors are {'sharded' if state else 'not on the first rank'}; "
            "leave state_dict out, or give model.full_state_dict(), which is taken on every rank"
        )


def _as_stored(plain: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors in the names and shapes of published files, where ``transformers`` (5 and later) keeps others in memory:
    its experts are stored one by one."""
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    return revert(plain, dict(tensors)) if revert is not None else tensors


def has_adapter(plain: nn.Module) -> bool:
    """Whether a model is one of peft's, or one of ``transformers`` with an adapter (``add_adapter``)."""
    return hasattr(plain, "peft_config") and (
        hasattr(plain, "get_base_model") or getattr(plain, "_hf_peft_config_loaded", False)
    )


def _learns_prompts(plain: Any) -> bool:
    return any(config.is_prompt_learning for config in plain.peft_config.values())


def save_adapter(
    model: ShardedModule,
    save_directory: str | PathLike[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    **options: Any,
) -> None:
    """Write all adapters, as ``PeftModel.from_pretrained`` reads them; of a model of ``transformers`` with
    ``add_adapter`` the one that is active, as it does itself. Collective; the first rank writes.

    ``state_dict``: whole tensors to take in place of the model's own; ``options``: those of peft's ``save_pretrained``.
    """
    plain: Any = model._inner
    sharding = model._sharding
    refuse_groups(sharding)
    trained = [bucket for bucket in sharding.buckets if bucket.plan.trainable]
    if not trained:
        raise ConfigError(
            "no parameter trains, so there is no adapter to save: set is_trainable=True when it is loaded"
        )
    own = model._tensors()
    wanted = {id(own[name]) for name in _of_adapters(plain, own)}
    wanted |= {id(parameter) for bucket in trained for parameter in bucket.params}
    gathered = [bucket for bucket in sharding.buckets if any(id(parameter) in wanted for parameter in bucket.params)]
    there = wanted | {id(parameter) for bucket in gathered for parameter in bucket.params}
    state = {name: value for name, value in own.items() if id(value) in there}
    first = sharding.channels.is_first
    whole: dict[str, torch.Tensor] = {}
    for each, value in whole_tensors(state, gathered):
        if first and id(own[each[0]]) in wanted:
            whole.update(dict.fromkeys(each, value.to("cpu", copy=True)))
    written = whole if state_dict is None else state_dict
    # Of prompts that are learned peft writes what it computes from parameters.
    prompts = {
        sharding.hollow[name]: whole[name].to(sharding.hollow[name].device)
        for bucket in (trained if _learns_prompts(plain) else ())
        for name in bucket.plan.params
        if name in whole
    }
    with lent(sharding.engine, prompts):
        failed = _attempt(_check_whole, written) if first else None
        if first and failed is None:
            failed = _attempt(partial(plain.save_pretrained, save_directory, state_dict=written, **options))
    problem = next((each for each in sharding.agreement.share(failed) if each), None)
    if problem is not None:
        raise CheckpointError(f"{save_directory} was not saved: {problem}")


def _of_adapters(plain: Any, state: Collection[str]) -> list[str]:
    """Names of what peft may write though it does not train: other adapters, and embeddings, which it writes where the
    vocabulary was resized or an adapter is on them."""
    embeddings, base = [], plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    for get in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):  # models without them
            embeddings.append(getattr(base, get)())
    modules = plain.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{name}." for name, module in modules if any(module is each for each in embeddings))
    adapters = {*plain.peft_config}
    return [name for name in state if name.startswith(prefixes) or adapters.intersection(name.split("."))]
