"""Architectures of ``transformers`` for the coverage table: which class, how small, and what it reads.

To add one is to add a line here. Sizes are those of a toy; everything else is as the configuration has it by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxshard.bench import sample_batches as batches
from fxshard.bench.sample_batches import IMAGE, IMAGE_TOKEN, LABELS, LENGTH, VOCABULARY, Batch, MakeBatch
from fxshard.bench.target import transformers

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model of ``transformers`` in small."""

    name: str
    model: str
    """The class of the model; its configuration's is the class's own."""
    sizes: Sizes
    batch: MakeBatch = batches.text
    depth: tuple[str, ...] = ("num_hidden_layers",)
    """Which fields are numbers of layers; dots lead into configurations inside."""
    kind: str = ""
    """Under which heading it stands in the table."""

    def takes_turns(self, layers: int) -> bool:
        """Whether several kinds of attention take turns in its layers."""
        kinds = [getattr(each, "layer_types", None) or () for each in _with_inner(self.config(layers))]
        return any(len(set(each)) > 1 and any("attention" in kind for kind in each) for each in kinds)

    def config(self, layers: int) -> Any:
        """Its configuration, of the class's own kind."""
        sizes = _nested(self.sizes)
        for path in self.depth:
            _put(sizes, path.split("."), layers)
        config = self._class().config_class(**sizes)
        for each in _with_inner(config):
            for name, value in vars(each).items():
                if isinstance(value, float) and any(part in name for part in DRAWING):
                    setattr(each, name, 0.0)
        return config

    def build(self, layers: int) -> nn.Module:
        """The same weights every time."""
        config = self.config(layers)
        torch.manual_seed(0)
        model: nn.Module = self._class()(config)
        return model.train()

    def make_batch(self, seed: int) -> Batch:
        return self.batch(self.config(1), torch.Generator().manual_seed(seed))

    def _class(self) -> Any:
        return getattr(transformers(), self.model)


def _nested(sizes: Sizes) -> dict[str, Any]:
    return {name: _nested(value) if isinstance(value, Mapping) else value for name, value in sizes.items()}


def _put(sizes: dict[str, Any], path: list[str], layers: int) -> None:
    """Where stages have depths of their own, the third is the deep one."""
    for name in path[:-1]:
        sizes = sizes[name]
    before = sizes.get(path[-1])
    sizes[path[-1]] = [*before[:2], layers, *before[3:]] if isinstance(before, list | tuple) else layers


def _with_inner(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _with_inner(value)


DRAWING = ("drop", "jitter", "mask_time_prob", "mask_feature_prob", "noise")
"""Parts of the names of fields that say how often something is drawn."""


WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**WIDTH, **TEXT, "num_key_value_heads": 2}
NO_GROUPS = {**WIDTH, **TEXT}
HEADS_OF_8 = {**DECODER, "head_dim": 8}
WINDOW = {"sliding_window": LENGTH // 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
BART = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, "d_model": 32, "decoder_start_token_id": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0}
PIXELS = {**WIDTH, "image_size": IMAGE, "patch_size": 8, "num_labels": LABELS}
STAGES = {"num_labels": LABELS, "hidden_sizes": [8, 16, 32, 64]}
SOUND = {
    **{**WIDTH, "vocab_size": 12, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2},
}
BOTH_LAYERS = ("encoder_layers", "decoder_layers")
BOTH_STACKS = ("num_layers", "num_decoder_layers")
TOWERS = ("text_config.num_hidden_layers", "vision_config.num_hidden_layers")

