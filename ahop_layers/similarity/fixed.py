"""Similarities without parameters: the sum of one base over all dimensions."""

from collections.abc import Callable

from torch import Tensor, cdist

from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.onnx import is_onnx_export
from ahop_layers.ops.reference import accumulation_dtype, pair_values


def dot_product(query: Tensor, key: Tensor, missing: bool = False) -> Tensor:
    """Computes the dot product: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    return known_scores("dot", query, key) if missing else query @ key.mT


def negative_distance(query: Tensor, key: Tensor, missing: bool = False) -> Tensor:
    """Computes the negative squared distance: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    if missing:
        return known_scores("dis", query, key)
    # Center first to avoid cancellation far from the origin. A rounded center keeps integers exact.
    center = key.mean(-2, keepdim=True).detach().round()
    query, key = query - center, key - center
    return 2 * query @ key.mT - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)


def negative_manhattan(query: Tensor, key: Tensor, missing: bool = False) -> Tensor:
    """Computes the negative sum of absolute differences: ``(L, d), (S, d) -> (L, S)``."""
    if missing:
        return known_scores("l1", query, key)
    wide = accumulation_dtype(query.dtype)
    if is_onnx_export():  # which does not know cdist
        return pair_values(query.to(wide), key.to(wide), "l1").sum(-1).to(query.dtype)
    return -cdist(query.to(wide), key.to(wide), p=1).to(query.dtype)


FIXED: dict[str, Callable[..., Tensor]] = {
    "dot": dot_product,
    "dis": negative_distance,
    "l1": negative_manhattan,
}
"""The similarities without parameters, by the base that each sums up. If ``missing``, NaN is an unknown value."""


def known_scores(base: str, query: Tensor, key: Tensor) -> Tensor:
    """Scores the known values by one base: ``d / m`` times the sum over m of d dimensions."""
    weight = query.new_zeros(1, query.shape[-1])
    weight[0, -1] = 1.0
    return adaptive_similarity(query, key, weight, (base,), missing=True)


def known_shares(base: str, query: Tensor, key: Tensor) -> Tensor:
    """Returns what each dimension adds to the score of ``query (L, d)`` and ``key (L, d)``: ``(L, d)``."""
    values = pair_values(query[:, None], key[:, None], base).reshape(query.shape)
    count = (~values.isnan()).sum(-1, keepdim=True).clamp(min=1)
    return values.nan_to_num(0.0) * (query.shape[-1] / count)
