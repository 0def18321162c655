"""The model of the image benchmark: a vision transformer of torch's own layers, and the preparation of its images."""

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import ahop_layers as ah

# tiny: for a laptop. small: for a GPU. paper: of the paper's experiment.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 2, "width": 64, "heads": 2},
    "small": {"depth": 6, "width": 192, "heads": 3},
    "paper": {"depth": 3, "width": 512, "heads": 4, "dropout": 0.3},
}


def as_floats(images: Tensor) -> Tensor:
    """Converts bytes to floats from 0 to 1."""
    return images.float() / 255


def channel_scale(images: Tensor) -> dict[str, tuple[float, ...]]:
    """Returns mean and standard deviation of each channel of ``images (n, channels, height, width)``."""
    numbers = as_floats(images)
    return {"mean": tuple(numbers.mean((0, 2, 3)).tolist()), "std": tuple(numbers.std((0, 2, 3)).tolist())}


def augment(images: Tensor, mirror: bool) -> Tensor:
    """Shifts each image by up to 1/8 of its height, with black padding, and flips half of them if ``mirror``."""
    n, channels, height, width = images.shape
    reach = height // 8
    padded = torch.nn.functional.pad(images, (reach,) * 4)

    def draw(values: int) -> Tensor:
        return torch.randint(values, (n, 1), device=images.device)

    rows = draw(2 * reach + 1) + torch.arange(height, device=images.device)
    columns = draw(2 * reach + 1) + torch.arange(width, device=images.device)
    if mirror:
        columns = torch.where(draw(2).bool(), columns.flip(-1), columns)
    image = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


class VisionTransformer(nn.Module):
    """A vision transformer that classifies an image by its class token."""

    def __init__(
        self,
        image: tuple[int, int, int],  # channels, height and width
        classes: int,
        patch: int,  # side of a square patch in pixels
        depth: int,  # number of transformer blocks
        width: int,  # dimension of a token
        heads: int,
        dropout: float = 0.0,
        mean: tuple[float, ...] = (0.5,),  # of each channel, for pixels from 0 to 1
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
