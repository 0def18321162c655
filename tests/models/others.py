"""Small models of torchvision, diffusers, segment-anything and open_clip, with random weights."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models.check import Case

Made = tuple[nn.Module, Any]
IMAGE = (2, 3, 64, 64)


def torchvision_vit() -> Made:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 2, 4, 32, 64), (torch.randn(IMAGE),)


def torchvision_swin(version: int) -> Made:
    from torchvision.models import swin_transformer as swin

    parts: dict[str, Any] = {}
    if version == 2:
        parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], **parts), (torch.randn(IMAGE),)


def torchvision_maxvit() -> Made:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0), (torch.randn(IMAGE),)


def diffusers_unet() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=24, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 8, 8), 3, torch.randn(2, 5, 24))


def diffusers_dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )
    labels = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([0, 1])}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **labels}


def diffusers_sd3() -> Made:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    states = {"encoder_hidden_states": torch.randn(2, 5, 24), "pooled_projections": torch.randn(2, 16)}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), **states}


def segment_anything() -> Made:
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(
        img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=4, out_chans=16, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,),
    )  # fmt: skip
    return model, (torch.randn(IMAGE),)


def open_clip() -> Made:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=16, image_size=64)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=4, layers=2)
    return CLIP(16, vision, text), (torch.randn(IMAGE), torch.randint(1, 64, (2, 8)))


def open_clip_pooled() -> Made:
    from open_clip.coca_model import CoCa

    vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 16, "image_size": 64, "attentional_pool": True,
              "attn_pooler_heads": 4, "output_tokens": True}  # fmt: skip
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2, "embed_cls": True,
            "output_tokens": True}  # fmt: skip
    decoder = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    return CoCa(32, decoder, text, vision), (torch.randn(IMAGE), torch.randint(1, 64, (2, 8)))


CASES = [
    Case("torchvision", "ViT", torchvision_vit),
    Case("torchvision", "Swin", partial(torchvision_swin, 1)),
    Case("torchvision", "Swin V2", partial(torchvision_swin, 2)),
    Case("torchvision", "MaxViT", torchvision_maxvit),
    Case("diffusers", "UNet", diffusers_unet),
    Case("diffusers", "DiT", diffusers_dit),
    Case("diffusers", "SD3", diffusers_sd3),
    Case("segment-anything", "image encoder", segment_anything),
    Case("open_clip", "CLIP", open_clip),
    Case("open_clip", "CoCa", open_clip_pooled),
]
