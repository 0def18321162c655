"""Rivals of the adaptive memory: nearest neighbors, sparse representation, and a convolutional network.

Each is trained once on the stored images, with queries of all levels of one kind of damage if it needs any, and
then answers every query with a class and a stored image.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import ahop_layers as ah
from ahop_layers.memory.variants import Variant
from benchmarks.paper.training import warmup_cosine
from benchmarks.search.data import OFFSETS, Images, contrasts


class Answer(NamedTuple):
    """The predicted class of each query, and the index of the stored image that represents it."""

    label: Tensor
    index: Tensor


Classifier = Callable[[Tensor], Answer]
"""Answers queries ``(n, d)``."""

Training = Callable[[Images, Variant, int], Classifier]
"""Trains on stored images, queries of a variant, and a seed."""

PAIRS = 2**25
"""Number of (query, stored image, pixel) triples that are processed at once."""

KEPT = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Fractions of the pixels that a trimmed distance may keep."""

SHARES, PENALTIES = (0.1, 0.2, 0.3, 0.5, 0.6, 0.8), (1e-3, 1e-2, 0.1, 1.0)
"""Parameters that robust coding may have."""


def nearest(stored: Images, distance: Callable[[Tensor, Tensor], Tensor]) -> Classifier:
    """Returns a classifier by the stored image of the smallest distance ``(L, d), (S, d) -> (L, S)``."""
    size = max(1, PAIRS // stored.rows.numel())

    def classify(query: Tensor) -> Answer:
        index = torch.cat([distance(part, stored.rows).argmin(-1) for part in torch.split(query, size)])
        return Answer(stored.labels[index], index)

    return classify


def euclid(stored: Images, variant: Variant, seed: int) -> Classifier:
    """The nearest stored image by Euclidean distance."""
    return nearest(stored, torch.cdist)


def cosine(stored: Images, variant: Variant, seed: int) -> Classifier:
    """The stored image of the largest cosine similarity."""
    return nearest(stored, lambda query, key: -functional.normalize(query) @ functional.normalize(key).mT)


def manhattan(stored: Images, variant: Variant, seed: int) -> Classifier:
    """The nearest stored image by the sum of absolute differences."""
    return nearest(stored, lambda query, key: torch.cdist(query, key, p=1))


def trimmed(stored: Images, variant: Variant, seed: int, queries: int = 512) -> Classifier:
    """The nearest stored image by the sum of the smallest absolute differences of pixels."""
    return _trimmed(stored, variant, seed, queries, lambda rows: [rows])


def trimmed_contrasts(stored: Images, variant: Variant, seed: int, queries: int = 512) -> Classifier:
    """The same for contrasts of neighboring pixels, which the adaptive memory compares as well."""
    side = stored.shape[0]
    return _trimmed(stored, variant, seed, queries, lambda rows: [contrasts(rows, side, each) for each in OFFSETS])


def _trimmed(
    stored: Images, variant: Variant, seed: int, queries: int, seen: Callable[[Tensor], list[Tensor]]
) -> Classifier:
    """Returns a classifier by the sum of the smallest absolute differences of each view of ``seen``.

    The fraction of the differences that count is the same for all queries. It is the one with the best accuracy on
    damaged stored images, each compared with all other stored images.
    """
    generator = torch.Generator(stored.rows.device).manual_seed(seed)
    index, query = variant.sample(stored.rows, queries, generator)
    views, kept = list(zip(seen(query), seen(stored.rows), strict=True)), torch.tensor(KEPT, device=query.device)
    correct = torch.zeros(len(kept), device=query.device)
    size = max(1, PAIRS // stored.rows.numel())
    for rows in torch.split(torch.arange(len(index), device=query.device), size):
        scores = [ah.footprint(part[rows], key, "l1")[..., _counts(kept, key) - 1] for part, key in views]
        score, own = torch.stack(scores).sum(0), index[rows]
        score[torch.arange(len(own)), own] = -torch.inf
        correct += (stored.labels[score.argmax(1)] == stored.labels[own, None]).sum(0)
    best = kept[correct.argmax()]

    def distance(query: Tensor, key: Tensor) -> Tensor:
        total = query.new_zeros(len(query), len(key))
        for part, other in zip(seen(query), seen(key), strict=True):
            weight = functional.one_hot(_counts(best, other) - 1, other.shape[1]).to(other)[None]
            total -= ah.adaptive_similarity(part, other, weight, bases=("l1",))
        return total

    return nearest(stored, distance)


def _counts(kept: Tensor, rows: Tensor) -> Tensor:
    """Returns the number of values of a row that are a fraction of it, at least 1."""
    return (kept * rows.shape[1]).round().long().clamp(min=1)


class SparseRepresentation:
    """Sparse representation with an error term (Wright et al. 2009).

    A query ``y`` is ``A x + e`` with sparse ``x`` and ``e``; the columns of ``A`` are the stored images. The class is
    the one whose part of ``A x`` is nearest to ``y - e``. Queries and columns have norm 1.

    Args:
        stored: the stored images.
        penalty: factor of the absolute values of ``x`` and ``e`` beside half of the squared residual.
        steps: number of FISTA steps.
        batch: number of queries that are solved at once.
    """

    def __init__(self, stored: Images, penalty: float = 1e-3, steps: int = 3000, batch: int = 2048) -> None:
        self.stored, self.penalty, self.steps, self.batch = stored, penalty, steps, batch
        self.rows = functional.normalize(stored.rows)
        # The inverse of the largest eigenvalue of [A I]^T [A I].
        self.step = 1 / (torch.linalg.eigvalsh(self.rows.mT @ self.rows)[-1].item() + 1)

    def solve(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Computes ``x (n, N)`` and ``e (n, d)`` of queries ``(n, d)`` of norm 1."""
        rows, step = self.rows, self.step
        x, e = query.new_zeros(len(query), len(rows)), torch.zeros_like(query)
        ahead_x, ahead_e, momentum = x, e, 1.0
        for _ in range(self.steps):
            residual = torch.addmm(ahead_e - query, ahead_x, rows)
            new_x = functional.softshrink(torch.addmm(ahead_x, residual, rows.mT, alpha=-step), self.penalty * step)
            new_e = functional.softshrink(torch.sub(ahead_e, residual, alpha=step), self.penalty * step)
            following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            factor = (momentum - 1) / following
            ahead_x, ahead_e = torch.lerp(x, new_x, 1 + factor), torch.lerp(e, new_e, 1 + factor)
            x, e, momentum = new_x, new_e, following
        return x, e

    def __call__(self, query: Tensor) -> Answer:
        """Answers queries ``(n, d)`` with the class of the smallest residual and its image of the largest weight."""
        answers = [self._classify(functional.normalize(part)) for part in torch.split(query, self.batch)]
        return Answer(*(torch.cat(parts) for parts in zip(*answers, strict=True)))

    def _classify(self, query: Tensor) -> Answer:
        x, e = self.solve(query)
        classes = self.stored.labels.unique()
        members = self.stored.labels == classes[:, None]
        clean = query - e
        residuals = [torch.linalg.vector_norm(clean - x[:, own] @ self.rows[own], dim=-1) for own in members]
        best = torch.stack(residuals, -1).argmin(-1)
        index = x.masked_fill(~members[best], -torch.inf).argmax(-1)
        return Answer(classes[best], index)


def sparse(stored: Images, variant: Variant, seed: int) -> Classifier:
    """Sparse representation of a query by stored images and an error."""
    return SparseRepresentation(stored)


class RobustCoding:
    """Robust regularized coding with a squared penalty (Yang et al. 2013), iteratively reweighted.

    A query is represented by all stored images, with a weight for each pixel that falls with its residual; the class is
    the one whose own part of the representation has the smallest weighted residual. Queries and columns have norm 1.

    Args:
        stored: the stored images.
        share: the quantile of the squared residuals at which the weight of a pixel is 1/2.
        penalty: factor of the squared coefficients.
        steepness: how fast weights fall there.
        steps: number of reweightings.
        gradients: number of conjugate gradients after each of them.
        batch: number of queries that are solved at once.
    """

    def __init__(
        self,
        stored: Images,
        share: float,
        penalty: float,
        steepness: float = 8.0,
        steps: int = 15,
        gradients: int = 30,
        batch: int = 512,
    ) -> None:
        self.stored, self.rows, self.batch = stored, functional.normalize(stored.rows), batch
        self.gradients = gradients
        self.share, self.steepness, self.penalty, self.steps = share, steepness, penalty, steps

    def __call__(self, query: Tensor) -> Answer:
        """Answers queries ``(n, d)`` with the class of the smallest residual and its image of the largest weight."""
        answers = [self._classify(functional.normalize(part)) for part in torch.split(query, self.batch)]
        return Answer(*(torch.cat(parts) for parts in zip(*answers, strict=True)))

    def _weights(self, residual: Tensor) -> Tensor:
        square = residual.square()
        middle = square.quantile(self.share, dim=1, keepdim=True).clamp(min=1e-12)
        return torch.sigmoid(self.steepness * (1 - square / middle))

    def _solve(self, x: Tensor, weight: Tensor, query: Tensor) -> Tensor:
        """Minimizes the weighted squared residuals plus the penalty by conjugate gradients from ``x (n, N)``."""
        residual = (weight * (query - x @ self.rows)) @ self.rows.mT - self.penalty * x
        direction, size = residual, residual.square().sum(1, keepdim=True)
        for _ in range(self.gradients):
            image = (weight * (direction @ self.rows)) @ self.rows.mT + self.penalty * direction
            step = size / (direction * image).sum(1, keepdim=True).clamp(min=1e-30)
            x, residual = x + step * direction, residual - step * image
            last, size = size, residual.square().sum(1, keepdim=True)
            direction = residual + size / last.clamp(min=1e-30) * direction
        return x

    def _classify(self, query: Tensor) -> Answer:
        rows = self.rows
        x, weight = query.new_zeros(len(query), len(rows)), self._weights(query - rows.mean(0))
        for _ in range(self.steps):
            new = self._solve(x, weight, query)
            x = x + 0.5 * (new - x) if x.any() else new
            weight = self._weights(query - x @ rows)
        classes = self.stored.labels.unique()
        members = self.stored.labels == classes[:, None]
        residuals = [((query - x[:, own] @ rows[own]).square() * weight).sum(-1) for own in members]
        best = torch.stack(residuals, -1).argmin(-1)
        return Answer(classes[best], x.masked_fill(~members[best], -torch.inf).argmax(-1))


def robust(stored: Images, variant: Variant, seed: int) -> Classifier:
    """Robust regularized coding of a query by stored images, with fixed parameters."""
    return RobustCoding(stored, share=0.6, penalty=1e-3)


def robust_tuned(stored: Images, variant: Variant, seed: int, queries: int = 256) -> Classifier:
    """The same with parameters that are chosen.

    Share and penalty are those with which one half of the stored images recognizes damaged images of the other half.
    """
    generator = torch.Generator(stored.rows.device).manual_seed(seed)
    order = torch.randperm(len(stored.rows), generator=generator, device=stored.rows.device)
    known, asked = (stored.subset(half) for half in order.tensor_split(2))
    index, query = variant.sample(asked.rows, queries, generator)

    def accuracy(setting: tuple[float, float]) -> float:
        return (RobustCoding(known, *setting)(query).label == asked.labels[index]).double().mean().item()

    return RobustCoding(stored, *max(itertools.product(SHARES, PENALTIES), key=accuracy))


def network(n_classes: int, width: int) -> nn.Sequential:
    """Returns a network of six 3 x 3 convolutions, with a pooling after each second one, for gray images."""
    layers: list[nn.Module] = []
    channels = 1
    for stage in range(3):
        for _ in range(2):
            out = width * 2**stage
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    pooled = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * channels, n_classes)]
    return nn.Sequential(*layers, *pooled)


def convolutional(
    stored: Images, variant: Variant, seed: int, steps: int = 1500, batch: int = 256, width: int = 64
) -> Classifier:
    """A convolutional network, trained on damaged stored images. It names a class and no stored image."""
    device, shape = stored.rows.device, (1, *stored.shape)
    classes, target = stored.labels.unique(return_inverse=True)
    # Without a forked state, the initialization would change the random numbers of the caller.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = network(len(classes), width).to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
        for _ in range(steps):
            index, query = variant.sample(stored.rows, batch)
            loss = functional.cross_entropy(model(query.unflatten(-1, shape)), target[index])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    model.eval()
    first = torch.stack([(target == place).nonzero()[0, 0] for place in range(len(classes))])

    @torch.no_grad()
    def classify(query: Tensor) -> Answer:
        best = torch.cat([model(part.unflatten(-1, shape)).argmax(-1) for part in torch.split(query, 1024)])
        return Answer(classes[best], first[best])

    return classify


RIVALS: dict[str, Training] = {
    "Euclid": euclid,
    "cosine": cosine,
    "L1": manhattan,
    "trimmed L1": trimmed,
    "trimmed L1 of contrasts": trimmed_contrasts,
    "sparse representation": sparse,
    "robust coding": robust,
    "robust coding, tuned": robust_tuned,
    "CNN": convolutional,
}
