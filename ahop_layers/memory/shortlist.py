"""The first stage of a search with a shortlist: scores that are linear in a pattern, by a matrix product or by FAISS.

For each query, a score is approximated by ``slope . pattern - curvature * |pattern|^2``. An adaptive similarity is
first replaced by a sum over blocks whose weights do not depend on the pattern: the mean weight of the block over a
sample of the patterns. A dimension that differs from all patterns, such as an outlier, has a low rank and a small
weight there as well. The mean gradient of this sum over the sample is the slope, and a regression of the rest is the
curvature. For the dot product and the negative squared distance, the approximation is exact up to a constant.
"""

import importlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError
from ahop_layers.memory.arrays import top_k
from ahop_layers.memory.storage import Stored, scoring_dtype
from ahop_layers.ops.reference import accumulation_dtype, fold
from ahop_layers.similarity.protocol import Similarity, Solvable, is_solvable

SAMPLE, SAMPLE_ELEMENTS = 256, 2**21
"""Number of patterns of the sample, and of elements of query-pattern pairs that are processed at once."""

FIRST_STAGE_SCORES = 2**22
"""Number of scores of the first stage that are computed at once."""

KEPT_NORMS = 2**28
"""Maximum number of squared norms that are kept for later searches: 1 GiB in float32."""


class Linear(NamedTuple):
    """Approximate scores: ``slope (L, d)`` and ``curvature (L, 1)`` of each query."""

    slope: Tensor
    curvature: Tensor


