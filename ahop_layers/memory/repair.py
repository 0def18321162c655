"""Repair: values of a query that are wrong or unknown become what similar patterns have in their place.

A value is intact, and then near the value of a neighbor that the similarity found, with a Laplace density, or wrong,
with a uniform density over the range of its column. The share of wrong values of a row is found by expectation
maximization. The new value is the average of the given value and the mean of the neighbors, weighted by the probability
that the given value is intact. A second round weighs the neighbors by the likelihood of the row, where a fit found that
to be better. With labels, a fit learns to find other patterns of a class, as repair has to: a clean copy of the query
is not stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ahop_layers.errors import AHopError
from ahop_layers.memory.arrays import as_given, as_tensor
from ahop_layers.memory.learn.auto import REACH
from ahop_layers.memory.learn.questions import any_damage
from ahop_layers.memory.state import CLOSED, OPEN, WEIGHED, Mixture, Queries, State
from ahop_layers.memory.storage import Stored
from ahop_layers.memory.variants import Replaced, Variant, as_damage

NEIGHBORS, IMAGES = 32, 8  # most neighbors of a row, and of an image: the mean of more images is blurred
SHARPER = 2.0  # factor of the logits of images, whose pixels depend on each other: fewer of them blur less
EVEN = 0.1  # share of the weight that all neighbors have alike, or one alone would call right values wrong
TEMPER = 0.5  # power of the likelihood: values of a row depend on each other, and count less than if they did not
FLOOR = 0.01  # smallest scale of an intact value, relative to the range of its column
STEPS = 8  # steps of expectation maximization
SHARES = 0.001, 0.98  # smallest and largest share of wrong values in a row
SUSPICIOUS = 0.5  # a value with a smaller probability of being intact is suspicious
HELD, HELD_ELEMENTS = 256, 2**16  # least number of damaged patterns from which a fit learns, number of their values
MOST_HELD = 1024  # largest number of them
MOST_CHANGED = 0.05  # largest share of clean rows that a repair without labels may change
CLEAN_ROWS = 0.99  # where it would change more: share of clean rows with fewer wrong values than rows to repair
FEW_WRONG = 0.1  # share of wrong values, of at least one, at which repair must help, without labels
FEWEST = 8  # patterns that are needed for it
FAR = 2.0  # a value that is farther from the range of its column, in its lengths, is wrong
LOWEST = -1e9  # score of a neighbor without a common value, finite
CHUNK_NEAR = 2**21  # number of values of neighbors that are read at once, to bound memory
FARTHEST = 3.0  # limit of an error in units of its column, where errors are compared


class Repaired(NamedTuple):
    """Repaired values in the shape and dtype of the queries, and the probability that each given value is intact."""

    values: Any
    intact: Any


def repair(state: State, shortlist: int | None, x: Any) -> Repaired:
    """Repairs queries; see :meth:`ahop_layers.AssociativeMemory.repair`."""
    stored, mixture = state.stored, state.fitted.mixture
    if not mixture.gate:
        raise AHopError(f"repair needs a fit of at least {FEWEST} patterns, got none: call memory.fit()")
    asked = state.queries(x, "repair")
    given = as_tensor("queries x", x, stored.patterns.device, stored.columns)
    rows = given.reshape(-1, stored.dim).to(mixture.spread.dtype)
    rows = state.frozen.unbiased(rows)
    parts, size = [], max(1, CHUNK_NEAR // (most_neighbors(stored) * stored.dim))
    for some, values in zip(torch.split(asked.rows, size), torch.split(rows, size), strict=True):
        with torch.no_grad():
            scores, indices = state.search(asked._replace(rows=some), most_neighbors(stored), shortlist)
        with torch.autocast(rows.device.type, enabled=False):
            logits = state.beta * scores.to(values.dtype).clamp(min=LOWEST)
            parts.append(mix(stored, values, logits, indices, mixture))
    values, intact = (torch.cat(each).reshape(given.shape) for each in zip(*parts, strict=True))
    values = values if given.is_floating_point() else values.round().clamp(0, 255)
    results = (values.to(given.dtype), intact.to(stored.dtype))
    return Repaired(*(as_given(x, each, stored.columns) for each in results))


def mix(stored: Stored, rows: Tensor, logits: Tensor, indices: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Returns repaired ``rows (L, d)`` with neighbors ``indices (L, k)``, and probabilities of being intact."""
    limits = stored.find_limits() if torch.compiler.is_compiling() else stored.limits
    low, high = (each.to(rows.dtype).nan_to_num(0.0) for each in limits)
    span = torch.where(high > low, high - low, (high - low).mean() * FLOOR + torch.finfo(rows.dtype).tiny)
    near = stored.sample(indices.flatten()).reshape(*indices.shape, stored.dim).to(rows.dtype)
    if stored.unknown:
        near = torch.where(near.isnan(), near.nanmean(1, keepdim=True), near).nan_to_num(0.0)
    unknown = rows.isnan()
    usable = (~unknown & (rows >= low - FAR * span) & (rows <= high + FAR * span)).to(rows.dtype)
    x = rows.nan_to_num(0.0).clamp(low, high)
    gaps, count = (x[:, None] - near).abs(), usable.sum(-1, keepdim=True).clamp(min=1)

    def solve(logits: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Returns the mean of the neighbors, probabilities, and a function for the likelihood of each neighbor."""
        weight = (1 - EVEN) * logits.softmax(-1) + EVEN / logits.shape[-1]
        mean = (weight[:, None] @ near)[:, 0]
        own = (weight[:, None] @ (near - mean[:, None]).abs())[:, 0]
        width = (own + mixture.spread) / 2 + FLOOR * span
        density = torch.exp(-gaps / width[:, None]) * (span / (2 * width))[:, None]  # a wrong value has 1
        likely, share = (weight[:, None] @ density)[:, 0], torch.full_like(count, 0.5)
        for _ in range(STEPS):
            intact = (1 - share) * likely / ((1 - share) * likely + share)
            share = ((1 - intact) * usable).sum(-1, keepdim=True) / count
            share = share.clamp(*SHARES)

        def likelihood() -> Tensor:
            mixed = ((1 - share[:, None]) * density + share[:, None]).log()
            return TEMPER * (mixed @ usable[:, :, None])[..., 0]

        return mean, intact * usable, likelihood

    mean, intact, likelihood = solve(logits * (SHARPER if len(stored.shape) > 1 else 1.0))
    if mixture.gate == WEIGHED:
        mean, intact, _ = solve(likelihood())
    if mixture.gate == CLOSED:
        return torch.where(unknown, mean, rows), intact
    wrong = 1 - intact - unknown.to(rows.dtype)
    changed = (wrong > SUSPICIOUS).any(-1) | (wrong.sum(-1) > 1)
    wild = ((rows < low - REACH * span) | (rows > high + REACH * span)).any(-1)
    changed &= wild | (wrong.sum(-1) >= mixture.least * (~unknown).sum(-1))
    repaired = torch.where(changed[:, None], intact * x + (1 - intact) * mean, rows)
    return torch.where(unknown, mean, repaired), intact


@torch.no_grad()
def learn_repair(state: State, damage: Any, by_label: bool, seed: int) -> tuple[Mixture, float | None]:
    """Learns from damaged patterns that are not among their own neighbors.

    ``by_label`` asks for other patterns of their class, not for themselves, where there are several classes of several
    patterns. If it does not, neighbors are less alike, so that rows are repaired that have more wrong values than most
    clean ones, and only if few wrong values come nearer to the truth. Returns also the share of their squared error
    that repair leaves, 1 if the gate is closed, or None if there are too few patterns.
    """
    stored, similarity = state.stored, state.frozen
    spread, missing = state.fitted.mixture.spread, similarity.allows_missing
    if stored.count < FEWEST:
        return Mixture(spread), None
    by_label = by_label and stored.shares_classes
    is_damage = any(map(callable, damage)) if isinstance(damage, (tuple, list)) else damage is not None
    damage = as_damage(damage if is_damage else any_damage(stored.shape, missing, not by_label))
    generator = Generator(spread.device).manual_seed(seed ^ 0x2F6B1D03)
    held = max(HELD, min(MOST_HELD, HELD_ELEMENTS // stored.dim))
    own = torch.randint(stored.count, (held,), generator=generator, device=generator.device)
    truth = stored.sample(own)

    def search(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows = state.within_reach(similarity.biased(rows))
        return state.search(Queries(rows, missing and (stored.unknown or bool(rows.isnan().any())), ()), count)

    def neighbors(rows: Tensor) -> tuple[Tensor, Tensor]:
        scores, indices = search(rows, min(most_neighbors(stored) + 1, stored.count))
        others = indices != own[:, None]
        others[:, -1] &= ~others.all(-1)
        return state.beta * scores[others].reshape(len(rows), -1), indices[others].reshape(len(rows), -1)

    clean = neighbors(truth)
    means = stored.sample(clean[1].flatten()).reshape(*clean[1].shape, -1).nanmean(1)
    spread = (truth - means).abs().nanmean(0).nan_to_num(0.0).to(spread.dtype)
    unit = spread.clamp(min=1e-6 * spread.mean())

    def damaged(damage: Variant, shifts: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = damage.of_shape(stored.shape).bind(truth)(truth, generator)
        rows = (similarity.unbiased(rows) if shifts else rows).to(stored.dtype)
        rows = torch.where(rows.isnan().all(-1, keepdim=True), truth, rows)
        return rows, neighbors(rows)

    def tried(gate: int, rows: Tensor, near: tuple[Tensor, Tensor], least: float = 0.0) -> tuple[Tensor, Tensor]:
        mixture = Mixture(spread, gate, least)
        return mix(stored, rows.to(unit.dtype), near[0].to(unit.dtype), near[1], mixture)

    def error(values: Tensor) -> Tensor:
        return ((values - truth) / unit).nan_to_num(0.0).clamp(-FARTHEST, FARTHEST).square().mean()

    def right(values: Tensor) -> Tensor:
        if by_label:
            return (stored.class_of(neighbors(values)[1][:, 0]) == stored.class_of(own)).sum()
        return (search(values, 1)[1][:, 0] == own).sum()

    query, near = damaged(damage, shifts=is_damage)  # the bias of a given damage is that of the fit
    # The neighbors are weighed again if then more of the repaired patterns find themselves, or another one of their
    # class. Errors of single values would not tell: they are small, too, if neighbors are alike in something else, such
    # as the light of a photo.
    found = {gate: right(tried(gate, query, near)[0].to(stored.dtype)) for gate in (OPEN, WEIGHED)}
    gate, least, helps = WEIGHED if found[WEIGHED] > found[OPEN] else OPEN, 0.0, True
    if not by_label:
        known, few = ~truth.isnan(), damaged(Replaced(max(FEW_WRONG, 1 / stored.dim)))
        wrong = ((1 - tried(gate, truth, clean)[1]) * known).sum(-1) / known.sum(-1)

        def is_safe(least: float) -> bool:
            changed = ((tried(gate, truth, clean, least)[0] != truth) & known).any(-1).double().mean()
            return bool((changed <= MOST_CHANGED) & (error(tried(gate, *few, least)[0]) < error(few[0])))

        if not is_safe(least):
            least = wrong.quantile(CLEAN_ROWS).item()
            helps = is_safe(least)
    left = (error(tried(gate, query, near, least)[0]) / error(tried(CLOSED, query, near)[0]).clamp(min=1e-9)).item()
    gate, left = (gate, left) if left < 1 and helps else (CLOSED, 1.0)
    return Mixture(spread, gate, least), left


def most_neighbors(stored: Stored) -> int:
    """Returns the number of neighbors that repair a pattern."""
    return min(IMAGES if len(stored.shape) > 1 else NEIGHBORS, stored.count)


class Repair(nn.Module):
    """Repairs the inputs of a network: a layer for ``nn.Sequential(Repair(memory), network)``.

    Args:
        memory: an :class:`~ahop_layers.AssociativeMemory` of clean rows, after a fit. With the answers of the network
            as labels it finds better neighbors. The memory is a part of the layer: a state dict has its patterns.
        shortlist: as for :meth:`~ahop_layers.AssociativeMemory.search`.

    >>> import ahop_layers as ah
    >>> rows = torch.rand(60, 2) @ torch.rand(2, 12)
    >>> memory = ah.AssociativeMemory(rows[:50])
    >>> report = memory.fit()
    >>> network = nn.Sequential(ah.Repair(memory), nn.Linear(12, 3))
    >>> network(ah.variants.Missing(0.3)(rows[50:])).isfinite().all()
    tensor(True)
    """

    def __init__(self, memory: Any, shortlist: int | str | None = None) -> None:
        super().__init__()
        if not hasattr(memory, "repair"):
            raise AHopError(f"memory must be an AssociativeMemory, got {type(memory).__name__}")
        self.memory, self.shortlist = memory, shortlist

    def forward(self, x: Any) -> Any:
        """Returns the repaired values, in the shape of ``x``."""
        return self.memory.repair(x, self.shortlist).values
