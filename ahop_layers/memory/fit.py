"""Fitting a memory: queries are drawn or given, the similarity learns from them, and its confidence is calibrated."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, check_same_device, describe
from ahop_layers.memory.arrays import as_indices, as_tensor, from_numpy
from ahop_layers.memory.confidence import Calibration, calibrate
from ahop_layers.memory.labels import as_labels
from ahop_layers.memory.learn import questions
from ahop_layers.memory.learn.auto import AutoSimilarity
from ahop_layers.memory.learn.candidates import some_patterns
from ahop_layers.memory.learn.questions import Pairs
from ahop_layers.memory.learn.solve import FitReport, Shortlist, learn
from ahop_layers.memory.search import Scorer
from ahop_layers.memory.storage import Stored, read_values
from ahop_layers.memory.variants import Variant, as_damage
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.protocol import is_solvable

BIAS_QUERIES = 8192  # number of queries from which a bias is estimated
SHORTLIST_QUERIES = 128  # number of queries by which the length of a shortlist is chosen
SHORTLIST_RECALL = 0.99  # share of what an exact search finds that it keeps
SHORTEST_SHORTLIST, LONGEST_SHORTLIST = 2**5, 2**13
SHORTLIST_COST = 32  # a pattern of a shortlist takes the time of so many in an exact search, because it is gathered


@contextmanager
def progress_line(wanted: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a step of a fit in one line of the terminal, which is cleared at the end."""

    def write(text: str) -> None:
        if wanted and sys.stderr is not None and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield lambda step: write(f"fit: {step} ...")
    finally:
        write("")


@torch.no_grad()
def fit(
    scorer: Scorer, damage: Any, by_label: bool, seed: int, show: Callable[[str], None]
) -> tuple[float, tuple[Calibration, Tensor] | None, FitReport]:
    """Learns the similarity of a memory in place; see :meth:`ahop_layers.AssociativeMemory.fit`.

    ``show`` is told what is done next. Returns the temperature, by which scores are divided to be logits, the result of
    :func:`calibrate`, and the report.
    """
    stored, similarity, device = scorer.stored, scorer.similarity, scorer.stored.patterns.device
    show("drawing queries")
    if damage is None:
        missing, copies = getattr(similarity, "allows_missing", False), not (by_label and stored.shares_classes)
        damage = questions.any_damage(stored.shape, missing, copies)
    data = _read_damage(damage, scorer, by_label)
    # Another seed: patterns that a user drew with this one would be values that replace others.
    generator = torch.Generator(device).manual_seed(seed ^ 0x5851F42D4C957F2D)
    kept = some_patterns(stored.count, stored.dim, generator)

    def some(kept: Tensor) -> tuple[Tensor, Tensor | None]:
        return stored.sample(kept), stored.class_of(kept) if by_label else None

    if isinstance(data, Variant):
        patterns, own = some(kept)
        data = data.bind(patterns)
        # Weights of several views need more queries.
        several = is_solvable(similarity) and len(similarity.parts()) > 1
        count = questions.MOST_QUERIES if several else questions.QUERIES
        asked = questions.draw(data, patterns, own, generator, count)
    else:
        asked = questions.given(data, by_label, generator)
        if not by_label:  # the patterns that queries belong to are among those that are kept
            kept = torch.unique(torch.cat([asked.origin, kept]))
            asked = asked._replace(origin=torch.searchsorted(kept, asked.origin))
        patterns, own = some(kept)
        asked = questions.with_intact(asked, patterns, generator)
    bias = getattr(similarity, "bias", None)
    if bias is not None and bias.requires_grad and not bias.any():
        bias.copy_(_estimate_bias(*_bias_pairs(data, stored, by_label, generator)))
    if isinstance(similarity, AutoSimilarity):
        asked = asked._replace(query=scorer.clamped(asked.query))
    temperature, report = learn(similarity, patterns, own, asked, generator, show)
    asked_for = data
    if stored.classes is not None and not by_label and not isinstance(data, Variant):
        data = stored.class_of(data[0]), data[1]
    generator = torch.Generator(device).manual_seed(seed ^ 0x2545F491 ^ 0x5851F42D4C957F2D)
    show("calibrating the confidence")
    calibrated, codes = calibrate(scorer, data, by_label, generator), stored.keep("codes")
    if codes is not None:
        show("measuring shortlists")
        stored.drop("codes")
        scorer.codes(len(codes.rate))
        report = report._replace(shortlist=_measure_shortlist(scorer, asked_for, by_label, generator))
    return temperature, calibrated, report


