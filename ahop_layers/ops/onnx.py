"""Scores in standard operators for the ONNX exporters of torch, which know matrix products and TopK.

Blocks of several dimensions need no tensor of size L x S x d for ``dot`` and ``dis``: each block is a matrix product.
Other bases, and footprints of single dimensions, form that tensor, as the reference does.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ahop_layers.ops.reference import block_sums, fold, pair_values, weigh


def is_onnx_export() -> bool:
    """Returns whether ``torch.onnx.export`` traces this call.

    ``torch.onnx`` is not imported for the question: that takes as long as all of torch.
    """
    if torch.compiler.is_dynamo_compiling() or "torch.onnx" not in sys.modules:
        return False
    jit: Any = torch.jit
    return (torch.compiler.is_compiling() or jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def adaptive_similarity(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    blocks: Tensor | None = None,
    widths: Tensor | None = None,
) -> Tensor:
    """The scores of :func:`ahop_layers.ops.reference.adaptive_similarity`, with the same arguments."""
    n, d, folded = weight.shape[-1], query.shape[-1], fold(weight)
    scores = []
    for index, base in enumerate(bases):
        if base in ("dot", "dis") and n < d and blocks is None:
            values = _block_products(query, key, n, base == "dis")
        else:
            width = None if widths is None else widths[index]
            values = block_sums(pair_values(query, key, base, width), n, blocks)
        scores.append(weigh(values.sort(dim=-1, descending=True).values, folded[..., index, :]))
    return torch.stack(scores).sum(0)


def _block_products(query: Tensor, key: Tensor, n: int, distance: bool) -> Tensor:
    """Dot products of n consecutive blocks, or their negative squared distances: ``(..., L, S, n)``."""
    if distance:  # center first to avoid cancellation far from the origin
        center = key.mean(-2, keepdim=True)
        query, key = query - center, key - center
    query, key = (torch.unflatten(each, -1, (n, -1)).transpose(-2, -3) for each in (query, key))
    values = query @ key.mT
    if distance:
        values = 2 * values - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)
    return values.movedim(-3, -1)
