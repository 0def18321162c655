"""Training by gradients: folded weights, a learning-rate schedule, and the loop that trains a network of the paper."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import ahop_layers as ah
from ahop_layers.memory.variants import Variant
from ahop_layers.ops.reference import fold, unfold
from benchmarks.paper.networks import Network
from benchmarks.paper.table import TableSimilarity

HELD_OUT, EVALUATIONS = 512, 10
"""Number of queries that are held out, and how often training evaluates them."""

FORM_UNITS, FORM_STEPS = {"original0": 20.0, "original1": 1.0}, 40
"""Units of folded and unfolded weights, up to so many steps. With more, they fall with the root of the number."""

FORM_EPS = 0.3
"""Adam's eps of the weights of a base, the sum over ranks, in their units. See :func:`_groups`."""

MIN_DEVIATION = 4.0
"""Smallest deviation of the logits of a query at the start. With less, training is slow: the readout is an average."""


class _Folded(nn.Module):
    """Parametrizes ``w`` by the folded weight, plus ``scale`` times an unfolded one unless that is None."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, folded: Tensor, *unfolded: Tensor) -> Tensor:
        weight = unfold(folded)
        return weight if self.scale is None else weight + self.scale * unfolded[0]

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        folded = fold(weight)
        return folded if self.scale is None else (folded, torch.zeros_like(weight))


@contextmanager
def folded_weights(module: nn.Module, and_unfolded: bool = False) -> Iterator[None]:
    """Trains the folded weights of every adaptive similarity in ``module`` instead of ``w`` and ``beta``.

    A step on an entry of the folded weight ``u``, the reverse cumulative sum of ``beta * w``, changes the weight of one
    rank, a step on ``w`` the weights of many. Entering and leaving the context does not change the scores.

    If ``and_unfolded``, the weights are the sum of folded and unfolded ones. Noisy queries need small steps, masked
    queries without noise need weights in the thousands: Adam, with its fixed step size, reaches both with this sum. The
    effect of a step on all unfolded weights is at most that of 64 dimensions.
    """
    trained = []
    for part in [each for each in module.modules() if isinstance(each, ah.AdaptiveSimilarity) and each.w.requires_grad]:
        weight, factor = part.w, part.beta
        trained.append((part, weight, factor, factor.requires_grad))
        with torch.no_grad():
            weight.mul_(factor.unsqueeze(-1))
            factor.fill_(1.0)
        factor.requires_grad_(False)
        scale = min(1.0, 64**2 / (weight.shape[-1] * part.dim)) if and_unfolded else None
        parametrize.register_parametrization(part, "w", _Folded(scale))
    try:
        yield
    finally:
        for part, weight, factor, trains_beta in trained:
            parametrize.remove_parametrizations(part, "w")
            with torch.no_grad():
                weight.copy_(part.w)
            part.w = weight  # the same parameter object as before, which an optimizer may reference
            factor.requires_grad_(trains_beta)


def warmup_cosine(step: int, count: int) -> float:
    """Returns the learning-rate factor of a step: linear warmup over a tenth of the steps, then cosine decay."""
    warmup = count // 10
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, count - warmup)))


def train(network: Network, variant: Variant, steps: int, lr: float = 0.05, batch: int = 512, seed: int = 0) -> Tensor:
    """Trains all parameters of a network, and returns the loss of every step ``(steps,)``.

    The loss is the negative log-likelihood of the pattern that a query was made from, with the softmax of the scores
    for every separation. Bias and inverse temperature start at their estimates, and the network keeps the parameters
    with the smallest of about ten losses on queries that are held out. K-Hop separates its patterns instead.

    Args:
        network: what is trained.
        variant: damage of the queries. Each step draws new ones.
        steps: number of steps of Adam.
        lr: maximum learning rate, which rises for a tenth of the steps, then falls to zero.
        batch: number of queries, or of patterns to separate, per step.
        seed: seed of all random numbers.
    """
    patterns, kernel = network.patterns, network.modulation
    # Other numbers than those of the seed itself: patterns drawn with it would be values that replace others.
    generator = torch.Generator(patterns.device).manual_seed(seed ^ 0x5851F42D4C957F2D)
    if network.objective == "separation" and kernel is not None:

        def separation_loss() -> Tensor:
            order = torch.randperm(len(patterns), generator=generator, device=patterns.device)
            return kernel.separation_loss(patterns[order[:batch]])

        return _minimize(network, separation_loss, steps, lr)

    def loss(index: Tensor, query: Tensor) -> Tensor:
        return functional.cross_entropy(network.beta * network.scores(query), index)

    variant = variant.bind(patterns)
    held_out = variant.sample(patterns, HELD_OUT, generator)
    if network.bias is not None and not network.bias.any():
        index, query = variant.sample(patterns, 8 * batch, generator)
        network.bias.data.copy_(least_squares_bias(patterns[index], query))
    if network.fits_beta:
        with torch.no_grad():
            network.beta.copy_(best_inverse_temperature(network.scores(held_out[1]), held_out[0]))
    return _minimize(
        network, lambda: loss(*variant.sample(patterns, batch, generator)), steps, lr, lambda: loss(*held_out)
    )


def least_squares_bias(origin: Tensor, query: Tensor) -> Tensor:
    """Returns the least-squares solution ``(d,)`` of ``query = a * origin + bias``, for ``(n, d)``.

    ``a`` is a scalar: masking and noise shrink the correlation with the pattern, but do not shift the mean. Gradient
    descent finds the bias only slowly, and until then the other weights compensate for a wrong one.
    """
    mean = origin.mean(0)
    deviation = origin - mean
    return query.mean(0) - (deviation * query).sum() / deviation.square().sum() * mean


def best_inverse_temperature(scores: Tensor, index: Tensor) -> Tensor:
    """Returns the factor of ``scores (L, N)`` that minimizes the loss of queries of the patterns ``index (L,)``.

    The search is relative to the deviation of the scores. The loss falls without limit if the largest score is always
    right, so the result is the smallest factor with a loss within 0.01 of the minimum. It gives the scores a deviation
    of at least MIN_DEVIATION, also if no factor lowers the loss.
    """
    unit = scores.std(-1, correction=0).square().mean().rsqrt()

    def search(factors: Tensor) -> Tensor:
        losses = torch.stack([functional.cross_entropy(factor * unit * scores, index) for factor in factors])
        return factors[(losses <= losses.min() + 0.01).int().argmax()]

    best = search(torch.cat([unit.new_zeros(1), torch.arange(-6, 11).to(unit).exp2()]))
    if best > 0:
        best = search(best * torch.arange(-0.9, 1.0, 0.1).to(unit).exp2())
    return unit * best.clamp(min=MIN_DEVIATION)


def _minimize(
    network: Network, loss: Callable[[], Tensor], steps: int, lr: float, judge: Callable[[], Tensor] | None = None
) -> Tensor:
    """Takes steps of Adam on ``loss()``, and keeps the parameters with the smallest ``judge()``. Returns all losses."""
    losses = []
    with folded_weights(network, and_unfolded=True):
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(_groups(network, lr, steps), lr=lr, fused=parameters[0].is_cuda)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
        best, kept = math.inf, parameters
        for step in range(steps + 1):
            if judge is not None and step * EVALUATIONS // steps > (step - 1) * EVALUATIONS // steps:
                with torch.no_grad():
                    now = judge().item()
                if now < best:
                    best, kept = now, [parameter.detach().clone() for parameter in parameters]
            if step == steps:
                break
            value = loss()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value)
    return torch.stack(losses)


def _groups(network: Network, lr: float, steps: int) -> list[dict[str, Any]]:
    """Returns a parameter group of Adam for each trained parameter, with its learning rate and ``eps``.

    Steps are relative to the deviation of the patterns for a bias, and to that of the logits for a prior and a table.
    Adam takes full steps along any gradient larger than ``eps``. If nearly all queries are right, gradients are small
    and noisy, and full steps would undo that. A larger ``eps`` for the weights makes such steps small. As gradients are
    inversely proportional to the unit, so is ``eps``. It is divided by the number of ranks, which share the gradient
    of a query. Few steps must be large; many large ones overfit.
    """
    tables = [part.table for part in network.modules() if isinstance(part, TableSimilarity)]
    units = {id(each): 1 / network.beta.item() for each in (network.prior, *tables)}
    units[id(network.bias)] = (3 * network.patterns.var(0, correction=0).mean()).sqrt().item()
    groups = []
    for path, parameter in network.named_parameters():
        if parameter.requires_grad:
            unit, eps, name = units.get(id(parameter), 1.0), 1e-8, path.rpartition(".")[2]
            if name in FORM_UNITS:
                unit = FORM_UNITS[name] * min(1.0, math.sqrt(FORM_STEPS / steps))
                eps = FORM_EPS * parameter.shape[-2] / parameter.numel()
            groups.append({"params": [parameter], "lr": lr * unit, "eps": eps / unit})
    return groups
