"""Checkpoints that move between world sizes, stages and layouts, with ``torch.distributed.checkpoint`` underneath."""

from fxshard.checkpoint.folder import check, latest
from fxshard.checkpoint.hugging_face import load_safetensors, save_safetensors
from fxshard.checkpoint.loading import Loaded, load
from fxshard.checkpoint.megatron import TRANSFORMERS_LLAMA, load_megatron
from fxshard.checkpoint.saving import Save, save, wait_for_save

__all__ = [
    "TRANSFORMERS_LLAMA",
    "Loaded",
    "Save",
    "check",
    "latest",
    "load",
    "load_megatron",
    "load_safetensors",
    "save",
    "save_safetensors",
    "wait_for_save",
]
