"""Scores in standard operators for the ONNX exporters of torch, which know matrix products and TopK.

Blocks of several dimensions need no tensor of size L x S x d for ``dot`` and ``dis``: each block is a matrix product.
Other bases, and footprints of single dimensions, form that tensor, as the reference does.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ahop_layers.ops.reference import block_products, block_sums, fold, pair_values, weigh


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
            values = (block_products if base == "dot" else _block_distances)(query, key, n)
        else:
            width = None if widths is None else widths[index]
            values = block_sums(pair_values(query, key, base, width), n, blocks)
        scores.append(weigh(values.sort(dim=-1, descending=True).values, folded[..., index, :]))
    return torch.stack(scores).sum(0)


def _block_distances(query: Tensor, key: Tensor, n: int) -> Tensor:
    """Negative squared distances of n consecutive blocks: ``(..., L, S, n)``."""
    center = key.mean(-2, keepdim=True)  # to avoid cancellation far from the origin
    query, key = query - center, key - center
    of_query, of_key = (torch.unflatten(each, -1, (n, -1)).square().sum(-1) for each in (query, key))
    return 2 * block_products(query, key, n) - of_query.unsqueeze(-2) - of_key.unsqueeze(-3)