def _measure_shortlist(scorer: Scorer, data: Variant | Pairs, by_label: bool, generator: torch.Generator) -> Shortlist:
    """Finds a length that keeps the recall SHORTLIST_RECALL with damaged queries.

    It is the number of all patterns if no length does, or if an exact search takes no longer.
    A query for which an exact search finds another pattern than the one it was made of does not count.
    """
    stored = scorer.stored
    if isinstance(data, Variant):
        origin = torch.randint(stored.count, (SHORTLIST_QUERIES,), generator=generator)
        data = origin, data(stored.sample(origin), generator)
    origin, rows = (each[:SHORTLIST_QUERIES] for each in data)
    asked = scorer.queries(rows, "fit")

    def search(shortlist: int | None) -> tuple[Tensor, float]:
        began = time.perf_counter()
        found = scorer.search(asked, 1, shortlist)[1]
        return found, (time.perf_counter() - began) / len(rows)

    best, exact_seconds = search(None)
    at = scorer.nearest(asked.rows, min(LONGEST_SHORTLIST, stored.count)) == best
    rank = torch.where(at.any(1), at.int().argmax(1), stored.count)
    rank = rank if by_label or not (right := best[:, 0] == origin).any() else rank[right]
    needed = rank.sort().values[max(0, math.ceil(SHORTLIST_RECALL * len(rank)) - 1)].item() + 1
    length = 2 ** math.ceil(math.log2(max(needed, SHORTEST_SHORTLIST)))
    length = length if SHORTLIST_COST * length < stored.count else stored.count
    recall = 1.0 if length == stored.count else (rank < length).double().mean().item()
    return Shortlist(length, recall, search(length)[1], exact_seconds)


def _read_damage(damage: Any, scorer: Scorer, by_label: bool) -> Variant | Pairs:
    """Returns a damage as a variant, or the index or class and the query of given pairs."""
    if not isinstance(damage, (tuple, list)) or any(map(callable, damage)):
        return as_damage(damage).of_shape(scorer.stored.shape)
    if len(damage) != 2:
        raise AHopError(f"damage must be a variant or a pair (index, query), got {len(damage)} values")
    stored, device = scorer.stored, scorer.stored.patterns.device
    target, query = from_numpy(damage[0], device), as_tensor("query", damage[1], device, stored.columns)
    check_same_device(query=query, patterns=stored.patterns)
    query = query.to(torch.promote_types(query.dtype, stored.dtype))
    query = query.flatten(1) if query.ndim == 1 + len(stored.shape) > 2 else query
    if by_label:
        classes, count = stored.given_classes(), len(query) if query.ndim else 0
        given, names = as_labels(target, count, query.device, "labels of damage", "query", stored.names)
        index = torch.searchsorted(classes.labels, given).clamp(max=len(classes.labels) - 1)
        unknown = given[classes.labels[index] != given].tolist()
        if unknown:
            got = unknown[0] if names is None else repr(names[unknown[0]])
            raise AHopError(f"labels of damage must be labels of stored patterns, got {got}")
    else:
        index = as_indices(target, stored.count, query.device)
    if index.ndim != 1 or query.shape != (len(index), stored.dim) or not len(index):
        rule = f"damage must be index (n,) and query (n, d) with d = {stored.dim} and n >= 1"
        raise AHopError(f"{rule}, got {describe(index)} and {describe(query)}")
    if read_values("query", query)[0]:
        scorer.check_missing("query")
    return index, query


def _bias_pairs(data: Variant | Pairs, stored: Stored, by_label: bool, generator: torch.Generator) -> Pairs:
    """Returns patterns, or the means of classes, and queries that belong to them: ``(n, d)`` each."""
    if isinstance(data, Variant):
        index = torch.randint(stored.count, (BIAS_QUERIES,), generator=generator, device=generator.device)
        return stored.sample(index), data(stored.sample(index), generator)
    index, query = data
    if not by_label:
        return stored.sample(index), query
    classes, patterns = stored.given_classes(), stored.patterns.to(accumulation_dtype(stored.dtype))
    sums = patterns.new_zeros(len(classes.labels), stored.dim).index_add(0, classes.of_pattern, patterns)
    return (sums / classes.counts[:, None]).to(stored.dtype)[index], query


def _estimate_bias(origin: Tensor, query: Tensor) -> Tensor:
    """Returns the bias ``(d,)`` of the least-squares solution of ``query = a * origin + bias``, for ``(n, d)``.

    ``a`` is a scalar: masking and noise shrink the correlation with the pattern, but do not shift the mean. With a
    single pattern it is unidentifiable, and 1.
    """
    wide = accumulation_dtype(query.dtype)
    query = query.to(wide)
    origin = torch.where(query.isnan(), torch.nan, origin.to(wide))  # known values alone
    mean = origin.nanmean(0)
    deviation = origin - mean
    total = deviation.square().nansum()
    varies = total > 1e-6 * origin.square().nansum()  # more than the rounding of the mean
    slope = torch.where(varies, (deviation * query).nansum() / total, 1.0)
    return (query.nanmean(0) - slope * mean).nan_to_num(0.0)
