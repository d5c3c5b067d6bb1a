"""Architectures of ``transformers`` for the coverage table: which class, how small, and what it reads.

To add one is to add a line here. Sizes are those of a toy; everything else is as the configuration has it by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fxshard.bench import sample_batches as batches
from fxshard.bench.sample_batches import IMAGE, IMAGE_TOKEN, LABELS, LENGTH, VOCABULARY, MakeBatch
from fxshard.bench.small_models import Architecture, Sizes

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
LLAMA, CLIP_TOWER = {**DECODER, "model_type": "llama"}, {**PIXELS, "model_type": "clip_vision_model"}
BOTH_LAYERS = ("encoder_layers", "decoder_layers")
BOTH_STACKS = ("num_layers", "num_decoder_layers")
TOWERS = ("text_config.num_hidden_layers", "vision_config.num_hidden_layers")


def _decoders() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, **others: Any) -> Architecture:
        return Architecture(name, "decoder", model, sizes, **others)

    gpt2 = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    yield of("llama", "LlamaForCausalLM", DECODER)
    yield of("mistral", "MistralForCausalLM", {**DECODER, **WINDOW})
    yield of("qwen2", "Qwen2ForCausalLM", DECODER)
    yield of("qwen3", "Qwen3ForCausalLM", HEADS_OF_8)
    yield of("gemma2", "Gemma2ForCausalLM", {**HEADS_OF_8, **WINDOW})
    yield of("gemma3", "Gemma3ForCausalLM", {**HEADS_OF_8, **WINDOW})
    yield of("phi3", "Phi3ForCausalLM", DECODER)
    yield of("gpt2", "GPT2LMHeadModel", gpt2, depth=("n_layer",))
    yield of("gpt-neox", "GPTNeoXForCausalLM", NO_GROUPS)
    yield of("opt", "OPTForCausalLM", {**NO_GROUPS, "ffn_dim": 64, "word_embed_proj_dim": 32})
    yield of("bloom", "BloomForCausalLM", {**TEXT, "hidden_size": 32, "n_head": 4}, depth=("n_layer",))
    yield of("falcon", "FalconForCausalLM", NO_GROUPS)
    yield of("stablelm", "StableLmForCausalLM", DECODER)
    yield of("olmo2", "Olmo2ForCausalLM", DECODER)
    yield of("cohere2", "Cohere2ForCausalLM", {**DECODER, **WINDOW})


def _experts() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, **others: Any) -> Architecture:
        return Architecture(name, "mixture of experts", model, sizes, **others)

    deepseek = {**NO_GROUPS, **LATENT, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    deepseek |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    llama4 = {**HEADS_OF_8, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": LENGTH // 2}
    yield of("mixtral", "MixtralForCausalLM", {**DECODER, **LOCAL_EXPERTS})
    yield of("qwen2-moe", "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 32})
    yield of("qwen3-moe", "Qwen3MoeForCausalLM", {**HEADS_OF_8, **EXPERTS})
    yield of("olmoe", "OlmoeForCausalLM", {**DECODER, **EXPERTS})
    yield of("gpt-oss", "GptOssForCausalLM", {**HEADS_OF_8, **LOCAL_EXPERTS, **WINDOW})
    yield of("deepseek-v3", "DeepseekV3ForCausalLM", deepseek)
    yield of("llama4", "Llama4ForCausalLM", llama4)


def _state_spaces() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, **others: Any) -> Architecture:
        return Architecture(name, "state space", model, sizes, **others)

    state = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "pad_token_id": 0}
    bamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1}
    jamba = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1}
    heads = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    yield of("mamba", "MambaForCausalLM", state, batch=batches.short_text)
    yield of("mamba2", "Mamba2ForCausalLM", {**state, **heads}, batch=batches.short_text)
    yield of("falcon-h1", "FalconH1ForCausalLM", {**DECODER, **bamba, "mamba_d_ssm": 64}, batch=batches.short_text)
    yield of("jamba", "JambaForCausalLM", {**DECODER, **jamba}, batch=batches.short_text)
    yield of("lfm2", "Lfm2ForCausalLM", DECODER)


def _encoders() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, **others: Any) -> Architecture:
        return Architecture(name, "encoder", model, sizes, **others)

    distil = {**TEXT, "dim": 32, "hidden_dim": 64, "n_heads": 4}
    modern = {**NO_GROUPS, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
    disentangled = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    yield of("bert", "BertForMaskedLM", NO_GROUPS)
    yield of("roberta", "RobertaForMaskedLM", NO_GROUPS)
    yield of("distilbert", "DistilBertForMaskedLM", distil, depth=("n_layers",))
    yield of("albert", "AlbertForMaskedLM", {**NO_GROUPS, "embedding_size": 16})
    yield of("modernbert", "ModernBertForMaskedLM", modern)
    yield of("deberta-v2", "DebertaV2ForMaskedLM", {**NO_GROUPS, **disentangled})


def _encoder_decoders() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, depth: tuple[str, ...]) -> Architecture:
        return Architecture(name, "encoder-decoder", model, sizes, batches.text_to_text, depth)

    gemma = {**HEADS_OF_8, **WINDOW}
    inner = ("encoder.num_hidden_layers", "decoder.num_hidden_layers")
    yield of("t5", "T5ForConditionalGeneration", T5, BOTH_STACKS)
    yield of("bart", "BartForConditionalGeneration", BART, BOTH_LAYERS)
    yield of("pegasus", "PegasusForConditionalGeneration", BART, BOTH_LAYERS)
    yield of(
        "t5gemma",
        "T5GemmaForConditionalGeneration",
        {"encoder": gemma, "decoder": gemma, "vocab_size": VOCABULARY},
        inner,
    )


def _vision() -> Iterator[Architecture]:
    def of(
        name: str, model: str, sizes: Sizes, depth: str = "num_hidden_layers", batch: MakeBatch = batches.image
    ) -> Architecture:
        return Architecture(name, "vision", model, sizes, batch, (depth,))

    swin = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "num_heads": [1, 2, 2, 2], "window_size": 2}
    yield of("vit", "ViTForImageClassification", PIXELS)
    yield of("dinov2", "Dinov2ForImageClassification", PIXELS)
    yield of("swin", "SwinForImageClassification", {**swin, "depths": [1, 1, 6, 1], "num_labels": LABELS}, "depths")
    yield of("convnext", "ConvNextForImageClassification", {**STAGES, "depths": [1, 1, 6, 1]}, "depths")
    # Its batch norms see eight values at least: over two they amplify rounding beyond any tolerance.
    three = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 1, 6], "num_labels": LABELS}
    yield of("resnet", "ResNetForImageClassification", three, "depths")


def _audio() -> Iterator[Architecture]:
    def of(
        name: str,
        model: str,
        sizes: Sizes,
        batch: MakeBatch = batches.speech,
        depth: tuple[str, ...] = ("num_hidden_layers",),
    ) -> Architecture:
        return Architecture(name, "audio", model, sizes, batch, depth)

    whisper = {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    speech = {
        **BART,
        "max_source_positions": 64,
        "max_target_positions": 64,
        "input_feat_per_channel": 8,
        "conv_channels": 16,
    }
    spectrogram = {
        **WIDTH,
        "patch_size": 4,
        "frequency_stride": 4,
        "time_stride": 4,
        "max_length": 16,
        "num_mel_bins": 16,
    }
    yield of("wav2vec2", "Wav2Vec2ForCTC", SOUND)
    yield of("ast", "ASTForAudioClassification", {**spectrogram, "num_labels": LABELS}, batches.spectrogram)
    yield of("hubert", "HubertForCTC", SOUND)
    yield of("speech-to-text", "Speech2TextForConditionalGeneration", speech, batches.frames_to_text, BOTH_LAYERS)
    yield of("whisper", "WhisperForConditionalGeneration", whisper, batches.spectrogram_to_text, BOTH_LAYERS)


def _vision_and_language() -> Iterator[Architecture]:
    def of(name: str, model: str, sizes: Sizes, batch: MakeBatch, depth: tuple[str, ...] = TOWERS) -> Architecture:
        return Architecture(name, "vision and language", model, sizes, batch, depth)

    tied = {
        "text_config": {**NO_GROUPS, "projection_dim": 16, "eos_token_id": VOCABULARY - 1},
        "vision_config": PIXELS,
        "projection_dim": 16,
    }
    seen = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
    qwen = {**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    grid = {"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    gemma = {**HEADS_OF_8, **WINDOW, "model_type": "gemma3_text"}
    siglip = {**PIXELS, "model_type": "siglip_vision_model", "vision_use_head": False}
    yield of("clip", "CLIPModel", tied, batches.pairs)
    yield of("siglip", "SiglipModel", tied, batches.pairs)
    yield of(
        "llava",
        "LlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": CLIP_TOWER, **seen},
        partial(batches.image_and_text, patches=16),
    )
    yield of(
        "gemma3-vision",
        "Gemma3ForConditionalGeneration",
        {"text_config": gemma, "vision_config": siglip, "mm_tokens_per_image": 4, **seen},
        batches.image_and_text,
    )
    yield of(
        "qwen2-vl",
        "Qwen2VLForConditionalGeneration",
        {"text_config": qwen, "vision_config": grid, **seen},
        batches.patches_and_text,
        ("text_config.num_hidden_layers", "vision_config.depth"),
    )


def _series() -> Iterator[Architecture]:
    patches = {
        "context_length": 16,
        "prediction_length": 4,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 2,
    }
    width = {"d_model": 16, "ffn_dim": 32, "num_attention_heads": 2}
    yield Architecture("patchtst", "time series", "PatchTSTForPrediction", {**patches, **width}, batches.series)


LISTED = (
    _decoders,
    _experts,
    _state_spaces,
    _encoders,
    _encoder_decoders,
    _vision,
    _audio,
    _vision_and_language,
    _series,
)
ARCHITECTURES = {each.name: each for listed in LISTED for each in listed()}
