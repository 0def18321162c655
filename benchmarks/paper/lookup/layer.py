"""A robust lookup as the first layer of a model: an ``AdaptiveHopfieldLayer`` that stores clean instances.

The layer compares an instance with every stored one and reads the values of the most similar ones. Damaged blocks
have low similarities, which are sorted to the end of the footprint, where the initial weights are zero. The lookup is
therefore robust before anything is trained. Training adapts its weights and its inverse temperature to the damage.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

import ahop_layers as ah
from benchmarks.projects.project import NO_NORMS, STATIC

SHARPNESS = 12.0  # initial inverse temperature, for scores with a standard deviation of about 1


class SumOfScores(nn.Module):
    """Adds the scores of several similarities, such as of single pixels and of patches."""

    def __init__(self, parts: Iterable[ah.AdaptiveSimilarity]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``."""
        return torch.stack([part(query, key) for part in self.parts]).sum(0)


class Lookup(nn.Module):
    """Reads the values of stored instances that are similar to an instance. Similarity and scaling are trained."""

    def __init__(
        self,
        stored: Tensor,  # (N, d), kept as a parameter without gradient
        values: Tensor | None = None,  # (N, v), what is read, such as labels; None for the stored instances
        keep: float = 0.5,  # fraction of the blocks that counts initially: the most similar ones
        blocks: Sequence[object] = (None,),  # of each similarity; all have equal shares of the initial scores
        bases: Sequence[str] = ("l1",),  # initially, normalized blocks use "dot" if it is given, others the first one
    ) -> None:
        super().__init__()
        values = stored if values is None else values
        parts = [initial_similarity(stored, keep, each, bases, 1 / len(blocks)) for each in blocks]
        self.layer = ah.AdaptiveHopfieldLayer(
            stored.shape[1],
            **STATIC,
            **NO_NORMS,
            disable_out_projection=True,
            lookup_weights_as_separated=True,
            lookup_targets_as_trainable=False,
            pattern_projection_size=values.shape[1],
            scaling=nn.Parameter(torch.tensor(SHARPNESS)),
            quantity=len(stored),
            trainable=False,
            similarity=SumOfScores(parts),
        ).to(stored)
        with torch.no_grad():
            self.layer.lookup_weights.copy_(stored[None])
            self.layer.target_weights.copy_(values[None])

    def forward(self, instances: Tensor, without: Tensor | None = None) -> Tensor:
        """Reads a value for each of ``instances (n, d)``: ``(n, v)``. The stored ``without (n,)`` are left out."""
        mask = None
        if without is not None:
            mask = torch.arange(self.layer.quantity, device=without.device) == without[:, None]
        return self.layer(instances[None], association_mask=mask)[0]


@torch.no_grad()
def initial_similarity(
    stored: Tensor, keep: float, blocks: object, bases: Sequence[str], size: float
) -> ah.AdaptiveSimilarity:
    """Returns a similarity by the most similar blocks, with scores of standard deviation ``size``."""
    base = "dot" if getattr(blocks, "normalize", False) and "dot" in bases else bases[0]

    def similarity(init: object) -> ah.AdaptiveSimilarity:
        made = ah.AdaptiveSimilarity(stored.shape[1], 1, bases=bases, init=init, blocks=blocks).to(stored)
        return made.fix_scales_(stored)

    weight = torch.zeros_like(similarity("uniform").w, device="cpu")  # (1, n_bases, n)
    n = weight.shape[-1]  # entry k of a footprint is the sum of the k most similar blocks
    weight[0, list(bases).index(base), max(1, round(keep * n)) - 1] = 1.0
    scores = similarity(weight)(stored[None, :: max(1, len(stored) // 64)], stored[None])
    return similarity(weight * size / scores.std(-1).mean().clamp(min=torch.finfo(scores.dtype).tiny).cpu())
