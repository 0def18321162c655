"""Repair: wrong and unknown values of a query are replaced by what similar patterns have in their place.

A value is intact, and then near an estimate with a Laplace density, or wrong, with a uniform density over the range of
its column. The estimate is the weighted mean of the neighbors that the similarity finds, plus a linear combination of a
few factors: the principal components of what neighbors leave unexplained. The share of wrong values of a row, the
weights of its neighbors and the factors are found in turn by expectation maximization. A value keeps its place in
proportion to its probability of being intact, and the estimate has the rest.

All parameters are learned from damaged stored rows whose own pattern is left out. A gate, a logistic regression on what
the mixture found in a row, is learned from the same rows: where it is closed, only unknown values are filled.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.errors import AHopError
from ahop_layers.memory.learn.candidates import some_patterns
from ahop_layers.memory.learn.questions import any_damage
from ahop_layers.memory.learn.regression import minimize
from ahop_layers.memory.search import Queries, Scorer
from ahop_layers.memory.storage import Stored
from ahop_layers.memory.variants import (
    Drifted,
    Missing,
    Replaced,
    Saturated,
    Spiked,
    Swapped,
    as_damage,
    known_range,
)
from ahop_layers.ops.reference import accumulation_dtype

NEIGHBORS = 32  # most neighbors of a row
FACTORS = 16  # number of principal components of what neighbors leave unexplained
VIEWS = 8  # number of principal components of the patterns in which the gate judges errors
ROUNDS = 3  # number of times that neighbors are weighed and factors are solved for
SHARES = 3  # number of steps of expectation maximization in each round
WEIGHED = 2  # number of rounds in which neighbors are weighed
FLOOR = 0.02  # smallest scale of an intact value, relative to the range of its column
HELD = 896  # number of damaged rows from which everything is learned
FEWEST = 16  # patterns that are needed for it
CHUNK_NEAR = 2**22  # number of values of neighbors that are read at once, to bound memory
FARTHEST = 1e4  # limit of changes in units of a column
LESS_ERROR = 0.8  # the gate is to be open where less than this share of the error is left
GATES = (0.5, 0.6, 0.7, 0.8, 0.9)  # probabilities from which on the gate is open
MANY = 0.01  # share of the damaged rows from which on rows of one kind must come nearer to the truth
FEATURES = 7  # what the gate knows of a row
GATE = 1 + FEATURES + FEATURES * (FEATURES + 1) // 2  # number of its weights: of 1, of features, and of products of two
GRID = {  # candidates of each setting, the first one is the start
    "scale": (0.7, 0.5, 1.0),
    "sharpness": (0.5, 0.0, 0.25, 1.0),
    "even": (0.2, 0.0, 0.5),
    "background": (1.0, 0.5, 2.0),
    "neighbors": (NEIGHBORS, NEIGHBORS // 4, NEIGHBORS // 2),
    "local": (0.0, 0.5, 1.0),
    "trust": (0.0, 1.0),
    "linear": (1.0, 0.0),
}
"""Factors of scales and of log-likelihoods of neighbors, even weight, factor of the density of wrong values; number of
neighbors, share of their own spread in the scales, factor of their scores, and of the principal components."""
NEAR = (0.7, 0.0, 0.2, 1.0, NEIGHBORS // 2, 1.0, 1.0, 0.0)  # another start: neighbors alone, as they were found


class Repaired(NamedTuple):
    """Repaired values in the shape and dtype of the queries, and the probability that each given value is intact."""

    values: Any
    intact: Any


class Found(NamedTuple):
    """What the mixture finds: rows with all changes, rows with unknown values filled, probabilities, and features."""

    repaired: Tensor
    filled: Tensor
    intact: Tensor
    features: Tensor


class Mixture(nn.Module):
    """The parameters of repair, all buffers; zero until :meth:`learn_`."""

    _ranges: ClassVar[dict[str, str]] = {}  # loaded buffers must be finite
    factors: Tensor
    views: Tensor
    columns: Tensor
    settings: Tensor
    gate: Tensor
    calibration: Tensor

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shapes = {"factors": (FACTORS, dim), "views": (VIEWS, dim), "columns": (4, dim), "settings": (len(GRID),)}
        for name, shape in (shapes | {"gate": (GATE + 2 * FEATURES + 1,), "calibration": (FEATURES + 3,)}).items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> "Mixture":
        """Moves the parameters to a device; they stay in at least float32."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            moved = getattr(self, name)
            setattr(self, name, tensor.to(moved.device, accumulation_dtype(moved.dtype)))
        return self

    def forward(self, scorer: Scorer, asked: Queries, given: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Repairs ``given (L, d)``, which were ``asked``; returns values and probabilities ``(L, d)``."""
        if not torch.compiler.is_compiling() and not bool(self.settings.any()):
            rule = f"repair needs a fit of at least {FEWEST} patterns"
            raise AHopError(f"{rule}, got none: call memory.fit()")
        size, values, intact = max(1, CHUNK_NEAR // (NEIGHBORS * scorer.stored.dim)), [], []
        k = min(NEIGHBORS, scorer.stored.count)
        for rows, known in zip(torch.split(asked.rows, size), torch.split(given, size), strict=True):
            with torch.no_grad():
                hits = scorer.search(asked._replace(rows=rows), k)
            with torch.autocast(rows.device.type, enabled=False):
                found = self.mix(scorer.stored, known.to(self.columns.dtype), *hits, beta)
                is_open = self.opens(found.features) >= self.gate[-1]
                values.append(torch.where(is_open[:, None], found.repaired, found.filled))
                intact.append(self.calibrated(found).masked_fill(known.isnan(), 0.0))
        return torch.cat(values), torch.cat(intact)

    def mix(self, stored: Stored, rows: Tensor, scores: Tensor, indices: Tensor, beta: Tensor | float) -> Found:
        """Repairs ``rows (L, d)`` with the neighbors ``indices (L, k)``."""
        scale, sharpness, even, background, count, local, trusted, linear = self.settings.unbind()
        center, span, wide, narrow = self.columns.unbind()
        near = stored.patterns[indices].to(rows.dtype)
        near = torch.where(near.isnan(), center, near) if stored.unknown else near
        place = torch.arange(near.shape[1], device=rows.device)
        usable = ((place < count) & (scores > -torch.inf)) | (place == 0)
        even = even * usable / usable.sum(-1, keepdim=True)

        def weigh(logits: Tensor) -> Tensor:
            return even + (1 - self.settings[2]) * logits.masked_fill(~usable, -torch.inf).softmax(-1)

        unknown = rows.isnan()
        known, x = (~unknown).to(rows.dtype), torch.where(unknown, center, rows)
        density, counted = background / span, known.sum(-1, keepdim=True).clamp(min=1)
        logits = beta * scores.to(rows.dtype).nan_to_num(0.0, 0.0, 0.0)
        weight = weigh(logits)
        change, share = torch.zeros_like(x), x.new_full((len(x), 1), 0.5)
        outer = (self.factors[:, None] * self.factors).flatten(0, 1)
        eye = torch.eye(FACTORS, dtype=x.dtype, device=x.device)
        for turn in range(ROUNDS + 1):
            mean = (weight[:, None] @ near)[:, 0]
            spread = (weight[:, None] @ (near - mean[:, None]).abs())[:, 0]
            width = scale * (local * spread + (1 - local) * (wide if turn == 0 else narrow)) + FLOOR * span
            likely = torch.exp(-(x - mean - change).abs() / width) / (2 * width)
            for _ in range(SHARES):
                kept = (1 - share) * likely
                intact = known * kept / (kept + share * density)
                share = ((known - intact).sum(-1, keepdim=True) + 0.5) / (counted + 1)
            if turn == ROUNDS:
                break
            if turn < WEIGHED:  # the logarithm of a mixture is about its largest part: a clipped difference
                most = ((1 - share) / (2 * width * share * density)).log().clamp(min=0) * known
                gaps = ((x[:, None] - near).abs() / width[:, None]).minimum(most[:, None])
                weight = weigh(trusted * logits - sharpness * gaps.sum(-1))
                mean = (weight[:, None] @ near)[:, 0]
            trust = intact / (narrow + FLOOR / 4 * span).square()
            system = (trust @ outer.mT).reshape(-1, FACTORS, FACTORS) + eye
            wanted = (trust * (x - mean)) @ self.factors.mT
            change = linear * torch.linalg.solve(system, wanted) @ self.factors
        estimate = mean + change
        repaired, filled = intact * x + (1 - intact) * estimate, torch.where(unknown, estimate, x)
        unit = wide + FLOOR * span
        moved = ((repaired - filled) / unit).clamp(-FARTHEST, FARTHEST)
        odds = (likely.clamp(min=1e-30) / density).log().clamp(-9, 9)
        features = [
            ((known - intact) * known).sum(-1) / counted[:, 0],
            (intact * (x - estimate).abs() / width).sum(-1) / intact.sum(-1).clamp(min=1),
            (intact * (1 - intact)).sum(-1) / counted[:, 0],
            known.mean(-1),
            (odds * known).sum(-1) / counted[:, 0],
            ((moved @ self.views.mT).square().sum(-1) + 1e-3).log(),
            (moved.clamp(-3, 3).square().mean(-1) + 1e-4).log(),
        ]
        return Found(repaired, filled, intact, torch.stack(features, -1))

    def scaled(self, features: Tensor) -> Tensor:
        """Returns features of rows in units of their deviation at the fit."""
        center, deviation = self.gate[GATE:-1].chunk(2)
        return ((features - center) / deviation).clamp(-4, 4)

    def opens(self, features: Tensor) -> Tensor:
        """Returns the probability that changes bring a row nearer to the truth ``(L,)``."""
        return (_products(self.scaled(features)) @ self.gate[:GATE]).sigmoid()

    def calibrated(self, found: Found) -> Tensor:
        """Returns calibrated probabilities ``(L, d)``: a value is suspicious in a suspicious row."""
        row = self.scaled(found.features)
        factor = self.calibration[0] + self.calibration[1] * row[:, :1]
        return (factor * _logit(found.intact) + (row @ self.calibration[3:] + self.calibration[2])[:, None]).sigmoid()

    @torch.no_grad()
    def learn_(self, scorer: Scorer, damage: Any, beta: float, seed: int) -> str:
        """Learns all parameters from damaged patterns, and returns what :class:`FitReport` says of it."""
        stored, like = scorer.stored, self.columns
        for name, tensor in self.named_buffers():
            setattr(self, name, torch.zeros_like(tensor))
        generator = torch.Generator(like.device).manual_seed(seed ^ 0x2F6B1D03)
        kept = some_patterns(stored.count, stored.dim, generator)
        if len(kept) < FEWEST:
            return ""
        stored = stored.take(kept)
        patterns = stored.patterns
        held = _draw(patterns, damage, stored.shape, getattr(scorer.similarity, "allows_missing", False), generator)
        own, kind, truth, query = held
        reached = scorer.within_reach(query.to(stored.dtype))
        subset, k = scorer._replace(stored=stored), min(NEIGHBORS, len(kept) - 1)
        scores, indices = subset.search(Queries(reached, bool(query.isnan().any()) or stored.unknown, ()), k + 1)
        others = indices != own[:, None]
        others[:, -1] &= ~others.all(-1)
        scores, indices = (each[others].reshape(-1, k) for each in (scores, indices))
        truth, query = truth.to(like.dtype), query.to(like.dtype)

        self._learn_columns_(patterns.to(like.dtype), stored, truth, indices)
        unit = self.columns[2] + FLOOR * self.columns[1]

        def error(rows: Tensor) -> Tensor:
            return ((rows - truth) / unit).nan_to_num(0.0).clamp(-3, 3).square().mean(-1)

        def loss(settings: Tensor) -> float:
            self.settings.copy_(settings)
            return error(self._mix_all(stored, query, scores, indices, beta).repaired).mean().item()

        def descend(start: Tensor) -> tuple[float, Tensor]:
            best, lowest = start, loss(start)
            for place, values in enumerate(GRID.values()):
                for value in values:
                    changed = best.clone()
                    changed[place] = value
                    if value != best[place] and (found := loss(changed)) < lowest:
                        best, lowest = changed, found
            return lowest, best

        starts = [like.new_tensor(each) for each in ([values[0] for values in GRID.values()], NEAR)]
        best = min(map(descend, starts), key=lambda each: each[0])[1]
        self.settings.copy_(best)
        found = self._mix_all(stored, query, scores, indices, beta)

        def seen(rows: Tensor) -> Tensor:
            change = ((rows - truth) / unit).nan_to_num(0.0).clamp(-FARTHEST, FARTHEST)
            return (change @ self.views.mT).square().sum(-1)

        before, after = seen(found.filled), seen(found.repaired)
        self._learn_gate_(found.features, before, after, kind)
        exact = kind != 1  # the damage that was given may add noise to all values
        self._calibrate_(Found(*(each[exact] for each in found)), query[exact], truth[exact])
        is_open = self.opens(found.features) >= self.gate[-1]
        if not is_open.any():
            return "repair changes unknown values only: it brings wrong ones no nearer to the truth"
        left = error(torch.where(is_open[:, None], found.repaired, found.filled)).mean() / error(found.filled).mean()
        return f"repair leaves {left.item():.2f} of the squared error of damaged rows"

    def _mix_all(self, stored: Stored, query: Tensor, scores: Tensor, indices: Tensor, beta: float) -> Found:
        """Repairs rows in chunks."""
        size = max(1, CHUNK_NEAR // (scores.shape[1] * stored.dim))
        parts = zip(*(torch.split(each, size) for each in (query, scores, indices)), strict=True)
        chunks = [self.mix(stored, rows, own, place, beta) for rows, own, place in parts]
        return Found(*(torch.cat(each) for each in zip(*chunks, strict=True)))

    def _learn_columns_(self, patterns: Tensor, stored: Stored, truth: Tensor, indices: Tensor) -> None:
        """Sets the scales of columns, the factors of what neighbors leave unexplained, and the views."""
        center = patterns.nanmean(0).nan_to_num(0.0)
        low, high = known_range(patterns)
        span = (high - low).nan_to_num(0.0)
        smallest = (1e-6 * patterns.nan_to_num(0.0).abs().amax(0)).maximum(1e-3 * span.mean()).clamp(min=1e-9)
        span = torch.where(span > 0, span, smallest)  # a constant column
        near = stored.patterns[indices[:, : NEIGHBORS // 2]].to(truth.dtype)
        missed = (truth - torch.where(near.isnan(), center, near).mean(1)).nan_to_num(0.0)
        wide = missed.square().mean(0).sqrt().maximum(1e-3 * span)
        self.columns.copy_(torch.stack([center, span, wide, wide]))
        self.factors.zero_()
        found, own = _components(missed / wide, FACTORS)
        self.factors[: len(found)] = found * own.sqrt()[:, None] * wide
        self.columns[3] = wide * (1 - (found.square() * own[:, None]).sum(0)).clamp(min=FLOOR).sqrt()
        found, _ = _components(
            (torch.where(patterns.isnan(), center, patterns) - center) / (wide + FLOOR * span), VIEWS
        )
        self.views.zero_()
        self.views[: len(found)] = found

    def _calibrate_(self, found: Found, query: Tensor, truth: Tensor) -> None:
        """Fits the weights that calibrate probabilities, after the gate."""
        rows, columns = (~(query.isnan() | truth.isnan())).nonzero()[:: max(1, query.numel() // 2**16)].unbind(-1)
        row, logit = self.scaled(found.features)[rows], _logit(found.intact[rows, columns])
        features = torch.cat([torch.stack([logit, logit * row[:, 0], torch.ones_like(logit)], -1), row], -1)
        self.calibration.copy_(_logistic(features, (query == truth)[rows, columns].to(logit.dtype)))

    def _learn_gate_(self, features: Tensor, before: Tensor, after: Tensor, kind: Tensor) -> None:
        """Learns where changes bring rows nearer, and from which probability on they do so for every kind of damage."""
        self.gate[GATE:-1] = torch.cat([features.mean(0), features.std(0).clamp(min=1e-6)])
        right = (after < LESS_ERROR * before).to(features.dtype)
        self.gate[:GATE] = _logistic(_products(self.scaled(features)), right)
        chosen = 2.0  # closed
        chance = self.opens(features)
        for gate in reversed(GATES):
            is_open = chance >= gate
            groups = [is_open & (kind == each) for each in range(int(kind.max()) + 1)]
            harms = [bool(after[rows].sum() > before[rows].sum()) for rows in groups if rows.sum() > len(rows) * MANY]
            if any(harms):
                break
            chosen = gate if is_open.any() else chosen
        self.gate[-1] = chosen


class Repair(nn.Module):
    """Repairs the inputs of a network: a layer for ``nn.Sequential(Repair(memory), network)``.

    Args:
        memory: a memory of clean rows, after a fit.

    >>> import ahop_layers as ah
    >>> rows = torch.rand(60, 2) @ torch.rand(2, 12)
    >>> memory = ah.AssociativeMemory(rows[:50])
    >>> report = memory.fit()
    >>> network = nn.Sequential(ah.Repair(memory), nn.Linear(12, 3))
    >>> network(ah.variants.Missing(0.3)(rows[50:])).isfinite().all()
    tensor(True)
    """

    def __init__(self, memory: Any) -> None:
        super().__init__()
        if not hasattr(memory, "repair"):
            raise AHopError(f"memory must be an AssociativeMemory, got {type(memory).__name__}")
        self.memory = memory

    def forward(self, x: Any) -> Any:
        """Returns the repaired values, in the shape of ``x``."""
        return self.memory.repair(x).values


def _draw(
    patterns: Tensor, damage: Any, shape: tuple[int, ...], missing: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws damaged patterns: their index, the number of their damage, and rows before and after it ``(n, d)``."""
    is_damage = any(map(callable, damage)) if isinstance(damage, (tuple, list)) else damage is not None
    given = as_damage(damage).of_shape(shape) if is_damage else any_damage(shape, missing)
    variants = [given, *(each((0.0, 0.9)) for each in (Replaced, Swapped, Saturated, Spiked, Drifted))]
    kinds: list[Callable[[Tensor, torch.Generator], Tensor]] = [lambda rows, _: rows]
    kinds += [each.bind(patterns) for each in [*variants, *([Missing((0.0, 0.8))] if missing else [])]]
    index = torch.randint(len(patterns), (HELD,), generator=generator, device=patterns.device)
    kind = torch.arange(HELD, device=patterns.device) % len(kinds)
    truth, query = patterns[index], patterns[index].clone()
    for number, each in enumerate(kinds):
        query[kind == number] = each(truth[kind == number], generator)
    usable = ~query.isnan().all(-1)
    return index[usable], kind[usable], truth[usable], query[usable]


def _components(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns principal components ``(r, d)`` of rows of mean 0, and the variance that each has beyond the noise."""
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    variance = values.square() / len(rows)
    count = min(most, len(variance) - 1)
    noise = variance[count:].sum() / max(1, rows.shape[1] - count)
    return vectors[:count], (variance[:count] - noise).clamp(min=0)


def _products(row: Tensor) -> Tensor:
    """Returns 1, features, and their products of two ``(L, GATE)``."""
    one = functional.pad(row, (1, 0), value=1.0)
    first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, device=row.device)
    return one[:, first] * one[:, second]


def _logit(chance: Tensor) -> Tensor:
    return chance.clamp(1e-6, 1 - 1e-6).logit()


def _logistic(features: Tensor, right: Tensor) -> Tensor:
    """Returns the weights of a logistic regression of ``right (n,)`` on ``features (n, f)``."""
    features, right = features.double(), right.double()

    def loss(weight: Tensor) -> tuple[float, Tensor]:
        logit = features @ weight
        value = functional.binary_cross_entropy_with_logits(logit, right) + 1e-3 * weight.square().sum()
        return value.item(), features.mT @ (logit.sigmoid() - right) / len(right) + 2e-3 * weight

    return minimize(loss, features.new_zeros(features.shape[1])).to(torch.float32)
