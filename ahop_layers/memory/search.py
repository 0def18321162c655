"""Search: queries are scored against what a memory stored at one moment, and the best patterns are its hits."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_finite_rows, check_same_device, describe
from ahop_layers.memory.arrays import as_tensor, top_k
from ahop_layers.memory.shortlist import SAMPLE, Index, best_of_shortlist, first_stage, linear_scores
from ahop_layers.memory.storage import Stored, read_values, scoring_dtype
from ahop_layers.ops.operators import check_differentiable
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity import protocol
from ahop_layers.similarity.protocol import Similarity
from ahop_layers.variants import known_range

QUERY_ROWS = 256
"""Number of queries that are scored at once where the scores of a block of patterns are not kept."""

BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS = 2**21, 2**26
"""Number of elements of the patterns that are scored at once, to bound the memory that a similarity needs."""

BLOCK_SCORES = 2**23
"""Number of scores that are stored at once where the scores of all patterns are needed."""

KEPT_ELEMENTS = 2**28
"""Maximum number of elements of prepared copies of the patterns: 1 GiB in float32."""


class Queries(NamedTuple):
    """Queries of all ranks as a matrix ``rows (L, d)``, of which those at ``own`` are of this rank.

    ``missing`` says whether they or the patterns have unknown values. ``batch`` is the shape of the queries of this
    rank without that of a pattern.
    """

    rows: Tensor
    own: slice
    missing: bool
    batch: Sequence[int]

    def result(self, values: Tensor) -> Tensor:
        """Returns the values ``(L, ...)`` of the queries of this rank: ``(*batch, ...)``."""
        return values[self.own].reshape((*self.batch, *values.shape[1:]))


class Candidates(NamedTuple):
    """Patterns of each query, best first: scores and indices ``(L, m)``, of which the first ``k`` are its hits.

    If ``short``, they are a shortlist. Otherwise all patterns were scored, and m is k.
    """

    scores: Tensor
    indices: Tensor
    k: int
    short: bool


class Scorer(NamedTuple):
    """Scores queries against what a memory stored at one moment."""

    stored: Stored
    similarity: Similarity
    modulation: nn.Module | None

    def queries(self, x: Any) -> Queries:
        """Returns queries ``(..., d)``, or those in the shape of the patterns, as a matrix; those of all ranks."""
        stored, error = self.stored, None
        try:
            rows, batch, missing = self._own_queries(x)
        except AHopError as raised:
            rows, batch, missing, error = stored.block(0, 0), (), False, raised
        rows, own = stored.ranks.queries(rows, error)
        rows = self.within_reach(rows)
        missing = missing or stored.unknown or (not stored.ranks.alone and has_nan(rows))  # of other ranks
        return Queries(rows, own, missing, batch)

    def _own_queries(self, x: Any) -> tuple[Tensor, Sequence[int], bool]:
        stored, name = self.stored, "queries x"
        given = as_tensor(name, x, stored.patterns.device)
        axes = len(stored.shape)
        if given.shape[-axes:] == stored.shape:
            batch = given.shape[:-axes]
        elif given.ndim and given.shape[-1] == stored.dim:
            batch = given.shape[:-1]
        else:
            shape = f" or {('...', *stored.shape)}".replace("'", "") if axes > 1 else ""
            rule = f"{name} must be (..., d){shape} with the d = {stored.dim} of the patterns"
            raise AHopError(f"{rule}, got {describe(given)}")
        check_same_device(**{name: given, "patterns": stored.patterns})
        check_differentiable(**{name: given, "patterns": stored.patterns})
        rows, dtype = given.reshape(-1, stored.dim), stored.dtype
        if torch.compiler.is_compiling():
            return rows.to(dtype), batch, False
        missing, largest = read_values(name, rows)
        if missing:
            self.check_missing(name)
        if largest > stored.largest:
            held = next(each for each in (dtype, torch.float32, torch.float64) if largest <= torch.finfo(each).max)
            dtype = scoring_dtype(held, stored.dim, min(max(largest, 1.0), 1e100))
        return rows.to(dtype), batch, missing

    def within_reach(self, rows: Tensor) -> Tensor:
        """Clamps ``rows (L, d)`` as :meth:`clamped` where a learned score does not saturate."""
        return self.clamped(rows) if protocol.is_unbounded(self.similarity) else rows

    def clamped(self, rows: Tensor) -> Tensor:
        """Clamps values that are farther from those of the patterns than these are from each other.

        Such a value is wrong, however far away it is, and must not decide a score alone.
        """
        low, high = self.stored.keep("reach", self._reach)
        return rows.clamp(low.to(rows.dtype), high.to(rows.dtype))

    def _reach(self) -> tuple[Tensor, Tensor]:
        """Returns how far a value may be from those of the patterns of all ranks: its limits, ``(d,)`` each."""
        patterns, wide = self.stored.patterns, accumulation_dtype(self.stored.dtype)
        found = known_range(patterns) if patterns.is_floating_point() else patterns.aminmax(dim=0)
        lows, highs = self.stored.ranks.gather(torch.stack(tuple(found)).to(wide)).unbind(1)
        low, high = lows.nan_to_num(torch.inf).amin(0), highs.nan_to_num(-torch.inf).amax(0)
        span = high - low
        span = torch.where(span > 0, span, span.max().clamp(min=0))
        nothing = low > high
        return (low - span).masked_fill(nothing, -torch.inf), (high + span).masked_fill(nothing, torch.inf)

    def allows_missing(self) -> bool:
        """Returns whether the similarity can score pairs with missing values."""
        return self.modulation is None and protocol.allows_missing(self.similarity)

    def check_missing(self, name: str) -> None:
        """Raises if the similarity cannot score pairs with missing values."""
        if not self.allows_missing():
            raise AHopError(f"{name} must not hold NaN for this similarity, got NaN: similarity='auto' allows it")

    def modulated(self, patterns: Tensor) -> Tensor:
        """Transforms patterns ``(S, d)`` by the modulation, if there is one."""
        modulated: Tensor = patterns if self.modulation is None else self.modulation(patterns)
        return modulated

    def scores(self, rows: Tensor, missing: bool | None = None) -> Tensor:
        """Scores ``rows (L, d)`` against the patterns of all ranks: ``(L, N)``."""
        return self.stored.ranks.columns(torch.cat(list(self.blocks(rows, missing)), -1))

    def blocks(self, rows: Tensor, missing: bool | None = None) -> Iterator[Tensor]:
        """Yields the scores of ``rows (L, d)`` for one block of the patterns of this rank at a time.

        ``missing`` says whether queries or patterns have unknown values; None reads the queries for NaN.
        """
        stored, prior = self.stored, self.stored.own_prior
        if missing is None:
            missing = stored.unknown or has_nan(rows)
            if missing:
                self.check_missing("queries")
        size, copies = self._block_size(len(rows)), self._prepared()
        for start in range(0, len(stored.patterns), size):
            key = self.modulated(stored.block(start, size))
            prepared = None if copies is None else [copy[start : start + size] for copy in copies]
            scores = self._compare(rows, key, missing, prepared)
            yield scores if prior is None else scores + prior[start : start + len(key)]

    def pairs(self, rows: Tensor, indices: Tensor, missing: bool) -> Tensor:
        """Scores each query ``rows (L, d)`` against its own patterns ``indices (L, m)`` of this rank: ``(L, m)``."""
        stored, prior, parts = self.stored, self.stored.own_prior, []
        size = max(1, BLOCK_ELEMENTS // (indices.shape[1] * rows.shape[1]))
        for queries, places in zip(torch.split(rows, size), torch.split(indices, size), strict=True):
            key = self.modulated(stored.patterns[places.flatten()].to(stored.dtype))
            key = key.reshape(*places.shape, key.shape[-1])
            if protocol.takes_batches(self.similarity):
                parts.append(self._compare(queries[:, None], key, missing).squeeze(1))
            else:
                parts += [self._compare(query[None], each, missing) for query, each in zip(queries, key, strict=True)]
        scores = torch.cat(parts) if parts else rows.new_empty(indices.shape)
        return scores if prior is None else scores + prior[indices]

    def search(self, asked: Queries, k: int, m: int | None, index: Index | None) -> Candidates:
        """Finds the ``k`` best patterns of each query, out of all or of a shortlist of ``m``."""
        chunks = torch.split(asked.rows, QUERY_ROWS)
        short = m is not None and m < self.stored.count
        if m is not None and short:
            parts = [self._shortlist(chunk, k, m, asked.missing, index) for chunk in chunks]
        else:
            size, ranks = min(k, len(self.stored.patterns)), self.stored.ranks
            parts = [ranks.best(*top_k(self.blocks(chunk, asked.missing), size), k) for chunk in chunks]
        scores, indices = (torch.cat(each) for each in zip(*parts, strict=True))
        return Candidates(scores, indices, k, short)

    def _shortlist(self, rows: Tensor, k: int, m: int, missing: bool, index: Index | None) -> tuple[Tensor, Tensor]:
        """Returns the scores and indices of a shortlist of ``m`` patterns, best first."""
        stored, size = self.stored, min(SAMPLE, self.stored.count)
        sample = stored.sample(torch.arange(size, device=rows.device) * stored.count // size)
        filled, center = rows, None
        if missing:  # the first stage replaces unknown values by the mean of their dimension
            center = sample.nanmean(0).nan_to_num(0.0)
            filled, sample = (torch.where(each.isnan(), center, each) for each in (rows, sample))
        linear = linear_scores(self.similarity, self.modulated, filled, sample)
        own = min(m, len(stored.patterns))
        if index is None:
            first, indices = first_stage(linear, stored, own, center if stored.unknown else None)
        else:
            index.check(stored)
            first, indices = index.shortlist(linear, own)
        scores = self.pairs(rows, indices, missing).masked_fill(first == -torch.inf, -torch.inf)
        ranks = stored.ranks
        first, scores, indices = (ranks.columns(each, m) for each in (first, scores, indices + ranks.start))
        scores, indices = best_of_shortlist(first, scores, indices, m)
        if index is not None and ((first > -torch.inf).sum(-1) < k).any():
            check_finite_rows(**{"queries x": filled})
            raise AHopError(f"the index must find at least k = {k} patterns for a query, got fewer: set its nprobe")
        return scores, indices

    def _compare(self, query: Tensor, key: Tensor, missing: bool, prepared: Sequence[Tensor] | None = None) -> Tensor:
        """Scores ``query (..., L, d)`` against modulated patterns ``key (..., S, d)``."""
        key = key.to(query.dtype)
        scores, patterns = protocol.score(self.similarity, query, key, missing, prepared), self.stored.patterns
        in_units = getattr(self.similarity, "units", None) is not None
        return scores.to(patterns.dtype) if in_units and patterns.is_floating_point() else scores  # without a scale

    def _prepared(self) -> Sequence[Tensor] | None:
        """Returns copies of the patterns as the similarity prepares them, if it needs any."""
        stored, similarity = self.stored, self.similarity
        sources = [] if self.modulation is not None else protocol.sources(similarity)
        elements = len(stored.patterns) * sum(source.shape[-1] for source in sources if source.ndim)
        if not 0 < elements <= KEPT_ELEMENTS or torch.compiler.is_compiling():
            return None
        if stored.patterns.requires_grad or any(each.is_inference() for each in (stored.patterns, *sources)):
            return None  # no gradient; no version counter

        def copies() -> tuple[Any, Sequence[Tensor]]:
            return sources, protocol.prepare(similarity, stored.block(0, stored.count))

        found: Sequence[Tensor]
        versions = [(id(source), source._version) for source in sources]  # the ids stay in use
        _, found = stored.keep(f"prepared {versions}", copies)
        return found

    def _block_size(self, queries: int) -> int:
        """Returns the number of patterns that are scored at once.

        More than QUERY_ROWS queries are only scored at once where all scores are kept, so that small blocks would save
        no memory. On a GPU, each call has a fixed cost. Some similarities need several times the memory of a block.
        """
        dim, queries = self.stored.dim, max(1, queries)
        size = max(1, min(BLOCK_ELEMENTS // dim, BLOCK_SCORES // min(queries, QUERY_ROWS)))
        if not protocol.is_fused(self.similarity) or self.stored.patterns.device.type != "cuda":
            return size
        return max(size, min(GPU_BLOCK_ELEMENTS // dim, BLOCK_SCORES // queries))


def has_nan(rows: Tensor) -> bool:
    """Returns whether queries have unknown values. A branch on queries would break a compiled graph."""
    return not torch.compiler.is_compiling() and not rows.is_meta and bool(rows.isnan().any())
