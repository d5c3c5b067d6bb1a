"""Random batches for small models of ``transformers``, by what the models read: text, images, sound, or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 96
LENGTH = 16
"""Tokens in a sequence."""
IMAGE_TOKEN = VOCABULARY - 1
IMAGE = 32
"""Pixels on a side."""
SEQUENCES = 2
LABELS = 5

Batch = dict[str, Any]
MakeBatch = Callable[[Any, torch.Generator], Batch]
"""From a model's configuration and the state of the dice."""


def text(config: Any, generator: torch.Generator) -> Batch:
    tokens = torch.randint(4, VOCABULARY - 2, (SEQUENCES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def short_text(config: Any, generator: torch.Generator) -> Batch:
    """For models that go through a text token by token: each is a piece of their graph."""
    tokens = torch.randint(4, VOCABULARY - 2, (SEQUENCES, LENGTH // 4), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def text_to_text(config: Any, generator: torch.Generator) -> Batch:
    source, target = torch.randint(4, VOCABULARY - 2, (2, SEQUENCES, LENGTH), generator=generator).unbind()
    return {"input_ids": source, "labels": target}


def image(config: Any, generator: torch.Generator) -> Batch:
    pixels = torch.randn(SEQUENCES, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(LABELS, (SEQUENCES,), generator=generator)}


def speech(config: Any, generator: torch.Generator) -> Batch:
    sound = torch.randn(SEQUENCES, 800, generator=generator)
    return {"input_values": sound, "labels": torch.randint(4, config.vocab_size, (SEQUENCES, 3), generator=generator)}


def spectrogram(config: Any, generator: torch.Generator) -> Batch:
    bands = torch.randn(SEQUENCES, config.max_length, config.num_mel_bins, generator=generator)
    return {"input_values": bands, "labels": torch.randint(LABELS, (SEQUENCES,), generator=generator)}


def spectrogram_to_text(config: Any, generator: torch.Generator) -> Batch:
    bands = torch.randn(SEQUENCES, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return {"input_features": bands, "labels": text(config, generator)["labels"]}


def frames_to_text(config: Any, generator: torch.Generator) -> Batch:
    frames = torch.randn(SEQUENCES, 2 * LENGTH, config.input_feat_per_channel, generator=generator)
    return {"input_features": frames, "labels": text(config, generator)["labels"]}


def pairs(config: Any, generator: torch.Generator) -> Batch:
    """Images and texts that belong together."""
    tokens = text(config, generator)["input_ids"]
    tokens[:, -1] = VOCABULARY - 1
    pixels = image(config, generator)["pixel_values"]
    return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


def image_and_text(config: Any, generator: torch.Generator, patches: int = 4) -> Batch:
    """A text in which so many tokens stand for patches of an image."""
    tokens = torch.randint(4, VOCABULARY - 2, (SEQUENCES, patches + LENGTH), generator=generator)
    labels = tokens.clone()
    tokens[:, 1 : 1 + patches], labels[:, 1 : 1 + patches] = IMAGE_TOKEN, -100
    pixels = torch.randn(SEQUENCES, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels}


def patches_and_text(config: Any, generator: torch.Generator) -> Batch:
    """For models that take patches of images of any size, four of which make one token."""
    made = image_and_text(config, generator)
    vision = config.vision_config
    side = IMAGE // vision.patch_size
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    made["pixel_values"] = torch.randn(SEQUENCES * side**2, width, generator=generator)
    made["image_grid_thw"] = torch.tensor([[1, side, side]] * SEQUENCES)
    made["mm_token_type_ids"] = (made["input_ids"] == IMAGE_TOKEN).to(torch.int32)
    return made


def series(config: Any, generator: torch.Generator) -> Batch:
    past = torch.randn(SEQUENCES, config.context_length, config.num_input_channels, generator=generator)
    future = torch.randn(SEQUENCES, config.prediction_length, config.num_input_channels, generator=generator)
    return {"past_values": past, "future_values": future}
