"""How sure a memory is of its hits: confidence, and rejection of unknown queries.

The confidence of a hit is the product of two probabilities. The first says which pattern a query belongs to: the
softmax of the scores, times a factor, summed over the patterns of a class where there are labels. The second says
whether it belongs to any: a logistic function of the log-sum-exp of the scores, which tells whether anything fits, and
of the log odds of the best hit, which tell whether one pattern fits better than all others. All four numbers are fitted
to damaged copies of stored patterns, and to the same queries while their pattern, or its class, is left out.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.memory.arrays import as_given, class_logsumexp
from ahop_layers.memory.learn.candidates import CANDIDATES, some_patterns
from ahop_layers.memory.learn.questions import Pairs
from ahop_layers.memory.learn.regression import minimize
from ahop_layers.memory.state import FOREIGN, Calibration, Queries, State
from ahop_layers.memory.storage import nested
from ahop_layers.memory.variants import Variant
from ahop_layers.ops.reference import accumulation_dtype

CALIBRATED = 1024  # number of queries to which the confidence is fitted
CALIBRATED_ELEMENTS = 2**20  # number of elements of the patterns with which each of them is compared
OCTAVES = (-4.0, 8.0)  # range of the factor in powers of two, relative to the deviation of scores
FACTOR_LOSS = 0.01  # what the smallest possible factor may add to the loss
PENALTY = 1e-4  # of the weights of the evidence
MOST_ODDS = 30.0  # limit of log odds


def confidence(calibration: Calibration, own: Tensor, total: Tensor) -> Tensor:
    """Returns the confidence of hits from the log-sum-exp of each ``(L, k)`` and of all patterns ``(L,)``."""
    features = evidence(own[:, 0], total)
    known = functional.logsigmoid(features @ features.new_tensor(calibration.weights))
    return (own - total[:, None] + known[:, None]).exp().nan_to_num(0.0)  # without a known value in common


def evidence(own: Tensor, total: Tensor) -> Tensor:
    """Returns what tells whether a query is known: its log-sum-exp, its log odds, and 1, ``(L, 3)``."""
    share = (own - total).clamp(max=-torch.finfo(own.dtype).eps)
    odds = (share - (-share.expm1()).log()).clamp(-MOST_ODDS, MOST_ODDS)
    return torch.stack([total, odds, torch.ones_like(total)], -1)


class Hits:
    """The best patterns of each query: ``scores, indices = hits``, each ``(..., k)``, best first.

    Ids, labels and confidence are computed when they are asked for, from the state of the memory when it was searched,
    which hits keep, with a copy of the queries. Pickled hits have the values of all attributes instead. If the memory
    is sharded, all ranks must ask for the confidence together, and pickled hits have it only if it was asked for.

    Attributes:
        scores: the scores ``(..., k)``.
        indices: the indices of the patterns ``(..., k)``.
    """

    def __init__(self, scores: Any, indices: Any, given: Any, state: State, queries: Queries) -> None:
        self.scores, self.indices, self._given, self._state = scores, indices, given, state
        self._queries = queries._replace(rows=queries.rows.clone())

    def __iter__(self) -> Any:
        return iter((self.scores, self.indices))

    def __getitem__(self, place: int) -> Any:
        return (self.scores, self.indices)[place]

    def __len__(self) -> int:
        return 2

    def __getstate__(self) -> dict[str, Any]:
        sharded = "_state" in self.__dict__ and self._state.stored.shards is not None
        confidence = self.__dict__.get("confidence") if sharded else self.confidence
        values = {name: getattr(self, name) for name in ("scores", "indices", "ids", "labels")}
        return values | {"confidence": confidence}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        shown = {"scores": self.scores, "indices": self.indices, "ids": self.ids} | {
            name: value for name, value in self.__dict__.items() if name == "confidence"
        }
        return f"Hits({', '.join(f'{name}={value!r}' for name, value in shown.items() if value is not None)})"

    @cached_property
    def ids(self) -> Any:
        """The ids of the patterns, as nested lists, or as an array if the queries were one; None without ids."""
        ids = self._state.stored.ids
        return None if ids is None else as_given(self._given, nested(self.indices.tolist(), ids))

    @cached_property
    def labels(self) -> Any:
        """The labels of the patterns ``(..., k)``; nested lists, or an array, if they are strings; None without."""
        stored = self._state.stored
        if stored.classes is None:
            return None
        labels = stored.classes.labels[stored.class_of(self._places())]
        return as_given(self._given, stored.named(self._queries.result(labels)))

    @cached_property
    @torch.no_grad()
    def confidence(self) -> Any:
        """The probability of each hit, or of its class, ``(..., k)``: other patterns, and none, have the rest.

        It is None if no :meth:`~ahop_layers.AssociativeMemory.fit` had calibrated the scores. It needs the scores of
        all patterns, and takes as long as the search.
        """
        calibration, stored, places = self._state.fitted.calibration, self._state.stored, self._places()
        if calibration is None:
            return None
        found = self._state.logsumexp(self._queries, calibration.factor, stored.classes is not None)
        if stored.classes is None:
            scores = torch.as_tensor(self.scores, device=places.device).reshape(places.shape)
            own = calibration.factor * scores.to(found.dtype)
        else:
            own = found.gather(-1, stored.class_of(places))
        return as_given(self._given, self._queries.result(confidence(calibration, own, found.logsumexp(-1))))

    def _places(self) -> Tensor:
        """Returns the indices as a matrix ``(L, k)`` on the device of the patterns."""
        rows = self._queries.rows
        return torch.as_tensor(self.indices, device=rows.device).reshape(len(rows), self.indices.shape[-1])


@torch.no_grad()
def calibrate(
    state: State, damage: Variant | Pairs, leave_out: bool, generator: torch.Generator
) -> tuple[Calibration | None, Tensor]:
    """Fits the confidence of hits to the share of hits that are right.

    Half of the queries belong to a stored pattern. The others are the same queries, while their pattern and its class
    are left out. A sample of the patterns represents a large memory. ``damage`` is a variant, or pairs of a class, with
    labels, or of an index, and a query. If ``leave_out``, the pattern that a query was made of does not answer for it,
    unless it is the only one of its class.

    Returns the calibration, and FOREIGN quantiles of the confidences of unknown queries; None and zeros if the patterns
    are all equal, or of one class.
    """
    stored, device = state.stored, state.stored.patterns.device
    size = sum(part.dim for part in state.frozen.parts()) or stored.dim  # each view of an image takes time
    kept = some_patterns(stored.count, stored.dim, generator)[: max(CANDIDATES, CALIBRATED_ELEMENTS // size)]
    by_class = stored.classes is not None
    if isinstance(damage, Variant):
        origin = torch.randint(len(kept), (CALIBRATED,), generator=generator, device=device)
        some = stored.take(kept)
        query = damage.bind(some.patterns)(some.patterns[origin], generator)
        target = some.given_classes().of_pattern[origin] if by_class else origin
    else:
        some_pairs = torch.randperm(len(damage[0]), generator=generator, device=device)[:CALIBRATED]
        target, query = (each[some_pairs] for each in damage)
        if not by_class:
            kept = torch.unique(torch.cat([target, kept]))
            target = torch.searchsorted(kept, target)
        origin, some = target.new_full(target.shape, -1), stored.take(kept)
        if by_class:  # some classes may have no pattern that was kept
            known = some.given_classes().labels
            place = torch.searchsorted(known, target).clamp(max=len(known) - 1)
            there = known[place] == target
            target, query, origin = place[there], query[there], origin[there]
    subset = replace(state, stored=some)
    scores = subset.scores(state.within_reach(query.to(some.dtype))).to(accumulation_dtype(some.dtype))
    return _fit(scores, target, origin if leave_out else None, subset, stored.count)


def _fit(
    scores: Tensor, target: Tensor, origin: Tensor | None, subset: State, count: int
) -> tuple[Calibration | None, Tensor]:
    """Fits the confidence to ``scores (L, n)`` of queries of the classes, or patterns, ``target (L,)``."""
    place, classes = torch.arange(scores.shape[1], device=scores.device), subset.stored.classes
    of_pattern = place if classes is None else classes.of_pattern
    same = of_pattern == target[:, None]
    if origin is not None:
        own = place == origin[:, None]
        own &= (same & ~own).any(1, keepdim=True)
        scores = scores.masked_fill(own, -torch.inf)
    finite = scores[scores.isfinite()]
    unit = finite.std(correction=0).item() if len(finite) else 0.0
    if not unit > 0 or not bool((of_pattern != of_pattern[0]).any()):
        return None, torch.zeros(FOREIGN, device=scores.device)

    def logits(scores: Tensor, factor: float) -> Tensor:
        """Returns the log-sum-exp of each class, or pattern; a sample of the patterns stands for all of them."""
        found = factor * scores
        if classes is not None:
            found = class_logsumexp([found], classes.of_pattern, len(classes.labels))
        share = torch.tensor(count / subset.stored.count).log().to(found)
        hit = torch.zeros_like(found, dtype=torch.bool).scatter(1, of_pattern[scores.argmax(1)][:, None], True)
        return torch.where(hit, found, found + share)

    factors = [2**octave / unit for octave in torch.arange(*OCTAVES, 0.25).tolist()]
    losses = [functional.cross_entropy(logits(scores, factor).clamp(min=-1e30), target).item() for factor in factors]
    factor = next(each for each, loss in zip(factors, losses, strict=True) if loss <= min(losses) + FACTOR_LOSS)
    queries = [scores, scores.masked_fill(same, -torch.inf)]
    hit = torch.cat([of_pattern[each.argmax(1)] for each in queries])
    found = torch.cat([logits(each, factor) for each in queries])
    own, total = found.gather(1, hit[:, None]), found.logsumexp(1)
    right = hit == torch.cat([target, torch.full_like(target, -1)])
    usable = total > -torch.inf
    features = evidence(own[:, 0], total)[usable]
    if found.shape[1] < 3:  # if one is left out, there are no odds among the others
        features[:, 1] = 0.0
    calibration = Calibration(factor, _logistic(features, (own[:, 0] - total)[usable], right[usable]))
    foreign = confidence(calibration, own, total)[len(scores) :, 0]
    shares = torch.linspace(0, 1, FOREIGN, dtype=foreign.dtype, device=foreign.device)
    return calibration, foreign.quantile(shares).float()


def _logistic(features: Tensor, log_share: Tensor, right: Tensor) -> tuple[float, float, float]:
    """Returns the weights of ``features (L, 3)`` whose product with a share is the probability of being right."""
    features, log_share = features.double(), log_share.double()
    center, scale = features[:, :2].mean(0), features[:, :2].std(0).clamp(min=1e-9)
    scaled = torch.cat([(features[:, :2] - center) / scale, features[:, 2:]], 1)

    def loss(weight: Tensor) -> tuple[float, Tensor]:
        sure = scaled @ weight
        log = (log_share + functional.logsigmoid(sure)).clamp(max=-1e-9)
        value = torch.where(right, -log, -(-log.expm1()).log())
        slope = torch.where(right, -1.0, log.exp() / -log.expm1()) * (-sure).sigmoid()
        penalized = value.mean() + PENALTY * weight.square().sum()
        return penalized.item(), scaled.mT @ slope / len(sure) + 2 * PENALTY * weight

    def curvature(weight: Tensor) -> Tensor:
        return scaled.mT @ scaled / (4 * len(scaled)) + 2 * PENALTY * torch.eye(3).to(scaled)

    weight = minimize(loss, scaled.new_zeros(3), curvature)
    if weight[1] < 0:  # odds are no evidence against a query
        scaled[:, 1] = 0.0
        weight = minimize(loss, scaled.new_zeros(3), curvature)
    first, second = (weight[:2] / scale).tolist()
    return first, second, (weight[2] - weight[:2] @ (center / scale)).item()
