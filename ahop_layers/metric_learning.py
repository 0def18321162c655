"""AdaptiveDistance: a learned similarity as a distance of pytorch-metric-learning, for its losses and miners."""

from typing import Any

from torch import Tensor

from ahop_layers.similarity.adaptive import AdaptiveSimilarity, Init
from ahop_layers.similarity.blocks import BlocksArgument

try:
    from pytorch_metric_learning.distances import BaseDistance
except ImportError as error:
    message = "ahop_layers.metric_learning needs pytorch-metric-learning: pip install ahop-layers[metric]"
    raise ImportError(message) from error


class AdaptiveDistance(BaseDistance):  # type: ignore[misc]
    """Scores embeddings by an :class:`~ahop_layers.AdaptiveSimilarity`; a larger score means closer.

    With the default ``init="dot"`` it equals ``CosineSimilarity`` until it is trained. Its parameters are among those
    of a loss that has it: ``loss.parameters()`` belongs into the optimizer, or
    :func:`ahop_layers.parameter_groups` of the loss.

    Args:
        dim: dimension of the embeddings.
        bases, init, debias, blocks: see :class:`~ahop_layers.AdaptiveSimilarity`.
        keywords: arguments of ``BaseDistance``: ``normalize_embeddings``, ``p``, ``power``. ``is_inverted`` is True.

    >>> import torch
    >>> distance, x = AdaptiveDistance(16, blocks=4), torch.randn(3, 16)
    >>> torch.allclose(distance(x), torch.cosine_similarity(x[:, None], x[None], dim=-1), atol=1e-6)
    True
    """

    def __init__(
        self, dim: int, bases: Any = ("dis", "dot"), init: Init = "dot", debias: bool = False,
        blocks: BlocksArgument = None, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(is_inverted=True, **keywords)
        self.similarity = AdaptiveSimilarity(dim, None, bases, init, debias, blocks)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        """Scores every query against every reference: ``(L, d), (S, d) -> (L, S)``."""
        scores: Tensor = self.similarity(query_emb, query_emb if ref_emb is None else ref_emb)
        return scores

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Scores each query against the reference of the same row: ``(L, d), (L, d) -> (L,)``."""
        scores: Tensor = self.similarity(query_emb.unsqueeze(-2), ref_emb.unsqueeze(-2))
        return scores.flatten()
