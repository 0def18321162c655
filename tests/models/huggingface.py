"""Small models of many architectures of transformers, with random weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models.check import Case

SIZES = {
    "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "initializer_range": 0.2,
}  # fmt: skip
TEXT = SIZES | {
    "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
IMAGE = SIZES | {"image_size": 32, "patch_size": 8, "num_channels": 3}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
           "initializer_range": 0.2}  # fmt: skip
SPEECH = SIZES | {
    "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip

Inputs = Callable[[], dict[str, Any]]


def pixels(*shape: int) -> dict[str, Any]:
    """Returns random images."""
    return {"pixel_values": torch.randn(shape or (2, 3, 32, 32))}


def tokens(length: int = 9, **more: Any) -> dict[str, Any]:
    """Returns random tokens."""
    return {"input_ids": torch.randint(3, 64, (2, length)), **more}


def both() -> dict[str, Any]:
    """Returns tokens for an encoder and a decoder."""
    return {**tokens(), "decoder_input_ids": torch.randint(3, 64, (2, 6))}


def sound() -> dict[str, Any]:
    """Returns a random waveform."""
    return {"input_values": torch.randn(2, 800)}


def paired() -> dict[str, Any]:
    """Returns images and texts."""
    return {**tokens(), **pixels()}


def towers(vision: dict[str, Any] = IMAGE, text: dict[str, Any] = TEXT, **more: Any) -> dict[str, Any]:
    """Returns the sizes of a model with an image and a text tower."""
    return {"vision_config": {**vision}, "text_config": {**text}, "projection_dim": 16, **more}


def alike(names: str, sizes: dict[str, Any], inputs: Inputs) -> dict[str, tuple[dict[str, Any], Inputs]]:
    """Returns architectures that share their sizes and inputs."""
    return dict.fromkeys(names.split(), (sizes, inputs))


PYRAMID = {
    "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "depths": [1, 1], "num_encoder_blocks": 2,
    "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
FOUR_STAGES = {
    "hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [1, 2, 2, 2], "depths": [1, 1, 1, 1],
    "mlp_ratios": [2, 2, 2, 2], "image_size": 64,
}  # fmt: skip
CONVOLUTIONS = {
    "embed_dim": [16, 32], "num_heads": [1, 2], "depth": [1, 2], "patch_sizes": [7, 3], "patch_stride": [4, 2],
    "patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0],
    "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
    "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
    "padding_q": [1, 1], "stride_q": [1, 1],
}  # fmt: skip
LEVIT = {
    "image_size": 128, "hidden_sizes": [32, 64, 64], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}  # fmt: skip
MOBILE = {
    "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_attention_heads": 2,
    "image_size": 128, "initializer_range": 0.2,
}  # fmt: skip
PREDICTED = {
    "crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 32, "pred_num_attention_heads": 4,
    "pred_num_hidden_layers": 2,
}  # fmt: skip
DETECTION = {
    "window_block_indices": [0], "window_size": 2, "residual_block_indices": [],
    "use_relative_position_embeddings": True,
}  # fmt: skip
SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 16}
GPT = TEXT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
RELATIVE = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
STARTED = TEXT | {"decoder_start_token_id": 2}
HEARD = TEXT | {"decoder_start_token_id": 1}
VIDEO, LARGE, LARGER = partial(pixels, 2, 4, 3, 32, 32), partial(pixels, 2, 3, 64, 64), partial(pixels, 2, 3, 128, 128)
SQUARE = IMAGE | {"image_size": [32, 32], "patch_size": [8, 8]}


def naflex() -> dict[str, Any]:
    """Returns flattened patches of images, with their mask and the shapes of the grids."""
    mask = torch.ones(2, 16, dtype=torch.long)
    shapes = torch.tensor([[4, 4], [4, 4]])
    return {"pixel_values": torch.randn(2, 16, 192), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def spectrum(*shape: int) -> dict[str, Any]:
    """Returns a random spectrogram, and tokens for a decoder."""
    return {"input_features": torch.randn(shape), "decoder_input_ids": torch.randint(3, 64, (2, 6))}


# Architecture: the changes to its configuration, and its inputs.
VISION: dict[str, tuple[dict[str, Any], Inputs]] = {
    **alike("vit deit dinov2 dinov2_with_registers dinov3_vit data2vec-vision vit_msn ijepa pixio", IMAGE, pixels),
    **alike("radio clip_vision_model siglip_vision_model aimv2_vision_model blip_vision_model", IMAGE, pixels),
    **alike("blip_2_vision_model instructblip_vision_model idefics3_vision", IMAGE, pixels),
    **alike("swin swinv2 maskformer-swin donut-swin", WINDOWS, pixels),
    **alike("segformer glpn", PYRAMID, pixels),
    **alike("vitpose_backbone internvl_vision", SQUARE, pixels),
    "beit": (IMAGE | {"use_relative_position_bias": True}, pixels),
    "vit_mae": (IMAGE | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}, pixels),
    "yolos": (IMAGE | {"image_size": [32, 32], "num_detection_tokens": 5}, pixels),
    "dpt": (IMAGE | {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [16, 16]}, pixels),
    "vivit": (IMAGE | {"num_frames": 4, "tubelet_size": [2, 8, 8]}, VIDEO),
    "videomae": (IMAGE | {"num_frames": 4, "tubelet_size": 2}, VIDEO),
    "timesformer": (IMAGE | {"num_frames": 4}, VIDEO),
    "vjepa2": (IMAGE | PREDICTED, lambda: {"pixel_values_videos": torch.randn(2, 4, 3, 32, 32)}),
    "swin2sr": (WINDOWS | {"patch_size": 1, "embed_dim": 16}, pixels),
    "pvt": (FOUR_STAGES | {"sequence_reduction_ratios": [4, 2, 1, 1]}, LARGE),
    "pvt_v2": (FOUR_STAGES | {"sr_ratios": [4, 2, 1, 1]}, LARGE),
    "cvt": (CONVOLUTIONS, pixels),
    "hiera": ({"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}, LARGE),
    "levit": (LEVIT, LARGER),
    "mobilevit": (MOBILE, LARGER),
    "vitdet": (IMAGE | DETECTION, pixels),
    "siglip2_vision_model": (IMAGE | {"num_patches": 16}, naflex),
    "mlcd_vision_model": (IMAGE | {"num_key_value_groups": 1}, pixels),
    "pixtral": (IMAGE | {"head_dim": 8}, lambda: {**pixels(), "image_sizes": torch.tensor([[32, 32], [32, 32]])}),
    "sam_vision_model": (IMAGE | SAM, pixels),
}

MULTIMODAL: dict[str, tuple[dict[str, Any], Inputs]] = {
    **alike("clip siglip altclip chinese_clip clipseg groupvit owlvit metaclip_2 blip", towers(), paired),
    "flava_image_model": (IMAGE, pixels),
    "vilt": (TEXT | IMAGE, paired),
    "git": (TEXT | {"vision_config": IMAGE}, paired),
    "layoutlmv3": (TEXT | {"input_size": 32, "patch_size": 8, "coordinate_size": 4, "shape_size": 8}, paired),
}

LANGUAGE: dict[str, tuple[dict[str, Any], Inputs]] = {
    **alike("bert roberta xlm-roberta camembert mpnet roformer ernie megatron-bert gpt_neox phi", TEXT, tokens),
    **alike("llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo2 cohere", GROUPED, tokens),
    **alike("starcoder2 stablelm smollm3", GROUPED, tokens),
    **alike("albert electra", TEXT | {"embedding_size": 16}, tokens),
    **alike("deberta deberta-v2", RELATIVE, tokens),
    **alike("gpt2 gpt_bigcode", GPT, tokens),
    **alike("bart marian pegasus", STARTED, both),
    "distilbert": (TEXT | {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}, tokens),
    "nystromformer": (TEXT | {"num_landmarks": 4, "segment_means_seq_len": 8}, partial(tokens, 8)),
    "modernbert": (TEXT | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, tokens),
    "esm": (TEXT | {"position_embedding_type": "rotary", "mask_token_id": 3}, tokens),
    "gpt_neo": (TEXT | {"attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 4}, tokens),
    "gptj": (GPT | {"rotary_dim": 4}, tokens),
    "opt": (TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}, tokens),
    "bloom": (TEXT | {"n_head": 4, "n_layer": 2}, tokens),
    "falcon": (TEXT | {"num_kv_heads": 2, "new_decoder_architecture": True}, tokens),
    "mpt": (TEXT | {"n_heads": 4, "n_layers": 2}, tokens),
    "gpt_oss": (GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1}, tokens),
    "mixtral": (GROUPED | {"num_local_experts": 2}, tokens),
    "t5": (TEXT | {"d_kv": 8, "d_ff": 64, "num_heads": 4}, both),
    "m2m_100": (TEXT, both),
}

PATCHED = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}
AUDIO: dict[str, tuple[dict[str, Any], Inputs]] = {
    **alike("wav2vec2 hubert wavlm unispeech-sat wav2vec2-conformer", SPEECH, sound),
    "data2vec-audio": (SPEECH | {"num_conv_pos_embeddings": 2}, sound),
    "audio-spectrogram-transformer": (SIZES | PATCHED, lambda: {"input_values": torch.randn(2, 16, 8)}),
    "whisper": (
        HEARD | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        partial(spectrum, 2, 8, 32),
    ),
    "speech_to_text": (HEARD | {"input_feat_per_channel": 8, "conv_channels": 32}, partial(spectrum, 2, 32, 8)),
}

ARCHITECTURES = VISION | MULTIMODAL | LANGUAGE | AUDIO

# Architectures without an entry in AutoModel.
CLASSES = {
    "vitpose_backbone": "VitPoseBackbone",
    "blip_vision_model": "BlipVisionModel",
    "blip_2_vision_model": "Blip2VisionModel",
    "instructblip_vision_model": "InstructBlipVisionModel",
    "flava_image_model": "FlavaImageModel",
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Builds a small model of an architecture, and its example."""
    import transformers

    sizes, inputs = ARCHITECTURES[name]
    config = transformers.CONFIG_MAPPING[name](**sizes)
    torch.manual_seed(0)
    build = getattr(transformers, CLASSES[name]) if name in CLASSES else transformers.AutoModel.from_config
    return build(config), inputs()


CASES = [Case("transformers", name, partial(make, name)) for name in ARCHITECTURES]
