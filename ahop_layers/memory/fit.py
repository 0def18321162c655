"""Fitting a memory: queries are drawn or given, the similarity learns from them, and its confidence is calibrated."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_same_device, describe
from ahop_layers.memory.arrays import as_indices, as_labels, as_tensor, from_numpy
from ahop_layers.memory.confidence import calibrate
from ahop_layers.memory.learn import questions
from ahop_layers.memory.learn.auto import AutoSimilarity
from ahop_layers.memory.learn.candidates import some_patterns
from ahop_layers.memory.learn.questions import Pairs
from ahop_layers.memory.learn.solve import FitReport, learn
from ahop_layers.memory.repair import learn_repair
from ahop_layers.memory.state import Fitted, State, measure_shortlist
from ahop_layers.memory.storage import Stored, read_values
from ahop_layers.memory.variants import Variant, as_damage
from ahop_layers.ops.reference import accumulation_dtype

SHORTLIST_QUERIES = 128  # number of queries by which the length of a shortlist is chosen
JUDGED_PATTERNS = 2**16  # most stored patterns among which held-out queries are searched for
JUDGED_ELEMENTS = 2**24  # most values of these patterns
BIAS_QUERIES = 8192  # number of queries from which a bias is estimated


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
    state: State, damage: Any, by_label: bool, seed: int, fits_beta: bool, show: Callable[[str], None]
) -> tuple[State, FitReport]:
    """Returns the state after a fit, and its report; see :meth:`ahop_layers.AssociativeMemory.fit`.

    ``show`` is told what is done next.
    """
    stored, similarity, device = state.stored, state.frozen, state.stored.patterns.device
    show("drawing queries")
    given = damage
    if damage is None:
        copies = not (by_label and stored.shares_classes)
        damage = questions.any_damage(stored.shape, similarity.allows_missing, copies)
    data = _read_damage(damage, state, by_label)
    # Another seed: patterns that a user drew with this one would be values that replace others.
    generator = torch.Generator(device).manual_seed(seed ^ 0x5851F42D4C957F2D)
    kept = some_patterns(stored.count, stored.dim, generator)
    if isinstance(data, tuple):
        asked = questions.given(data, by_label, generator)
        if not by_label:  # the patterns that queries belong to are among those that are kept
            kept = torch.cat([asked.origin, kept])
    kept = torch.unique(kept)  # in ascending order
    judged, places = max(len(kept), min(JUDGED_PATTERNS, JUDGED_ELEMENTS // stored.dim)), None
    if stored.count > judged:
        more = torch.randperm(stored.count, generator=generator, device=device)[:judged]
        places = torch.unique(torch.cat([kept, more]))
    patterns = stored.chunk(0, stored.count) if places is None else stored.sample(places)
    own = None if not by_label else stored.given_classes().of_pattern[slice(None) if places is None else places]
    mined = kept if places is None else torch.searchsorted(places, kept)
    mined_patterns, mined_labels = patterns[mined], None if own is None else own[mined]
    if isinstance(data, Variant):
        data = data.bind(mined_patterns)
        # Weights of several views need more queries.
        number = questions.MOST_QUERIES if len(similarity.parts()) > 1 else questions.QUERIES
        asked = questions.draw(data, mined_patterns, mined_labels, generator, number)
    else:
        if not by_label:
            asked = asked._replace(origin=torch.searchsorted(kept, asked.origin))
        asked = questions.with_intact(asked, mined_patterns, generator)
    options: dict[str, Any] = {}
    if isinstance(similarity, AutoSimilarity):
        if not isinstance(data, Variant) or data.shifts:
            options["biases"] = _possible_biases(*_bias_pairs(data, stored, by_label, generator), *stored.limits)
    elif isinstance(bias := getattr(similarity, "bias", None), nn.Parameter) and bias.requires_grad and not bias.any():
        similarity = copy.deepcopy(similarity)
        cast(Any, similarity).bias.copy_(_estimate_bias(*_bias_pairs(data, stored, by_label, generator))[0])
    similarity, temperature, report = learn(
        similarity, patterns, own, asked, generator, show, mined=mined, count=stored.count, **options
    )
    learned = state.of(similarity)
    if fits_beta:
        learned = replace(learned, beta=torch.full_like(state.beta, 1 / temperature))
    target = data
    if stored.classes is not None and not by_label and not isinstance(data, Variant):
        target = stored.class_of(data[0]), data[1]
    generator = torch.Generator(device).manual_seed(seed ^ 0x2545F491 ^ 0x5851F42D4C957F2D)
    show("calibrating the confidence")
    calibration, foreign = calibrate(learned, target, by_label, generator)
    if state.codes is not None:
        show("measuring shortlists")
        learned = learned.with_codes(len(state.codes.rate))
        if isinstance(data, Variant):
            origin = torch.randint(stored.count, (SHORTLIST_QUERIES,), generator=generator)
            data = origin, data(stored.sample(origin), generator)
        origin, rows = (each[:SHORTLIST_QUERIES] for each in data)
        report = report._replace(shortlist=measure_shortlist(learned, None if by_label else origin, rows))
    show("learning to repair")
    mixture, left = learn_repair(learned, given, by_label, seed)
    length = report.shortlist.length if report.shortlist else 0
    fitted = Fitted(mixture, calibration, foreign, length, stored.count)
    return replace(learned, fitted=fitted), report._replace(repair=left)


def _read_damage(damage: Any, state: State, by_label: bool) -> Variant | Pairs:
    """Returns a damage as a variant, or the index or class and the query of given pairs."""
    if not isinstance(damage, (tuple, list)) or any(map(callable, damage)):
        return as_damage(damage).of_shape(state.stored.shape)
    if len(damage) != 2:
        raise AHopError(f"damage must be a variant or a pair (index, query), got {len(damage)} values")
    stored, device = state.stored, state.stored.patterns.device
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
        state.check_missing("query")
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


def _possible_biases(origin: Tensor, query: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
    """Returns estimates of the bias ``(d,)``: values that are wrong have the mean 0, or the middle of the range."""
    bias, slope = _estimate_bias(origin, query)
    middle = ((low + high) / 2).to(bias).nan_to_num(0.0)
    return [bias, bias - (1 - slope) * middle]


def _estimate_bias(origin: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bias ``(d,)`` of the least-squares solution of ``query = a * origin + bias``, for ``(n, d)``, and a.

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
    return (query.nanmean(0) - slope * mean).nan_to_num(0.0), slope
