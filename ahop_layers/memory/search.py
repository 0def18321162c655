"""Search: queries are scored against what a memory stored at one moment, and the best patterns are its hits."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, check_same_device, describe
from ahop_layers.memory.arrays import as_tensor, top_k
from ahop_layers.memory.codes import Codes, make_codes
from ahop_layers.memory.labels import class_logsumexp
from ahop_layers.memory.storage import Stored, read_values
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.protocol import Similarity

QUERIES_AT_ONCE = 256  # number of queries that are scored at once where the scores of a chunk are not kept
CHUNK_ELEMENTS = 2**21  # number of elements of the patterns that are scored at once, to bound memory
GPU_CHUNK_ELEMENTS = 2**26  # the same on a GPU, where each call has a fixed cost
CHUNK_SCORES = 2**23  # number of scores that are stored at once where the scores of all patterns are needed
SHORTLIST_RECALL = 0.99  # share of what an exact search finds that a measured shortlist keeps
SHORTEST_SHORTLIST, LONGEST_SHORTLIST = 2**5, 2**13
SHORTLIST_COST = 32  # a pattern of a shortlist takes the time of so many in an exact search, because it is gathered
PREPARED_ELEMENTS = 2**28  # most elements of the patterns that a similarity prepares: 1 GiB in float32


class Shortlist(NamedTuple):
    """How many patterns ``shortlist="auto"`` scores, its recall of what an exact search finds, and seconds a query."""

    length: int
    recall: float
    seconds: float
    exact_seconds: float

    def __str__(self) -> str:
        times = f"{1e3 * self.seconds:.2f} ms a query, exact {1e3 * self.exact_seconds:.2f} ms"
        return f"shortlist of {self.length}: recall {self.recall:.3f} of an exact search, {times}"


class Queries(NamedTuple):
    """Queries as ``rows (L, d)``, whether they or the patterns have unknown values, and their ``batch`` shape."""

    rows: Tensor
    missing: bool
    batch: Sequence[int]

    def result(self, values: Tensor) -> Tensor:
        """Returns values ``(L, ...)`` in the shape of the queries: ``(*batch, ...)``."""
        return values.reshape((*self.batch, *values.shape[1:]))


class Scorer(NamedTuple):
    """Scores queries against what a memory stored at one moment."""

    stored: Stored
    similarity: Similarity

    def queries(self, x: Any, call: str) -> Queries:
        """Returns queries ``(..., d)``, or in the shape of the patterns, as a matrix, for the method ``call``."""
        shards = self.stored.shards
        try:
            rows, batch, missing = self._read_queries(x)
        except AHopError as error:
            if shards is not None:
                shards.agree(f"{call}: {error}")
            raise
        if shards is not None:
            shards.agree(call, rows)
        return Queries(self.within_reach(rows), missing or self.stored.unknown, batch)

    def _read_queries(self, x: Any) -> tuple[Tensor, Sequence[int], bool]:
        stored, name = self.stored, "queries x"
        given = as_tensor(name, x, stored.patterns.device, stored.columns)
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
        rows = given.reshape(-1, stored.dim)
        if torch.compiler.is_compiling():
            return rows.to(stored.dtype), batch, False
        missing, largest = read_values(name, rows)
        if missing:
            self.check_missing(name)
        dtype, limit = stored.dtype, _largest_value(stored.dtype, stored.dim)
        if largest > max(limit, stored.largest):  # beyond float16, or nonsense
            dtype = accumulation_dtype(dtype)
            limit = _largest_value(dtype, stored.dim)
            rows = rows.clamp(-limit, limit)
        return rows.to(dtype), batch, missing

    def within_reach(self, rows: Tensor) -> Tensor:
        """Clamps ``rows (L, d)`` that are far beyond the stored patterns, where the similarity asks for it."""
        within: Any = getattr(self.similarity, "within", None)
        return rows if within is None else within(rows, *self.stored.keep("reach", self._limits))

    def _limits(self) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest value of each dimension ``(d,)``, of all ranks together."""
        (low, high), shards = self.stored.limits(), self.stored.shards
        if shards is None:
            return low, high
        low, high = low.nan_to_num(torch.inf), high.nan_to_num(-torch.inf)
        low, high = shards.gather(low).amin(0), shards.gather(high).amax(0)
        return low.masked_fill(low > high, torch.nan), high.masked_fill(low > high, torch.nan)

    def check_missing(self, name: str) -> None:
        """Raises if the similarity cannot score pairs with missing values."""
        if not getattr(self.similarity, "allows_missing", False):
            raise AHopError(f"{name} must not hold NaN for this similarity, got NaN: similarity='auto' allows it")

    def scores(self, rows: Tensor, missing: bool | None = None) -> Tensor:
        """Scores ``rows (L, d)`` against all patterns: ``(L, N)``."""
        own, shards = torch.cat(list(self.chunks(rows, missing)), -1), self.stored.shards
        return own if shards is None else shards.columns(own)

    def chunks(self, rows: Tensor, missing: bool | None = None) -> Iterator[Tensor]:
        """Yields the scores of ``rows (L, d)`` for one chunk of the patterns of this rank at a time.

        ``missing`` says whether queries or patterns have unknown values; None reads the queries for NaN.
        """
        stored = self.stored
        if missing is None:
            # A branch on queries would break a compiled graph.
            missing = stored.unknown or (not torch.compiler.is_compiling() and bool(rows.isnan().any()))
            if missing:
                self.check_missing("queries")
        size, copies = self._chunk_size(len(rows)), self._prepared()
        for start in range(0, len(stored.patterns), size):
            prepared = None if copies is None else [copy[start : start + size] for copy in copies]
            yield self._compare(rows, stored.chunk(start, size), missing, prepared)

    def search(self, asked: Queries, k: int, shortlist: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns the scores and indices of the ``k`` best patterns of each query, best first: ``(L, k)`` each.

        With a ``shortlist``, so many patterns with the nearest codes are scored, on a GPU all: an exact search is as
        fast there.
        """
        parts, size, shards = [], min(k, len(self.stored.patterns)), self.stored.shards
        least = len(self.stored.patterns) if shards is None else min(shards.sizes)  # all ranks decide alike
        short = shortlist if shortlist and asked.rows.device.type == "cpu" and shortlist < least else 0
        for rows in torch.split(asked.rows, QUERIES_AT_ONCE):
            if not short:
                found = top_k(self.chunks(rows, asked.missing), size)
            else:
                index = self.nearest(rows, short).sort(-1).values  # ties are ordered by index
                scores, place = top_k([self.candidate_scores(rows, index, asked.missing)], size)
                found = scores, index.gather(1, place)
            parts.append(found if shards is None else shards.best(*found, k))
        scores, indices = (torch.cat(each) for each in zip(*parts, strict=True))
        return scores, indices

    def nearest(self, rows: Tensor, count: int) -> Tensor:
        """Returns the patterns whose codes are nearest to each of ``rows (L, d)``, nearest first: ``(L, count)``."""
        return self.codes().nearest(getattr(self.similarity, "unbiased", lambda query: query)(rows), count)

    def candidate_scores(self, rows: Tensor, index: Tensor, missing: bool) -> Tensor:
        """Scores each of ``rows (L, d)`` against its own patterns ``index (L, n)``: ``(L, n)``."""
        size, scores = max(1, CHUNK_ELEMENTS // (index.shape[1] * self.stored.dim)), []
        for some, places in zip(torch.split(rows, size), torch.split(index, size), strict=True):
            keys = torch.unflatten(self.stored.sample(places.flatten()), 0, places.shape)
            scores.append(self._compare(some[:, None], keys, missing, None)[:, 0])
        return torch.cat(scores) if scores else rows.new_empty(index.shape)

    def codes(self, bits: int = 8) -> Codes:
        """Returns the codes of the patterns, which are made at the first call."""
        stored, bias = self.stored, getattr(self.similarity, "bias", None)

        def score(query: Tensor, key: Tensor) -> Tensor:  # the similarity subtracts the bias
            return self._compare(query if bias is None else query + bias, key, stored.unknown, None)

        if hasattr(self.similarity, "overview"):
            raise AHopError("shortlist must be None for images, got one: codes of pixels do not follow their score")
        return stored.keep("codes", lambda: make_codes(stored, score, bits))

    def logsumexp(self, asked: Queries, factor: float | Tensor, by_class: bool) -> Tensor:
        """Returns the log-sum-exp of ``factor`` times the scores: of each class ``(L, C)``, or of all ``(L, 1)``.

        It is computed in the accumulation dtype, because the products can exceed float16.
        """
        stored, shards, wide = self.stored, self.stored.shards, accumulation_dtype(self.stored.dtype)
        parts, own = [], slice(None) if shards is None else slice(shards.start, shards.stop)
        for rows in torch.split(asked.rows, QUERIES_AT_ONCE):
            logits = (factor * scores.to(wide) for scores in self.chunks(rows, asked.missing))
            if by_class:
                classes = stored.given_classes()
                parts.append(class_logsumexp(logits, classes.of_pattern[own], len(classes.labels)))
            else:
                parts.append(torch.stack([each.logsumexp(-1) for each in logits]).logsumexp(0)[:, None])
        found = torch.cat(parts)
        return found if shards is None else shards.gather(found).logsumexp(0)

    def _compare(self, query: Tensor, key: Tensor, missing: bool, prepared: Sequence[Tensor] | None) -> Tensor:
        """Scores ``query (..., L, d)`` against patterns ``key (..., S, d)``."""
        options: dict[str, Any] = {"missing": True} if missing else {}
        if prepared is not None:
            options["prepared"] = [each.to(query.dtype) for each in prepared]
        scores = self.similarity(query, key.to(query.dtype), **options)
        patterns, in_units = self.stored.patterns, getattr(self.similarity, "units", None) is not None
        return scores.to(patterns.dtype) if in_units and patterns.is_floating_point() else scores  # without a scale

    def _prepared(self) -> Sequence[Tensor] | None:
        """Returns copies of the patterns as the similarity prepares them, if it needs any."""
        stored, similarity = self.stored, self.similarity
        if not hasattr(similarity, "prepare") or not hasattr(similarity, "sources") or torch.compiler.is_compiling():
            return None
        sources = similarity.sources()
        elements = len(stored.patterns) * sum(source.shape[-1] for source in sources if source.ndim)
        if not 0 < elements <= PREPARED_ELEMENTS:
            return None
        if stored.patterns.requires_grad or any(each.is_inference() for each in (stored.patterns, *sources)):
            return None  # no gradient; no version counter

        def copies() -> tuple[Any, Sequence[Tensor]]:
            return sources, similarity.prepare(stored.chunk(0, len(stored.patterns)))

        found: Sequence[Tensor]
        versions = [(id(source), source._version) for source in sources]  # the ids stay in use
        _, found = stored.keep(f"prepared {versions}", copies)
        return found

    def _chunk_size(self, queries: int) -> int:
        """Returns the number of patterns that are scored at once.

        More than QUERIES_AT_ONCE queries are only scored at once where all scores are kept, so that small chunks would
        save no memory. On a GPU, each call has a fixed cost. Some similarities need several times the memory of a
        chunk.
        """
        dim, queries = self.stored.dim, max(1, queries)
        size = max(1, min(CHUNK_ELEMENTS // dim, CHUNK_SCORES // min(queries, QUERIES_AT_ONCE)))
        if not getattr(self.similarity, "is_fused", False) or self.stored.patterns.device.type != "cuda":
            return size
        return max(size, min(GPU_CHUNK_ELEMENTS // dim, CHUNK_SCORES // queries))


def measure_shortlist(scorer: Scorer, origin: Tensor | None, rows: Tensor) -> Shortlist:
    """Finds a length that keeps the recall SHORTLIST_RECALL with the damaged queries ``rows (L, d)``.

    It is the number of all patterns if no length does, or if an exact search takes no longer. A query for which an
    exact search finds another pattern than its ``origin (L,)`` does not count.
    """
    count, asked = scorer.stored.count, scorer.queries(rows, "fit")

    def search(shortlist: int | None) -> tuple[Tensor, float]:
        began = time.perf_counter()
        found = scorer.search(asked, 1, shortlist)[1]
        return found, (time.perf_counter() - began) / len(rows)

    best, exact_seconds = search(None)
    at = scorer.nearest(asked.rows, min(LONGEST_SHORTLIST, count)) == best
    rank = torch.where(at.any(1), at.int().argmax(1), count)
    rank = rank if origin is None or not (right := best[:, 0] == origin).any() else rank[right]
    needed = rank.sort().values[max(0, math.ceil(SHORTLIST_RECALL * len(rank)) - 1)].item() + 1
    length = 2 ** math.ceil(math.log2(max(needed, SHORTEST_SHORTLIST)))
    length = length if SHORTLIST_COST * length < count else count
    recall = 1.0 if length == count else (rank < length).double().mean().item()
    return Shortlist(length, recall, search(length)[1], exact_seconds)


def _largest_value(dtype: torch.dtype, dim: int) -> float:
    """Returns the largest value for which the sum of ``dim`` squared differences does not overflow."""
    return math.sqrt(torch.finfo(dtype).max / (4 * dim))
