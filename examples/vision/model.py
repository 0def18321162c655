"""A vision transformer with a choice of attention: the model of examples/vit.py and of the image benchmark.

The attentions are:

- ``dot``: ``nn.MultiheadAttention``, the modern Hopfield network (M-Hop);
- ``adaptive``: the learned similarity of this package (A-Hop), which is initialized to the dot product;
- ``kernel``: K-Hop as in Table 1 of the paper, ``(phi q) . (phi k)`` with 1.5-entmax as separation;
- ``sparse``: the dot product with sparsemax as separation (S-Hop).

All have the same initial weights, because the last three are converted from a model with the first.
"""

import math
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import ahop_layers as ah
from examples.common.kernel_similarity import KernelSimilarity
from examples.common.similarities import DotProduct

# tiny: for a laptop. small: for a GPU. paper: the model of the paper's experiment.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 2, "width": 64, "heads": 2},
    "small": {"depth": 6, "width": 192, "heads": 3},
    "paper": {"depth": 3, "width": 512, "heads": 4, "dropout": 0.3},
}
SEPARATIONS = {"adaptive": "softmax", "kernel": "entmax15", "sparse": "sparsemax"}
SIMILARITIES = {"kernel": KernelSimilarity, "sparse": DotProduct}
ATTENTIONS = ("dot", *SEPARATIONS)


class VisionTransformer(nn.Module):
    """A vision transformer that classifies an image by its class token.

    Args:
        image: channels, height and width of an image.
        classes: number of classes.
        patch: side of a square patch in pixels.
        depth: number of transformer blocks.
        width: dimension of a token.
        heads: attention heads per block.
        dropout: dropout probability in the blocks.
        mean, std: mean and standard deviation of each channel, for pixels from 0 to 1.

    Raises:
        AHopError: the patch does not divide the image.
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
        # Of the same scale as embedded patches: with the usual 0.02, small models learn positions slowly.
        self.class_token = nn.Parameter(0.2 * torch.randn(width))
        self.position = nn.Parameter(0.2 * torch.randn(1 + self.grid[0] * self.grid[1], width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.blocks.apply(_initialize)  # nn.TransformerEncoder copies one block: initialize each copy
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Computes ``logits (n, classes)`` from ``images (n, channels, height, width)`` with values from 0 to 1."""
        if images.shape[1:] != self.image:
            raise ah.AHopError(f"images must be (n, *{self.image}), got {tuple(images.shape)}")
        images = (images - self.mean) / self.std
        patches = rearrange(images, "n c (h p) (w q) -> n (h w) (c p q)", p=self.patch, q=self.patch)
        token = repeat(self.class_token, "d -> n 1 d", n=len(images))
        embedded = self.embed(patches)
        tokens = torch.cat((token.to(embedded.dtype), embedded), 1) + self.position
        return self.head(self.blocks(tokens)[:, 0])


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)


def use_attention(model: nn.Module, name: str, blocks: int | None = None, **keywords: Any) -> None:
    """Replaces the dot-product attention of a model in place.

    Args:
        model: the model.
        name: a name of ``ATTENTIONS``.
        blocks: number of blocks that ``adaptive`` sorts per head, None for all dimensions; the others do not sort.
        keywords: further arguments of ``ah.adapt_``.
    """
    if name == "dot":
        return
    keywords |= {"blocks": blocks} if name == "adaptive" else {}
    ah.adapt_(model, separation=SEPARATIONS[name], similarity=SIMILARITIES.get(name), **keywords)


def make_optimizer(
    model: nn.Module, lr: float | Tensor, weight_decay: float, similarity_lr: float = 1.0, **keywords: Any
) -> torch.optim.AdamW:
    """Returns AdamW; the similarities have ``similarity_lr`` times the learning rate, and no weight decay."""
    return torch.optim.AdamW(ah.parameter_groups(model, lr, lr * similarity_lr, weight_decay), **keywords)


def cosine(step: int, total: int, warmup: float) -> float:
    """Returns the learning-rate factor of a step: linear warm-up over a share of all steps, then cosine decay."""
    first = max(1, round(warmup * total))
    if step < first and warmup:
        return (step + 1) / first
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - first * bool(warmup)) / max(1, total - first))))
