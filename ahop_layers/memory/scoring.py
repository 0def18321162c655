"""Scores of stored patterns: search, recall and classification."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, dot_product
from ahop_layers.errors import AHopError, check_callable, check_choice, check_finite_rows, check_sizes
from ahop_layers.memory.arranged import arranged_patterns
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.labels import class_logsumexp
from ahop_layers.memory.presets import FIXED, known_scores, named_similarity
from ahop_layers.memory.search import QUERY_ROWS, Array, as_given, as_queries, top_k
from ahop_layers.memory.shards import all_rows
from ahop_layers.memory.shortlist import Index, best_of_shortlist, first_stage, linear_scores, sample_index
from ahop_layers.memory.store import PatternStore
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity import AdaptiveSimilarity

BLOCK_ELEMENTS = 2**21
"""Number of elements of the patterns that are scored at once, to bound the memory that a similarity needs."""

BLOCK_SCORES = 2**23
"""Number of scores that are stored at once where the scores of all patterns are needed."""

GPU_BLOCK_ELEMENTS = 2**26
"""Number of elements of the patterns that a GPU scores at once: one million patterns with 64 dimensions."""


def _has_nan(rows: Tensor) -> bool:
    """Returns whether queries have unknown values. A branch on queries would break a compiled graph."""
    return not torch.compiler.is_compiling() and not rows.is_meta and bool(rows.isnan().any())


def _filled(rows: Tensor, center: Tensor) -> Tensor:
    """Replaces NaN in ``rows (L, d)`` by the values of ``center (d,)``."""
    return torch.where(rows.isnan(), center, rows)


def block_size(dim: int, queries: int, device: str) -> int:
    """Returns the number of patterns of ``dim`` dimensions that are scored at once.

    A block has at most BLOCK_SCORES scores, for up to QUERY_ROWS queries. More are only scored at once where all scores
    are kept, so that small blocks would save no memory. On a GPU, blocks are as large as the memory of their scores
    allows, because each call has a fixed cost: blocks for the cache of a CPU would spend most of the time of a search
    for few queries on calls.
    """
    queries = max(1, queries)
    size = max(1, min(BLOCK_ELEMENTS // dim, BLOCK_SCORES // min(queries, QUERY_ROWS)))
    return max(size, min(GPU_BLOCK_ELEMENTS // dim, BLOCK_SCORES // queries)) if device == "cuda" else size


class ScoredPatterns(PatternStore):
    """Stored patterns, a similarity that scores queries against them, and a modulation of the patterns.

    See :class:`ahop_layers.AssociativeMemory` for the arguments.
    """

    modulation: nn.Module | None
    _index: Index | None = None

    def __init__(
        self, patterns: Any, similarity: str | Similarity, modulation: nn.Module | None, **stored: Any
    ) -> None:
        super().__init__(patterns, **stored)
        self.similarity = named_similarity(similarity, self.patterns) if isinstance(similarity, str) else similarity
        check_callable(similarity=self.similarity)
        if modulation is not None:
            check_callable(modulation=modulation)
        self.modulation = modulation
        if self._unknown:
            self._check_missing("patterns")
        if isinstance(self.similarity, AdaptiveSimilarity) and not self.patterns.is_meta:
            self.similarity.fix_norms_(self.patterns)  # not per block of patterns
            if not isinstance(self.similarity, AutoSimilarity):
                self.similarity.fix_widths_(self.patterns)

    def scores(self, x: Array) -> Array:
        """Score ``x (..., d)`` against all patterns: ``(..., N)``.

        Here and in the other methods, queries are converted to the dtype of the patterns. NumPy arrays are accepted,
        and the result is then a NumPy array. NaN in a query or a pattern is an unknown value, and a pair is scored by
        the values that both know: see :func:`~ahop_layers.adaptive_similarity`. Without any, the score is -inf.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3), "dot").scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        rows, own, missing = self._queries(x)
        return as_given(x, self._all_scores(rows, missing)[own].reshape(*x.shape[:-1], self._count))

    @torch.no_grad()
    def recall(self, x: Array) -> Array:
        """Find the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3), "dot").recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        return self.search(x)[1].reshape(x.shape[:-1])

    @torch.no_grad()
    def search(self, x: Array, k: int = 1, shortlist: int | None = None) -> tuple[Array, Array]:
        """Find the ``k`` patterns with the largest scores. Memory is independent of N.

        Args:
            x: queries ``(..., d)``, a tensor or a NumPy array.
            k: number of patterns to find for each query.
            shortlist: score only this number of patterns for each query, those with the largest approximate scores. The
                approximation is linear in the patterns and costs one matrix product; after :meth:`build_index`, the
                index finds the patterns. The result is not exact: a pattern that is not on the shortlist is not found.
                None scores all patterns.

        Returns:
            The scores and the indices of the patterns, ``(..., k)`` each, best first. Equal scores are ordered by
            index.

        Raises:
            AHopError: ``x`` does not match the patterns, ``k`` is not an integer from 1 to N, or ``shortlist`` is not
                an integer of at least ``k``.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(4), "dot")
        >>> scores, indices = memory.search(torch.tensor([[0.5, 2.0, 0.0, 1.0], [1.0, 1.0, 1.0, 3.0]]), k=2)
        >>> scores
        tensor([[2., 1.],
                [3., 1.]])
        >>> indices
        tensor([[1, 3],
                [3, 0]])
        """
        check_sizes(k=k)
        if k > self._count:
            raise AHopError(f"k must be at most the number of patterns, {self._count}, got {k}")
        if shortlist is not None:
            check_sizes(shortlist=shortlist)
            if shortlist < k:
                raise AHopError(f"shortlist must be at least k = {k}, got {shortlist}")
            shortlist = int(shortlist)
        k = int(k)  # PyTorch does not accept all integers of NumPy
        rows, own, missing = self._queries(x)
        chunks = torch.split(rows, QUERY_ROWS)
        found = zip(*(self._search(chunk, k, shortlist, missing) for chunk in chunks), strict=True)
        scores, indices = (torch.cat(each)[own].reshape(*x.shape[:-1], k) for each in found)
        return as_given(x, scores), as_given(x, indices)

    def _search(self, rows: Tensor, k: int, m: int | None, missing: bool) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores of queries ``rows (L, d)`` and their indices, ``(L, k)`` each."""
        if m is not None and m < self._count:
            return self._search_shortlist(rows, k, m, missing)
        scores, indices = top_k(self._score_blocks(rows, missing), min(k, len(self.patterns)))
        return (scores, indices) if self.shard is None else self.shard.best(scores, indices, k)

    def _search_shortlist(self, rows: Tensor, k: int, m: int, missing: bool) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores out of the patterns with the ``m`` largest approximate scores."""
        sample = all_rows(self.patterns, self.shard)[sample_index(self._count, rows.device)]
        filled, patterns = rows, self.patterns
        if missing:  # the first stage replaces unknown values by the mean of their dimension
            center = sample.nanmean(0).nan_to_num(0.0)
            filled, sample = _filled(rows, center), _filled(sample, center)
            if self._unknown and self._index is None:
                patterns = _filled(patterns, center)
        linear = linear_scores(self.similarity, self._modulated, filled, sample)
        own = min(m, len(self.patterns))
        if self._index is None:
            first, indices = first_stage(linear, patterns, self._own_prior(), own)
        else:
            self._index.check(self.patterns)
            first, indices = self._index.shortlist(linear, own)
        scores = self._score_pairs(rows, indices, missing).masked_fill(first == -torch.inf, -torch.inf)
        if self.shard is not None:
            first, scores, indices = self.shard.candidates(first, scores, indices, m=m)
        scores, indices = best_of_shortlist(first, scores, indices, m, k)
        if self._index is not None and ((first > -torch.inf).sum(-1) < k).any():
            check_finite_rows(**{"queries x": filled})
            raise AHopError(f"the index must find at least k = {k} patterns for a query, got fewer: set its nprobe")
        return scores, indices

    def _score_pairs(self, rows: Tensor, indices: Tensor, missing: bool) -> Tensor:
        """Scores each query ``rows (L, d)`` against its own patterns ``indices (L, m)``: ``(L, m)``."""
        size = max(1, BLOCK_ELEMENTS // (indices.shape[1] * rows.shape[1]))
        parts = []
        for queries, places in zip(torch.split(rows, size), torch.split(indices, size), strict=True):
            key = self._modulated(self.patterns[places.flatten()])
            key = key.reshape(*places.shape, key.shape[-1])
            if isinstance(self.similarity, AdaptiveSimilarity):
                parts.append(self._compare(queries[:, None], key, missing).squeeze(1))
            else:
                parts += [self._compare(query[None], each, missing) for query, each in zip(queries, key, strict=True)]
        scores = torch.cat(parts) if parts else rows.new_empty(indices.shape)
        prior = self._own_prior()
        return scores if prior is None else scores + prior[indices]

    def build_index(self, description: str | None = "HNSW32", metric: str | None = None) -> Any:
        """Build a FAISS index of the patterns, which finds the shortlists of later searches, and return it.

        An index is faster than a matrix product for many patterns, and finds most of what that would find. It is not
        saved. If the patterns change, for example by :meth:`add`, ``.double()`` or ``load_state_dict``, it must be
        built again or removed before the next shortlist. With shards, each rank builds one of its part.

        Args:
            description: as for ``faiss.index_factory``, such as ``"HNSW32"`` or ``"IVF4096,Flat"``. Set options of the
                index, such as ``nprobe``, on the result. None removes the index: a matrix product finds later
                shortlists.
            metric: ``"dis"`` or ``"dot"``; None means ``"dot"`` for the dot product and ``"dis"`` for all others.

        Raises:
            AHopError: FAISS is not installed (extra ``search``), an argument is invalid, a pattern holds NaN, or the
                patterns were created in inference mode.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.randn(10_000, 32), similarity="dis")
        >>> index = memory.build_index("HNSW32")  # doctest: +SKIP
        >>> memory.search(memory.patterns[:2], shortlist=100)[1].flatten()
        tensor([0, 1])
        """
        if description is None:
            self._index = None
            return None
        if self.patterns.is_inference():  # without a version counter, changes could not be noticed
            raise AHopError("build_index needs patterns created outside inference mode, got an inference tensor")
        if self._unknown:
            raise AHopError("build_index needs patterns without unknown values, got NaN: shortlists work without it")
        metric = metric or ("dot" if self.similarity is dot_product else "dis")
        check_choice("metric", metric, ("dis", "dot"))
        self._index = Index(self.patterns, description, metric)
        return self._index.faiss

    def class_scores(self, x: Array) -> Array:
        """Compute the log-sum-exp of the scores over the patterns of each class: ``(..., d) -> (..., n_classes)``.

        The scores are multiplied by :attr:`beta`, and the classes are in the order of ``classes``. The softmax of the
        result is the sum of the softmax weights of the patterns of each class. Without gradients, memory is independent
        of N.

        Raises:
            AHopError: the memory has no labels, or ``x`` does not match the patterns.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3), "dot", labels=[4, 7, 7])
        >>> memory.class_scores(torch.tensor([1.0, 2.0, 2.0]))
        tensor([1.0000, 2.6931])
        """
        return as_given(x, self._class_scores(x).to(self.patterns.dtype))

    def _class_scores(self, x: Array) -> Tensor:
        """Compute the :meth:`class_scores` in the accumulation dtype, because they can exceed float16."""
        rows, own, missing = self._queries(x)
        classes = self._given_classes()
        chunks = torch.split(rows, QUERY_ROWS)
        scores = [class_logsumexp(self._logit_blocks(chunk, missing), classes, self.shard) for chunk in chunks]
        return torch.cat(scores)[own].reshape(*x.shape[:-1], len(classes.labels))

    @torch.no_grad()
    def classify(self, x: Array) -> Array:
        """Find the label of the class with the largest score: ``(..., d) -> (...)``.

        Raises:
            AHopError: the memory has no labels, or ``x`` does not match the patterns.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3), "dot", labels=[4, 7, 7])
        >>> memory.classify(torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.5, 1.8]]))
        tensor([4, 7])
        """
        return as_given(x, self.classes[self._class_scores(x).argmax(-1)])

    def _bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity subtracts from a query, if it has one."""
        bias = getattr(self.similarity, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.shape == self.patterns.shape[1:] else None

    def _modulated(self, patterns: Tensor) -> Tensor:
        modulated: Tensor = patterns if self.modulation is None else self.modulation(patterns)
        return modulated

    def _rows(self, x: Array) -> Tensor:
        """Returns the queries ``x (..., d)`` as a matrix with the dtype of the patterns, or raises."""
        return self._own_queries(x)[0]

    def _own_queries(self, x: Array) -> tuple[Tensor, bool]:
        """Returns the :meth:`_rows` of ``x``, and whether they or the patterns have unknown values."""
        rows = as_queries(x, self.patterns).reshape(-1, self.patterns.shape[1])
        missing = _has_nan(rows)
        if missing:
            self._check_missing("queries x")
            unknown = rows.isnan().all(-1)
            if unknown.any():
                row = int(unknown.nonzero()[0])
                raise AHopError(f"queries x must have a known value in each row, got NaN only in row {row}")
        return rows, missing or self._unknown

    def _all_rows(self, x: Array) -> tuple[Tensor, slice]:
        """Returns the queries that this rank scores as a matrix, those of all ranks, and the place of ``x`` in them."""
        return self._queries(x)[:2]

    def _queries(self, x: Array) -> tuple[Tensor, slice, bool]:
        """Returns the :meth:`_all_rows` of ``x``, and whether they or the patterns have unknown values."""
        if self.shard is None:
            rows, missing = self._own_queries(x)
            return rows, slice(None), missing
        try:
            rows, error = self._rows(x), None
        except AHopError as raised:
            rows, error = self.patterns[:0], raised
        rows, own = self.shard.queries(rows, error)
        return rows, own, self._unknown or _has_nan(rows)  # also those of other ranks

    def _chunks(self, rows: Tensor) -> Sequence[Tensor]:
        """Splits queries ``rows (L, d)`` so that the scores of each part for all patterns fit in memory."""
        return torch.split(rows, max(1, BLOCK_SCORES // self._count))

    def _all_scores(self, rows: Tensor, missing: bool | None = None) -> Tensor:
        """Scores ``rows (L, d)`` against the patterns of all ranks: ``(L, N)``."""
        scores = torch.cat(list(self._score_blocks(rows, missing)), -1)
        return scores if self.shard is None else self.shard.columns(scores)

    def _block_size(self, queries: int) -> int:
        # Other similarities may need several times the memory of a block.
        adaptive = self.similarity if isinstance(self.similarity, AdaptiveSimilarity) else None
        large = adaptive is not None and (adaptive.is_single() or isinstance(adaptive, AutoSimilarity))
        return block_size(self.patterns.shape[1], queries, self.patterns.device.type if large else "cpu")

    def _score_blocks(self, rows: Tensor, missing: bool | None = None) -> Iterator[Tensor]:
        """Yield the scores of ``rows (L, d)`` for one block of patterns at a time.

        ``missing`` says whether queries or patterns have unknown values; None reads the queries for NaN.
        """
        size, copies, prior = self._block_size(len(rows)), None, self._own_prior()
        missing = self._unknown or _has_nan(rows) if missing is None else missing
        if isinstance(self.similarity, AdaptiveSimilarity) and self.modulation is None:
            copies = arranged_patterns(self.similarity, self.patterns)
        for start, block in zip(range(0, len(self.patterns), size), torch.split(self.patterns, size), strict=True):
            key = self._modulated(block)
            arranged = None
            if copies is not None:
                arranged = [None if copy is None else copy[start : start + size] for copy in copies]
            scores = self._compare(rows, key, missing, arranged)
            yield scores if prior is None else scores + prior[start : start + len(block)]

    def _compare(self, query: Tensor, key: Tensor, missing: bool, arranged: Any = None) -> Tensor:
        """Scores ``query (..., L, d)`` against modulated patterns ``key (..., S, d)``."""
        if isinstance(self.similarity, AdaptiveSimilarity):
            options: dict[str, Any] = {"arranged": arranged, "missing": missing or None}
            scores: Tensor = self.similarity(query, key, **{name: each for name, each in options.items() if each})
        elif missing and isinstance(self.similarity, TableSimilarity):
            scores = self.similarity(query, key, missing=True)
        elif missing:
            scores = known_scores(self.similarity, query, key)
        else:
            scores = self.similarity(query, key)
        return scores

    def _check_missing(self, name: str) -> None:
        adaptive = isinstance(self.similarity, (AdaptiveSimilarity, TableSimilarity))
        if self.modulation is not None or not (adaptive or self.similarity in FIXED.values()):
            raise AHopError(f"{name} must not hold NaN for this similarity, got NaN: similarity='auto' allows it")

    def _logit_blocks(self, rows: Tensor, missing: bool | None = None) -> Iterator[Tensor]:
        """Yield the scores as :meth:`_score_blocks`, multiplied by the inverse temperature."""
        return map(self._logits, self._score_blocks(rows, missing))

    def _logits(self, scores: Tensor) -> Tensor:
        """Multiply scores by the inverse temperature, in the accumulation dtype, because the product can be large."""
        return self.beta * scores.to(accumulation_dtype(scores.dtype))
