"""State: all that a memory is at one moment, and how it scores queries against what is stored."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ahop_layers.association import change, iterate
from ahop_layers.errors import AHopError, check_same_device, describe
from ahop_layers.memory.arrays import as_tensor, class_logsumexp, top_k
from ahop_layers.memory.codes import Codes, make_codes
from ahop_layers.memory.storage import Stored, read_values
from ahop_layers.ops.operators import assert_in_graph, has_hooks
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.adaptive import check_tensor
from ahop_layers.similarity.protocol import Similarity

QUERIES_AT_ONCE = 256  # number of queries that are scored at once where the scores of a chunk are not kept
CHUNK_ELEMENTS = 2**21  # number of elements of the patterns that are scored at once, to bound memory
GPU_CHUNK_ELEMENTS = 2**26  # the same on a GPU, where each call has a fixed cost
CHUNK_SCORES = 2**23  # number of scores that are stored at once where the scores of all patterns are needed
SHORTLIST_RECALL = 0.99  # share of what an exact search finds that a measured shortlist keeps
SHORTEST_SHORTLIST, LONGEST_SHORTLIST = 2**5, 2**13
SHORTLIST_COST = 32  # a pattern of a shortlist takes the time of so many in an exact search, because it is gathered
PREPARED_ELEMENTS = 2**28  # most elements of the patterns that a similarity prepares: 1 GiB in float32
FOREIGN = 1024  # number of confidences of unknown queries that are kept
CLOSED, OPEN, WEIGHED = 1, 2, 3  # the gate of repair: unknown values only; all values; neighbors are weighed again
RULES = {
    "beta": "a positive number",
    "foreign": "a number between 0 and 1",
    "fit_counts": "a number of at least 0",
    "shortlist": "a number of at least 0",
    **dict.fromkeys(("mixture.spread", "mixture.gate", "mixture.least"), "a number of at least 0"),
}

Followed = tuple[dict[str, Any], str, Tensor | None, tuple[int, int] | None, bool]
"""Where a tensor of a similarity is, its name, the tensor, its version, and whether it is a parameter."""


class Calibration(NamedTuple):
    """How scores become confidences: a factor of the scores, and weights of the log-sum-exp, the log odds and 1."""

    factor: float
    weights: tuple[float, float, float]


class Mixture(NamedTuple):
    """What repair needs to know.

    Attributes:
        spread: how far intact values are from their neighbors ``(d,)``.
        gate: what repair may do, 0 if there were too few patterns to find out.
        least: share of wrong values from which on a row is repaired, unless a value is wild.
    """

    spread: Tensor
    gate: int = 0
    least: float = 0.0


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit finds.

    Attributes:
        mixture: what repair needs to know.
        calibration: how scores become confidences, or None: the patterns were all equal, or of one class.
        foreign: quantiles of the confidences of unknown queries ``(FOREIGN,)``.
        shortlist: the length of ``shortlist="auto"``, or 0: it was not measured.
        count, changes: number of patterns at the fit, 0 before any, and of those added or removed since.
    """

    mixture: Mixture
    calibration: Calibration | None
    foreign: Tensor
    shortlist: int = 0
    count: int = 0
    changes: int = 0

    @classmethod
    def none(cls, dim: int, dtype: torch.dtype, device: torch.device) -> "Fitted":
        """Returns what is known before a fit."""
        spread = torch.zeros(dim, dtype=dtype, device=device)
        return cls(Mixture(spread), None, torch.zeros(FOREIGN, device=device))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of a state dict."""
        factor, weights = self.calibration or (0.0, (0.0, 0.0, 0.0))
        spread, gate, least = self.mixture
        device = spread.device
        return {
            "calibration": torch.tensor([factor, *weights], dtype=torch.float64, device=device),
            "foreign": self.foreign,
            "fit_counts": torch.tensor([self.count, self.changes], device=device),
            "shortlist": torch.tensor(self.shortlist, device=device),
            "mixture.spread": spread,
            "mixture.gate": torch.tensor(gate, device=device),
            "mixture.least": torch.tensor(least, dtype=spread.dtype, device=device),
        }

    @classmethod
    def loaded(cls, tensors: Mapping[str, Tensor]) -> "Fitted":
        """Returns what :meth:`tensors` describes."""
        factor, first, second, third = tensors["calibration"].tolist()
        spread, gate, least = (tensors[f"mixture.{name}"] for name in Mixture._fields)
        calibration = Calibration(factor, (first, second, third)) if factor else None
        mixture = Mixture(spread, int(gate), least.item())
        return cls(mixture, calibration, tensors["foreign"], int(tensors["shortlist"]), *tensors["fit_counts"].tolist())


def check_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors ``given`` as those of ``own`` with the same names, or raises."""
    for name, tensor in given.items():
        check_tensor(prefix + name, tensor, own[name], RULES.get(name))
        if tensor.shape != own[name].shape:
            raise AHopError(f"{prefix}{name} must have the shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
    if "calibration" in given and given["calibration"][0] < 0:
        got = given["calibration"].tolist()
        raise AHopError(f"{prefix}calibration must have a factor of at least 0, got {got}")
    return {name: tensor.detach().to(own[name], copy=True) for name, tensor in given.items()}


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


@dataclass(frozen=True, eq=False)
class State:
    """All that a memory is at one moment. A method reads it once, and each change replaces it as a whole.

    Attributes:
        stored: the patterns and what belongs to them.
        frozen: what scores without gradients: a copy of a similarity of this package, others themselves.
        live: the similarity whose parameters train. It scores with gradients, and in compiled and exported graphs.
        beta: the inverse temperature, a scalar in the accumulation dtype.
        fitted: what the last fit found.
        codes: the codes of the patterns, if there are any.
        source: the similarity of the memory that was copied, or None to copy it again.
        parts, watched: what :func:`followed` returned for it.
        version: that of the patterns.
    """

    stored: Stored
    frozen: Similarity
    live: Similarity
    beta: Tensor
    fitted: Fitted
    codes: Codes | None = None
    source: Any = None
    parts: tuple[Any, ...] = ()
    watched: tuple[Followed, ...] = ()
    version: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        dropped = {"codes": None, "source": None, "parts": (), "watched": ()}
        return {each.name: getattr(self, each.name) for each in fields(self)} | dropped

    @classmethod
    def made(cls, state: "State", similarity: Any, live: Similarity, frozen: Similarity) -> "State":
        """Returns a state with the ``similarity`` of a memory, which is asked as ``live``, and what scores for it."""
        parts, watched = followed(similarity)
        changes: dict[str, Any] = {"source": similarity, "parts": parts, "watched": watched}
        return replace(state, frozen=frozen, live=live, version=_version(state.stored.patterns), **changes)

    def is_of(self, similarity: Any) -> bool:
        """Returns whether patterns and similarity are as they were; with gradients, whatever its parameters are."""
        version = _version(self.stored.patterns)
        return version is not None and version == self.version and self.follows(similarity, torch.is_grad_enabled())

    def follows(self, similarity: Any, trained: bool = False) -> bool:
        """Returns whether a similarity is the one of this state, unchanged, unless ``trained``."""
        if similarity is not self.source:
            return False
        if self.frozen is not self.live:
            for part, shifts in self.parts:
                if "forward" in vars(part) or vars(part).get("shifts") != shifts or has_hooks(part):
                    return False
        return all(
            (trained and learned) or (own.get(name) is tensor and version is not None and _version(tensor) == version)
            for own, name, tensor, version, learned in self.watched
        )

    @property
    def similarity(self) -> Similarity:
        """The similarity of a call."""
        return self.live if torch.is_grad_enabled() or torch.compiler.is_compiling() else self.frozen

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of a state dict that belong neither to the patterns nor to the similarity."""
        return {"beta": self.beta, **self.fitted.tensors()}

    def loaded(self, tensors: Mapping[str, Tensor]) -> "State":
        """Returns the state with other :meth:`tensors`."""
        return replace(self, beta=tensors["beta"], fitted=Fitted.loaded(tensors))

    def moved(self, fn: Callable[[Tensor], Tensor]) -> "State":
        """Returns the state after ``fn`` moved or converted its tensors; some stay in at least float32."""
        labels = None if self.stored.labels is None else fn(self.stored.labels)
        stored = replace(self.stored, patterns=fn(self.stored.patterns), labels=labels, classes=None)
        place: Any = {"device": stored.patterns.device}
        wide = place | {"dtype": accumulation_dtype(stored.dtype)}
        mixture = self.fitted.mixture._replace(spread=self.fitted.mixture.spread.to(**wide))
        fitted = replace(self.fitted, mixture=mixture, foreign=self.fitted.foreign.to(**place))
        return replace(self, stored=stored, beta=self.beta.to(**wide), fitted=fitted, codes=None, source=None)

    def of(self, similarity: Similarity) -> "State":
        """Returns the state with another similarity, which may change it no longer."""
        return replace(self, frozen=similarity, live=similarity, codes=None)

    @cached_property
    def prepared(self) -> Sequence[Tensor]:
        """The patterns as the similarity prepares them, if that pays and is not too large."""
        patterns = self.stored.patterns
        with torch.inference_mode(False), torch.no_grad():
            widths = sum(each.shape[-1] for each in self.frozen.prepare(self.stored.chunk(0, 1)))
            if not 0 < widths * len(patterns) <= PREPARED_ELEMENTS or patterns.is_inference():
                return ()
            return self.frozen.prepare(self.stored.chunk(0, len(patterns)))

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
        rows, dtype, limit = given.reshape(-1, stored.dim), stored.dtype, _largest_value(stored.dtype, stored.dim)
        if torch.compiler.is_compiling():  # a graph cannot branch on values
            known, allowed = ~rows.isnan(), self.similarity.allows_missing
            assert_in_graph(~rows.isinf().any(), f"{name} must not be infinite, got infinity")
            message = f"{name} must have a known value in each row" if allowed else f"{name} must not hold NaN"
            assert_in_graph(known.any(1).all() if allowed else known.all(), f"{message}, got NaN")
            return rows.to(dtype), batch, allowed
        missing, largest = read_values(name, rows)
        if missing:
            self.check_missing(name)
        if largest > max(limit, stored.largest):  # beyond float16, or nonsense
            dtype = accumulation_dtype(dtype)
            limit = _largest_value(dtype, stored.dim)
            rows = rows.clamp(-limit, limit)
        return rows.to(dtype), batch, missing

    def within_reach(self, rows: Tensor) -> Tensor:
        """Clamps ``rows (L, d)`` that are far beyond the stored patterns, where the similarity asks for it."""
        if not self.similarity.is_clamped:
            return rows
        limits = self.stored.find_limits() if torch.compiler.is_compiling() else self.stored.limits
        return self.similarity.within(rows, *limits)

    def check_missing(self, name: str) -> None:
        """Raises if the similarity cannot score pairs with missing values."""
        if not self.similarity.allows_missing:
            raise AHopError(f"{name} must not hold NaN for this similarity, got NaN: similarity='auto' allows it")

    def scores(self, rows: Tensor, missing: bool | None = None) -> Tensor:
        """Scores ``rows (L, d)`` against all patterns: ``(L, N)``."""
        own, shards = torch.cat(list(self.chunks(rows, missing)), -1), self.stored.shards
        return own if shards is None else shards.columns(own)

    def chunks(self, rows: Tensor, missing: bool | None = None) -> Iterator[Tensor]:
        """Yields the scores of ``rows (L, d)`` for one chunk of the patterns of this rank at a time.

        ``missing`` says whether queries or patterns have unknown values; None reads the queries for NaN.
        """
        stored, compiling = self.stored, torch.compiler.is_compiling()
        if missing is None:
            missing = stored.unknown or (self.similarity.allows_missing if compiling else bool(rows.isnan().any()))
            if missing:
                self.check_missing("queries")
        size, copies = self._chunk_size(len(rows)), () if compiling or stored.patterns.requires_grad else self.prepared
        for start in range(0, len(stored.patterns), size):
            prepared = [copy[start : start + size] for copy in copies]
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
        return cast(Codes, self.codes).nearest(self.similarity.unbiased(rows), count)

    def candidate_scores(self, rows: Tensor, index: Tensor, missing: bool) -> Tensor:
        """Scores each of ``rows (L, d)`` against its own patterns ``index (L, n)``: ``(L, n)``."""
        size, scores = max(1, CHUNK_ELEMENTS // (index.shape[1] * self.stored.dim)), []
        for some, places in zip(torch.split(rows, size), torch.split(index, size), strict=True):
            keys = torch.unflatten(self.stored.sample(places.flatten()), 0, places.shape)
            scores.append(self._compare(some[:, None], keys, missing, ())[:, 0])
        return torch.cat(scores) if scores else rows.new_empty(index.shape)

    def with_codes(self, bits: int = 8) -> "State":
        """Returns the state with codes of the patterns."""
        stored, similarity = self.stored, self.frozen
        if similarity.overview is not None:
            raise AHopError("shortlist must be None for images, got one: codes of pixels do not follow their score")
        if stored.patterns.device.type != "cpu":
            raise AHopError(f"codes need patterns on a CPU, got {stored.patterns.device}: there, searches are exact")

        def score(query: Tensor, key: Tensor) -> Tensor:
            return self._compare(similarity.biased(query), key, stored.unknown, ())

        return replace(self, codes=make_codes(stored, score, bits))

    def explain(self, rows: Tensor, index: Tensor) -> Tensor:
        """Returns what each value of ``rows (L, d)`` adds to the scores of the patterns ``index (L,)``: ``(L, d)``."""
        pairs = zip(torch.split(rows, QUERIES_AT_ONCE), torch.split(index, QUERIES_AT_ONCE), strict=True)
        return torch.cat([self.frozen.explain(some, self.stored.sample(at).to(some.dtype)) for some, at in pairs])

    def retrieve(self, rows: Tensor, steps: int, separation: Callable[..., Tensor]) -> Tensor:
        """Retrieves ``rows (L, d) -> (L, d)`` with ``steps`` updates."""
        stored = self.stored

        def attend(rows: Tensor) -> Tensor:
            scores = self.scores(rows.flatten(0, -2)).reshape(*rows.shape[:-1], stored.count)
            logits = self.beta * scores.to(accumulation_dtype(scores.dtype))  # the product can exceed float16
            return separation(logits, masked=False)

        def read(weights: Tensor) -> Tensor:
            weights = weights.to(stored.dtype)
            output = stored.product(weights)
            if stored.unknown:  # each value is averaged over the patterns that know it
                known = stored.product(weights, known=True)
                output = output * torch.where(known != 0, weights.sum(-1, keepdim=True) / known, torch.nan)
            return output

        def follow(weights: Tensor) -> Tensor:  # a state made of patterns has no bias
            return self.similarity.biased(read(weights))

        size = max(1, CHUNK_SCORES // stored.count)
        chunks = (chunk[None, None] for chunk in torch.split(rows, size))
        return torch.cat([read(iterate(chunk, attend, follow, change, steps - 1, 0.0))[0, 0] for chunk in chunks])

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

    def _compare(self, query: Tensor, key: Tensor, missing: bool, prepared: Sequence[Tensor]) -> Tensor:
        """Scores ``query (..., L, d)`` against patterns ``key (..., S, d)``."""
        options: dict[str, Any] = {"missing": True} if missing else {}
        if prepared:
            options["prepared"] = [each.to(query.dtype) for each in prepared]
        return self.similarity(query, key.to(query.dtype), **options)

    def _chunk_size(self, queries: int) -> int:
        """Returns the number of patterns that are scored at once.

        More than QUERIES_AT_ONCE queries are only scored at once where all scores are kept, so that small chunks would
        save no memory. On a GPU, each call has a fixed cost. Some similarities need several times the memory of a
        chunk.
        """
        dim, queries = self.stored.dim, max(1, queries)
        size = max(1, min(CHUNK_ELEMENTS // dim, CHUNK_SCORES // min(queries, QUERIES_AT_ONCE)))
        if not self.similarity.is_fused or self.stored.patterns.device.type != "cuda":
            return size
        return max(size, min(GPU_CHUNK_ELEMENTS // dim, CHUNK_SCORES // queries))


def followed(similarity: Any) -> tuple[Any, tuple[Followed, ...]]:
    """Returns the parts of a similarity with their shifts, and its buffers and parameters with their versions."""
    parts = list(similarity.modules()) if isinstance(similarity, nn.Module) else []
    owners = [(part._buffers, False) for part in parts] + [(part._parameters, True) for part in parts]
    tensors = ((own, name, each, learned) for own, learned in owners for name, each in own.items())
    found = tuple((own, name, each, _version(each), learned) for own, name, each, learned in tensors)
    return tuple((part, vars(part).get("shifts")) for part in parts), found


def _version(tensor: Tensor | None) -> tuple[int, int] | None:
    """Returns how often a tensor was modified and where its values are, or None if it does not tell."""
    if tensor is None:
        return 0, 0
    try:
        return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
    except (NotImplementedError, RuntimeError):  # of a transform of torch.func
        return None


def measure_shortlist(state: State, origin: Tensor | None, rows: Tensor) -> Shortlist:
    """Finds a length that keeps the recall SHORTLIST_RECALL with the damaged queries ``rows (L, d)``.

    It is the number of all patterns if no length does, or if an exact search takes no longer. A query for which an
    exact search finds another pattern than its ``origin (L,)`` does not count.
    """
    count, asked = state.stored.count, state.queries(rows, "fit")

    def search(shortlist: int | None) -> tuple[Tensor, float]:
        began = time.perf_counter()
        found = state.search(asked, 1, shortlist)[1]
        return found, (time.perf_counter() - began) / len(rows)

    best, exact_seconds = search(None)
    at = state.nearest(asked.rows, min(LONGEST_SHORTLIST, count)) == best
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
