"""K-Hop's learned kernel in place of a similarity, for attention and for pooling."""

import math

import torch
from torch import Tensor, nn

from ahop_layers.memory.kernel import crowding

MOST_KEYS = 128
"""How many keys the separation loss looks at, evenly taken from all: it compares each with each."""


class KernelSimilarity(nn.Module):
    """K-Hop's score ``(phi q) . (phi k)`` with a matrix ``phi`` per head, the identity at the start.

    In K-Hop the separation loss alone shapes phi, everything else learns from the task. Hence ``phi`` is detached in
    the score, and the keys are detached in the loss: the crowding, after phi, of all keys scored together, which
    are the tokens of one image or the instances of a batch of packed bags. Only the direction of phi counts.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.eye(dim).repeat(num_heads, 1, 1))
        self.separation_loss: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Score ``query (..., H, L, d)`` against ``key (..., H, S, d)``: ``(..., H, L, S)``."""
        self.separation_loss = self._crowding(key.detach()) if self.training else None
        phi = self.phi.detach()
        fixed = (phi * (math.sqrt(phi.shape[-1]) / phi.norm(dim=(-2, -1), keepdim=True))).to(query.dtype).mT
        return (query @ fixed) @ (key @ fixed).mT

    def _crowding(self, key: Tensor) -> Tensor:
        some = key[..., :: -(-key.shape[-2] // MOST_KEYS) or 1, :]
        with torch.autocast(key.device.type, enabled=False):
            return crowding(some.to(self.phi.dtype) @ self.phi.mT).mean()


def separation_loss(model: nn.Module) -> Tensor | float:
    """What K-Hop adds to the loss of a training step; nothing for the other attentions."""
    kernels = [part for part in model.modules() if isinstance(part, KernelSimilarity)]
    return sum(kernel.separation_loss for kernel in kernels)