def linear_scores(similarity: Similarity, modulate: Callable[[Tensor], Tensor], rows: Tensor, sample: Tensor) -> Linear:
    """Approximates the scores of queries ``rows (L, d)``, from a ``sample (S, d)`` of the patterns."""
    if not len(rows):
        wide = sample.new_empty(0, sample.shape[1], dtype=accumulation_dtype(sample.dtype))
        return Linear(wide, wide[:, :1])
    size = max(1, SAMPLE_ELEMENTS // sample.numel())
    with torch.inference_mode(False):  # gradients are not recorded in inference mode
        if isinstance(similarity, nn.Module) and any(map(Tensor.is_inference, similarity.state_dict().values())):
            similarity = deepcopy(similarity)
        parts = [_linear(similarity, modulate, part.clone(), sample.clone()) for part in torch.split(rows, size)]
    return Linear(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _linear(similarity: Similarity, modulate: Callable[[Tensor], Tensor], rows: Tensor, sample: Tensor) -> Linear:
    sample = sample.to(accumulation_dtype(sample.dtype))
    with torch.enable_grad():
        # A copy for each query, because the gradient of a shared sample would be summed over the queries.
        keys = sample.expand(len(rows), *sample.shape).clone().requires_grad_()
        key = modulate(keys.to(rows.dtype).flatten(0, 1))
        key = key.reshape(*keys.shape[:2], -1)
        if is_solvable(similarity):
            scores = _without_ranks(similarity, rows.unsqueeze(1), key)
        else:
            scores = torch.cat([similarity(row[None], each) for row, each in zip(rows, key, strict=True)])
        if not scores.requires_grad:
            raise AHopError("shortlist needs a similarity that is differentiable in the patterns, got one that is not")
        (gradient,) = torch.autograd.grad(scores.sum(), keys)
    slope, rest = gradient.mean(1), scores.detach().to(sample.dtype)
    mean = sample.mean(0)
    deviation = sample - mean
    scale = deviation.abs().max()
    scale = torch.where(scale > 0, scale, 1.0)  # divides the deviations, because their fourth powers can overflow
    square = (deviation / scale).square().sum(-1)
    square = square - square.mean()
    rest = rest - slope @ deviation.mT
    curvature = -(rest @ square)[:, None] / square.square().sum().clamp(min=torch.finfo(square.dtype).tiny)
    curvature = curvature.clamp(min=0) / scale / scale
    return Linear(slope + 2 * curvature * mean, curvature)  # |pattern - mean|^2, expanded


def _without_ranks(similarity: Solvable, query: Tensor, key: Tensor) -> Tensor:
    """Scores ``query (L, 1, d)`` against ``key (L, S, d)`` with the mean weight of each block: ``(L, S)``."""
    total = query.new_zeros(())
    views = zip(similarity.parts(), similarity.views(query), similarity.views(key), strict=True)
    for part, own, other in views:
        weights = fold(part.footprint_weight().detach())
        for base, weight in zip(part.bases, weights, strict=True):
            values = part.block_similarities(own, other, base).squeeze(1)
            rank = values.detach().argsort(-1, descending=True).argsort(-1)
            total = total + (values * weight[rank].mean(1, keepdim=True)).sum(-1)
    return total


def first_stage(linear: Linear, stored: Stored, m: int, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the ``m`` largest approximate scores of the patterns and their indices: ``(L, m)`` each.

    ``center (d,)`` has the values that stand for unknown ones, None if all are known.
    """
    slope, curvature = linear
    patterns, prior, norms = stored.patterns, stored.own_prior, None
    if curvature.any() and center is None and len(patterns) <= KEPT_NORMS:
        norms = stored.keep("norms", lambda: _norms(patterns, stored.dtype))
    copies = slope.dtype != patterns.dtype or center is not None  # a slope can overflow half precision
    size = max(1, FIRST_STAGE_SCORES // max(1, len(slope), patterns.shape[1] if copies else 0))

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(patterns), size):
            block = patterns[start : start + size].to(slope.dtype)
            block = block if center is None else torch.where(block.isnan(), center, block)
            scores = (block @ slope[0])[None] if len(slope) == 1 else slope @ block.mT
            if curvature.any():
                square = _norms(block, stored.dtype) if norms is None else norms[start : start + size]
                scores = torch.addcmul(scores, curvature, square, value=-1)
            yield scores if prior is None else scores + prior[start : start + size]

    return top_k(blocks(), m)


def best_of_shortlist(first: Tensor, scores: Tensor, indices: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Returns the scores, best first, and the indices of the ``m`` candidates with the largest ``first``.

    All tensors are ``(L, K)`` with ``K >= m``, and the result is ``(L, m)``. Equal scores are ordered by index.
    """
    order = first.sort(dim=-1, descending=True, stable=True).indices[..., :m]
    indices, by_index = indices.gather(-1, order).sort(-1)
    scores = scores.gather(-1, order).gather(-1, by_index)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    return scores, indices.gather(-1, order)


def _norms(patterns: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the squared norms of patterns, which are read in blocks, in the accumulation dtype of ``dtype``."""
    size, wide = max(1, FIRST_STAGE_SCORES // patterns.shape[1]), accumulation_dtype(dtype)
    blocks = (block if block.is_floating_point() else block.float() for block in torch.split(patterns, size))
    return torch.cat([torch.linalg.vector_norm(block, dim=-1, dtype=wide) for block in blocks]).square()


class Index:
    """A FAISS index of the patterns of a memory.

    See :meth:`ahop_layers.AssociativeMemory.build_index` for ``description`` and ``metric``.

    Raises:
        AHopError: FAISS is not installed or refuses the description, or an index cannot find what is stored.
    """

    def __init__(self, stored: Stored, description: str, metric: str) -> None:
        patterns = stored.patterns
        if not isinstance(description, str):
            raise AHopError(f"description must be a string, got {type(description).__name__}")
        if patterns.is_inference():  # without a version counter, changes could not be noticed
            raise AHopError("build_index needs patterns created outside inference mode, got an inference tensor")
        if stored.unknown:
            raise AHopError("build_index needs patterns without unknown values, got NaN: shortlists work without it")
        if scoring_dtype(torch.float32, stored.dim, stored.largest) != torch.float32:
            rule = "build_index needs patterns with squares within the range of float32"
            raise AHopError(f"{rule}, got values up to {stored.largest:.3g}: shortlists work without it")
        try:
            faiss = importlib.import_module("faiss")
        except ImportError as error:
            raise AHopError("build_index needs FAISS, got no installation: install ahop-layers[search]") from error
        self.patterns, self.version, self.metric = patterns, patterns._version, metric
        self.radius = _norms(patterns[:: max(1, len(patterns) // SAMPLE)], stored.dtype).mean().sqrt()
        kind = faiss.METRIC_INNER_PRODUCT if metric == "dot" else faiss.METRIC_L2
        try:
            self.faiss = faiss.index_factory(patterns.shape[1], description, kind)
            size = max(1, FIRST_STAGE_SCORES // patterns.shape[1])
            if not self.faiss.is_trained:
                step = max(1, len(patterns) // size)
                self.faiss.train(_array(patterns[::step]))
            for block in torch.split(patterns, size):
                self.faiss.add(_array(block))
        except RuntimeError as error:
            raise AHopError(f"description must be that of a FAISS index, got {description!r}: {error}") from error

    def __reduce__(self) -> Any:
        return type(None), ()  # an index is neither copied nor saved

    def check(self, stored: Stored) -> None:
        """Raises unless the index was built for these patterns, which it finds without their prior."""
        if self.patterns is not stored.patterns or self.version != stored.patterns._version:
            rule = "the index must be that of the stored patterns, got one of others"
            raise AHopError(f"{rule}: call build_index again, or build_index(None) to search without")
        if stored.prior is not None and bool((stored.prior != stored.prior[0]).any()):
            raise AHopError("an index needs equal priors, got different ones: call build_index(None) to search without")

    def shortlist(self, linear: Linear, m: int) -> tuple[Tensor, Tensor]:
        """Returns approximate scores and the indices of ``m`` patterns for each query: ``(L, m)`` each.

        A score is -inf where the index found fewer patterns. For ``"dis"``, the query is the point where the
        approximate score is largest. It is at most four times as far from zero as the patterns are.
        """
        slope, curvature = linear
        if self.metric == "dis":
            length = torch.linalg.vector_norm(slope, dim=-1, keepdim=True)
            slope = slope / (2 * curvature).maximum(length / (4 * self.radius.to(slope))).clamp(min=1e-30)
        options = None
        if hasattr(self.faiss, "hnsw"):  # of this search alone
            library = importlib.import_module("faiss")
            options = library.SearchParametersHNSW(efSearch=max(self.faiss.hnsw.efSearch, m))
        result = self.faiss.search(_array(slope), m, params=options)
        found, places = (torch.from_numpy(each).to(slope.device) for each in result)
        scores = found if self.metric == "dot" else -found
        return scores.masked_fill(places < 0, -torch.inf), places.clamp(min=0)


def _array(rows: Tensor) -> Any:
    return rows.detach().float().cpu().contiguous().numpy()
