"""A robust lookup as the first layer of a model: an ``AdaptiveHopfieldLayer`` that stores clean instances.

The layer compares an instance with every stored one and reads the values of the most similar ones. Damaged blocks
have low similarities, which are sorted to the end of the footprint, where the initial weights are zero. The lookup is
therefore robust before anything is trained. Training adapts its weights and its inverse temperature to the damage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.similarity.blocks import Blocks, as_blocks

SHARPNESS = 12.0  # initial inverse temperature, for scores with a standard deviation of about 1


class Lookup(nn.Module):
    """Reads the values of stored instances that are similar to an instance. Similarity and scaling are trained."""

    def __init__(
        self,
        stored: Tensor,  # (N, d), kept as a parameter without gradient
        values: Tensor | None = None,  # (N, v), what is read, such as labels; None for the stored instances
        keep: float = 0.5,  # fraction of the blocks that counts initially: the most similar ones
        blocks: object = None,  # as in ah.AdaptiveSimilarity
        bases: Sequence[str] = ("l1",),  # initially, normalized blocks use "dot" if it is given, others the first one
    ) -> None:
        super().__init__()
        values, init = stored if values is None else values, _initial_weight(stored, keep, as_blocks(blocks), bases)
        static = [f"{name}_as_static" for name in ("stored_pattern", "state_pattern", "pattern_projection")]
        norms = [f"normalize_{name.removesuffix('_as_static')}" for name in static]
        self.layer = ah.AdaptiveHopfieldLayer(
            stored.shape[1],
            **dict.fromkeys(static, True),
            **dict.fromkeys([*norms, *(f"{name}_affine" for name in norms)], False),
            disable_out_projection=True,
            lookup_weights_as_separated=True,
            lookup_targets_as_trainable=False,
            pattern_projection_size=values.shape[1],
            scaling=nn.Parameter(torch.tensor(SHARPNESS)),
            quantity=len(stored),
            trainable=False,
            bases=bases,
            init=init,
            blocks=blocks,
        ).to(stored)
        self.similarity.fix_scales_(stored)
        with torch.no_grad():
            self.layer.lookup_weights.copy_(stored[None])
            self.layer.target_weights.copy_(values[None])

    @property
    def similarity(self) -> ah.AdaptiveSimilarity:
        """The similarity of the layer."""
        return self.layer.hopfield.association_core.similarity

    def forward(self, instances: Tensor, without: Tensor | None = None) -> Tensor:
        """Reads a value for each of ``instances (n, d)``: ``(n, v)``. The stored ``without (n,)`` are left out."""
        mask = None
        if without is not None:
            mask = torch.arange(self.layer.quantity, device=without.device) == without[:, None]
        return self.layer(instances[None], association_mask=mask)[0]


@torch.no_grad()
def _initial_weight(stored: Tensor, keep: float, entry: Blocks, bases: Sequence[str]) -> Tensor:
    """Returns the weights ``(1, n_bases, n)``, for scores of standard deviation 1."""
    base = "dot" if entry.normalize and "dot" in bases else bases[0]
    n = entry.count(stored.shape[1])
    weight = torch.zeros(1, len(bases), n)  # entry k of a footprint is the sum of the k most similar blocks
    weight[0, list(bases).index(base), max(1, round(keep * n)) - 1] = 1.0
    probe = ah.AdaptiveSimilarity(stored.shape[1], bases=bases, init=weight[0], blocks=entry).to(stored)
    scores = probe.fix_scales_(stored)(stored[:: max(1, len(stored) // 64)], stored)
    return weight / scores.std(-1).mean().clamp(min=torch.finfo(scores.dtype).tiny).cpu()
