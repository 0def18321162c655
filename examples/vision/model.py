"""A vision transformer whose attention can be exchanged: the model of examples/vit.py and benchmarks/images.py.

Four attentions, one name each:

- ``dot``: ``nn.MultiheadAttention``, the modern Hopfield network (M-Hop);
- ``adaptive``: the learned similarity of this package (A-Hop), exactly the dot product until it is trained;
- ``kernel``: K-Hop as the paper's Table 1 has it: ``(phi q) . (phi k)``, separated by entmax with alpha = 1.5;
- ``sparse``: the dot product separated by sparsemax (S-Hop).

All start from the same weights, because the last three are made from a model with the first.
"""

import math
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import ahop_layers as ah
from examples.common.kernel_similarity import KernelSimilarity
from examples.common.parameters import parameter_groups

# tiny for a laptop, small for a GPU, paper for the experiment of the paper.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 2, "width": 64, "heads": 2},
    "small": {"depth": 6, "width": 192, "heads": 3},
    "paper": {"depth": 3, "width": 512, "heads": 4, "dropout": 0.3},
}
SEPARATIONS = {"adaptive": "softmax", "kernel": "entmax15", "sparse": "sparsemax"}
ATTENTIONS = ("dot", *SEPARATIONS)


class VisionTransformer(nn.Module):
    """Patches and a class token through transformer blocks; the class token says what the image shows.

    Args:
        image: channels, height and width.
        classes: how many there are.
        patch: the side of a square patch, in pixels.
        depth, width, heads, dropout: blocks, size of a token, attention heads, dropout everywhere in a block.
        mean, std: of each channel, on the scale 0 to 1.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        patch: int,
        depth: int,
        width: int,
        heads: int,
        dropout: float = 0.0,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
    ) -> None:
        super().__init__()
        channels, height, wide = image
        if patch < 1 or height % patch or wide % patch:
            raise ah.AHopError(f"patch must divide the image, got patch {patch} and image {height} x {wide}")
        self.image, self.patch, self.grid = tuple(image), patch, (height // patch, wide // patch)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None])
        self.embed = nn.Linear(channels * patch**2, width)
        # Positions of a size with embedded patches: with the usual 0.02 small models take long to notice them.
        self.class_token = nn.Parameter(0.2 * torch.randn(width))
        self.position = nn.Parameter(0.2 * torch.randn(1 + self.grid[0] * self.grid[1], width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.blocks.apply(_draw_weights)  # the encoder's blocks are copies of one: give each its own weights
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """From ``images (n, channels, height, width)``, 0 to 1, to ``logits (n, classes)``."""
        if images.shape[1:] != self.image:
            raise ah.AHopError(f"images must be (n, *{self.image}), got {tuple(images.shape)}")
        images = (images - self.mean) / self.std
        patches = rearrange(images, "n c (h p) (w q) -> n (h w) (c p q)", p=self.patch, q=self.patch)
        token = repeat(self.class_token, "d -> n 1 d", n=len(images))
        embedded = self.embed(patches)
        tokens = torch.cat((token.to(embedded.dtype), embedded), 1) + self.position
        return self.head(self.blocks(tokens)[:, 0])


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)


def use_attention(model: nn.Module, name: str, **keywords: Any) -> None:
    """Exchange the attention of a model with the dot product, in place; keywords are those of ``ah.adapt_``."""
    if name == "dot":
        return
    ah.adapt_(model, separation=SEPARATIONS[name], **keywords)
    for layer in model.modules():
        if isinstance(layer, ah.AdaptiveAttention) and name != "adaptive":
            similarity = layer.similarity
            kernel = KernelSimilarity(similarity.dim, similarity.num_heads).to(similarity.w)
            layer.similarity = kernel if name == "kernel" else None


def make_optimizer(
    model: nn.Module, lr: float | Tensor, weight_decay: float, similarity_lr: float = 1.0, **keywords: Any
) -> torch.optim.AdamW:
    """AdamW (Adam where ``weight_decay`` is 0); similarities learn ``similarity_lr`` times as fast, without decay."""
    groups = parameter_groups(model, lr, similarity_lr)
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, **keywords)


def cosine(step: int, total: int, warmup: float) -> float:
    """The learning rate's factor: up in a line for the first ``warmup`` of all steps, then down along a cosine."""
    first = max(1, round(warmup * total))
    if step < first and warmup:
        return (step + 1) / first
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - first * bool(warmup)) / max(1, total - first))))