decoder = partial(Architecture, kind="decoder")
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
DECODERS = (
    decoder("llama", "LlamaForCausalLM", DECODER),
    decoder("mistral", "MistralForCausalLM", {**DECODER, **WINDOW}),
    decoder("qwen2", "Qwen2ForCausalLM", DECODER),
    decoder("qwen3", "Qwen3ForCausalLM", HEADS_OF_8),
    decoder("gemma2", "Gemma2ForCausalLM", {**HEADS_OF_8, **WINDOW}),
    decoder("gemma3", "Gemma3ForCausalLM", {**HEADS_OF_8, **WINDOW}),
    decoder("phi3", "Phi3ForCausalLM", DECODER),
    decoder("gpt2", "GPT2LMHeadModel", GPT2, depth=("n_layer",)),
    decoder("gpt-neox", "GPTNeoXForCausalLM", NO_GROUPS),
    decoder("opt", "OPTForCausalLM", {**NO_GROUPS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    decoder("bloom", "BloomForCausalLM", {**TEXT, "hidden_size": 32, "n_head": 4}, depth=("n_layer",)),
    decoder("falcon", "FalconForCausalLM", NO_GROUPS),
    decoder("stablelm", "StableLmForCausalLM", DECODER),
    decoder("olmo2", "Olmo2ForCausalLM", DECODER),
    decoder("cohere2", "Cohere2ForCausalLM", {**DECODER, **WINDOW}),
)

mixture = partial(Architecture, kind="mixture of experts")
DEEPSEEK = {
    **{**NO_GROUPS, **LATENT, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
LLAMA4 = {**HEADS_OF_8, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": LENGTH // 2}
MIXTURES = (
    mixture("mixtral", "MixtralForCausalLM", {**DECODER, **LOCAL_EXPERTS}),
    mixture("qwen2-moe", "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 32}),
    mixture("qwen3-moe", "Qwen3MoeForCausalLM", {**HEADS_OF_8, **EXPERTS}),
    mixture("olmoe", "OlmoeForCausalLM", {**DECODER, **EXPERTS}),
    mixture("gpt-oss", "GptOssForCausalLM", {**HEADS_OF_8, **LOCAL_EXPERTS, **WINDOW}),
    mixture("deepseek-v3", "DeepseekV3ForCausalLM", DEEPSEEK),
    mixture("llama4", "Llama4ForCausalLM", LLAMA4),
)

state_space = partial(Architecture, kind="state space")
STATE = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "pad_token_id": 0}
MAMBA2 = {**STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
FALCON_H1 = {
    **{**DECODER, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4},
    **{"mamba_n_groups": 1, "mamba_d_ssm": 64},
}
JAMBA = {
    **{**DECODER, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4},
    **{"attn_layer_period": 3, "attn_layer_offset": 1},
}
GATED_DELTA = {
    **{**HEADS_OF_8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
STATE_SPACES = (
    state_space("mamba", "MambaForCausalLM", STATE, batches.short_text),
    state_space("mamba2", "Mamba2ForCausalLM", MAMBA2, batches.short_text),
    state_space("falcon-h1", "FalconH1ForCausalLM", FALCON_H1, batches.short_text),
    state_space("jamba", "JambaForCausalLM", JAMBA, batches.short_text),
    state_space("lfm2", "Lfm2ForCausalLM", DECODER),
    state_space(
        "qwen3-next", "Qwen3NextForCausalLM", {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    state_space("qwen3.5", "Qwen3_5ForCausalLM", GATED_DELTA),
)

encoder = partial(Architecture, kind="encoder")
DISTIL = {**TEXT, "dim": 32, "hidden_dim": 64, "n_heads": 4}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
ENCODERS = (
    encoder("bert", "BertForMaskedLM", NO_GROUPS),
    encoder("roberta", "RobertaForMaskedLM", NO_GROUPS),
    encoder("distilbert", "DistilBertForMaskedLM", DISTIL, depth=("n_layers",)),
    encoder("albert", "AlbertForMaskedLM", {**NO_GROUPS, "embedding_size": 16}),
    encoder(
        "modernbert", "ModernBertForMaskedLM", {**NO_GROUPS, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
    ),
    encoder("deberta-v2", "DebertaV2ForMaskedLM", {**NO_GROUPS, **DISENTANGLED}),
)

encoder_decoder = partial(Architecture, kind="encoder-decoder", batch=batches.text_to_text)
T5_GEMMA = {name: {**HEADS_OF_8, **WINDOW} for name in ("encoder", "decoder")}
INNER_LAYERS = ("encoder.num_hidden_layers", "decoder.num_hidden_layers")
ENCODER_DECODERS = (
    encoder_decoder("t5", "T5ForConditionalGeneration", T5, depth=BOTH_STACKS),
    encoder_decoder("bart", "BartForConditionalGeneration", BART, depth=BOTH_LAYERS),
    encoder_decoder("pegasus", "PegasusForConditionalGeneration", BART, depth=BOTH_LAYERS),
    encoder_decoder(
        "t5gemma", "T5GemmaForConditionalGeneration", {**T5_GEMMA, "vocab_size": VOCABULARY}, depth=INNER_LAYERS
    ),
)

vision = partial(Architecture, kind="vision", batch=batches.image)
SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "num_heads": [1, 2, 2, 2], "window_size": 2}
FOUR_STAGES, THREE_STAGES = {"depths": [1, 1, 6, 1]}, {"depths": [1, 1, 6]}
# Its batch norms see eight values at least: over two they amplify rounding beyond any tolerance.
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], **THREE_STAGES, "num_labels": LABELS}
VISION = (
    vision("vit", "ViTForImageClassification", PIXELS),
    vision("dinov2", "Dinov2ForImageClassification", PIXELS),
    vision("swin", "SwinForImageClassification", {**SWIN, **FOUR_STAGES, "num_labels": LABELS}, depth=("depths",)),
    vision("convnext", "ConvNextForImageClassification", {**STAGES, **FOUR_STAGES}, depth=("depths",)),
    vision("resnet", "ResNetForImageClassification", RESNET, depth=("depths",)),
)

audio = partial(Architecture, kind="audio")
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
SPEECH_TO_TEXT = {
    **{**BART, "max_source_positions": 64, "max_target_positions": 64},
    **{"input_feat_per_channel": 8, "conv_channels": 16},
}
SPECTROGRAM = {
    **{**WIDTH, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
    **{"max_length": 16, "num_mel_bins": 16, "num_labels": LABELS},
}
AUDIO = (
    audio("wav2vec2", "Wav2Vec2ForCTC", SOUND, batches.speech),
    audio("ast", "ASTForAudioClassification", SPECTROGRAM, batches.spectrogram),
    audio("hubert", "HubertForCTC", SOUND, batches.speech),
    audio("speech-to-text", "Speech2TextForConditionalGeneration", SPEECH_TO_TEXT, batches.frames_to_text, BOTH_LAYERS),
    audio("whisper", "WhisperForConditionalGeneration", WHISPER, batches.spectrogram_to_text, BOTH_LAYERS),
)

both = partial(Architecture, kind="vision and language", depth=TOWERS)
TIED = {
    "text_config": {**NO_GROUPS, "projection_dim": 16, "eos_token_id": VOCABULARY - 1},
    "vision_config": PIXELS,
    "projection_dim": 16,
}
SEEN = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
LLAVA = {
    "text_config": {**DECODER, "model_type": "llama"},
    "vision_config": {**PIXELS, "model_type": "clip_vision_model"},
}
GEMMA_VISION = {
    "text_config": {**HEADS_OF_8, **WINDOW, "model_type": "gemma3_text"},
    "vision_config": {**PIXELS, "model_type": "siglip_vision_model", "vision_use_head": False},
    "mm_tokens_per_image": 4,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_VISION = {
    "text_config": {**DECODER, "rope_parameters": ROPE},
    "vision_config": {"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8},
}
QWEN_TOWERS = ("text_config.num_hidden_layers", "vision_config.depth")
SIXTEEN_PATCHES = partial(batches.image_and_text, patches=16)
VISION_AND_LANGUAGE = (
    both("clip", "CLIPModel", TIED, batches.pairs),
    both("siglip", "SiglipModel", TIED, batches.pairs),
    both("llava", "LlavaForConditionalGeneration", {**LLAVA, **SEEN}, SIXTEEN_PATCHES),
    both("gemma3-vision", "Gemma3ForConditionalGeneration", {**GEMMA_VISION, **SEEN}, batches.image_and_text),
    both(
        "qwen2-vl",
        "Qwen2VLForConditionalGeneration",
        {**QWEN_VISION, **SEEN},
        batches.patches_and_text,
        depth=QWEN_TOWERS,
    ),
)

PATCHES = {
    **{"context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2},
    **{"d_model": 16, "ffn_dim": 32, "num_attention_heads": 2},
}
SERIES = (Architecture("patchtst", "PatchTSTForPrediction", PATCHES, batches.series, kind="time series"),)

LISTED = (
    *(*DECODERS, *MIXTURES, *STATE_SPACES, *ENCODERS, *ENCODER_DECODERS),
    *(*VISION, *AUDIO, *VISION_AND_LANGUAGE, *SERIES),
)
ARCHITECTURES = {each.name: each for each in LISTED}
