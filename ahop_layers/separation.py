"""Separations: functions from the scores of a query to the weights of the stored patterns.

The functions work along the last axis. A score of ``-inf`` gets the weight zero. A fully masked row, all ``-inf``, gets
zeros with finite gradients. :class:`Separation` also works on rows that are groups along the first axis.
"""

from collections.abc import Callable
from functools import partial, wraps

import torch
from torch import Tensor, nn

from ahop_layers.errors import check_choice, check_floating, check_given_sizes
from ahop_layers.ops.reference import accumulation_dtype

_Separate = Callable[..., Tensor]


class Rows:
    """The operations on rows of scores that a separation needs, here for rows along the last axis.

    >>> Rows().sum(torch.tensor([[1.0, 2.0]]))
    tensor([[3.]])
    """

    def sum(self, x: Tensor) -> Tensor:
        """Computes the sum of each row."""
        return x.sum(-1, keepdim=True)

    def amax(self, x: Tensor) -> Tensor:
        """Computes the maximum of each row."""
        return x.amax(-1, keepdim=True)

    def spread(self, x: Tensor) -> Tensor:
        """Repeats one value per row for each score of the row; broadcasting may do the same."""
        return x


_LAST_AXIS = Rows()


def _zeros_for_masked_rows(separate: _Separate) -> _Separate:
    """Extends a separation to fully masked rows; ``masked=False`` promises that there is none and skips the check."""

    @wraps(separate)
    def extended(scores: Tensor, *args: Tensor, masked: bool = True) -> Tensor:
        check_floating(scores=scores)
        if scores.shape[-1] == 0:
            return scores
        if not masked:
            return separate(scores, *args)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return separate(scores.masked_fill(empty, 0.0), *args).masked_fill(empty, 0.0)

    return extended


def _below_largest(scores: Tensor, scale: Tensor | float = 1.0, rows: Rows = _LAST_AXIS) -> Tensor:
    """Subtracts the largest score of each row and multiplies by ``scale``, in the accumulation dtype.

    In the entmax family a score of -1 or less then has the weight zero, so the result is clamped to -2. The first clamp
    makes ``-inf`` finite before the product, since the gradient of ``scale`` would otherwise be NaN.
    """
    wide = scores.to(accumulation_dtype(scores.dtype))
    return ((wide - rows.spread(rows.amax(wide.detach()))).clamp(min=-1e4) * scale).clamp(min=-2.0)


@_zeros_for_masked_rows
def softmax(scores: Tensor) -> Tensor:
    """Weights proportional to ``exp(score)``: ``(..., S) -> (..., S)``.

    >>> softmax(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    return scores.softmax(-1)


def _softmax_within(groups: Rows, scores: Tensor) -> Tensor:
    wide = scores.to(accumulation_dtype(scores.dtype))
    powers = (wide - groups.spread(groups.amax(wide.detach()))).exp()
    return (powers / groups.spread(groups.sum(powers))).to(scores.dtype)


@_zeros_for_masked_rows
def sparsemax(scores: Tensor) -> Tensor:
    """The Euclidean projection of the scores onto the probability simplex, a sparse one: ``(..., S) -> (..., S)``.

    >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    z = _below_largest(scores)
    with torch.no_grad():
        best = z.sort(-1, descending=True).values
        excess, rank = best.cumsum(-1) - 1, torch.arange(1, z.shape[-1] + 1, device=z.device)
        size = (excess < rank * best).sum(-1, keepdim=True).clamp(min=1)  # 0 where a score is NaN
        support = z > excess.gather(-1, size - 1) / size
    # The sort only determines the support. Given the support, the threshold is a mean, which is cheap to differentiate.
    threshold = ((z * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return ((z - threshold).clamp(min=0.0) * support).to(scores.dtype)


@_zeros_for_masked_rows
def entmax15(scores: Tensor) -> Tensor:
    """Entmax with alpha = 1.5, halfway between softmax and sparsemax: ``(..., S) -> (..., S)``.

    >>> entmax15(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.6740, 0.3260, 0.0000])
    """
    z = _below_largest(scores, 0.5)
    with torch.no_grad():
        best = z.sort(-1, descending=True).values
        rank = torch.arange(1, z.shape[-1] + 1, device=z.device)
        mean, square = best.cumsum(-1) / rank, best.square().cumsum(-1) / rank
        thresholds = mean - (1 / rank - square + mean.square()).clamp(min=0.0).sqrt()
        size = (thresholds <= best).sum(-1, keepdim=True).clamp(min=1)
        support = z > thresholds.gather(-1, size - 1)
    count = support.sum(-1, keepdim=True)
    mean = (z * support).sum(-1, keepdim=True) / count
    spread = ((z - mean).square() * support).sum(-1, keepdim=True)
    threshold = mean - ((1 - spread) / count).sqrt()  # of a positive number, so the gradient is finite
    return ((z - threshold).clamp(min=0.0) * support).square().to(scores.dtype)


@_zeros_for_masked_rows
def entmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """Entmax of any ``1 < alpha <= 2``, differentiable in both: ``(..., S)``, alpha broadcastable to ``(..., 1)``.

    >>> entmax(torch.tensor([1.0, 0.5, -1.0]), torch.tensor(2.0))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return _entmax(scores, alpha, _LAST_AXIS)


def _entmax(scores: Tensor, alpha: Tensor | float, rows: Rows) -> Tensor:
    """Computes entmax by bisection, which needs no sorted rows."""
    if isinstance(alpha, Tensor):
        alpha = alpha.to(accumulation_dtype(scores.dtype))
    z, power = _below_largest(scores, alpha - 1, rows), 1 / (alpha - 1)

    def gap(threshold: Tensor) -> Tensor:
        return (z - rows.spread(threshold)).clamp(min=0.0)

    with torch.no_grad():
        low = torch.full_like(rows.sum(z), -1.0)
        for step in range(25):
            middle = low + 0.5 ** (step + 1)
            heavy = rows.sum(gap(middle).pow(power)) >= 1
            low = torch.where(heavy, middle, low)
        above = gap(low)
        slope = rows.sum(power * above.pow(power - 1) * (above > 0))
        slope = slope.masked_fill(slope == 0, 1.0)  # a group without scores
    # One Newton step squares the error of the bisection and provides the implicit gradient of the threshold.
    threshold = low + (rows.sum(gap(low).pow(power)) - 1) / slope
    return gap(threshold).pow(power).to(scores.dtype)


@_zeros_for_masked_rows
def argmax(scores: Tensor) -> Tensor:
    """The weight one for the largest score (one of them at a tie), else zero: ``(..., S) -> (..., S)``.

    Its gradient is the gradient of softmax (straight-through estimator), because its own is zero almost everywhere.

    >>> argmax(torch.tensor([1.0, 0.5, -1.0]))
    tensor([1., 0., 0.])
    """
    hard = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    return _straight_through(hard, scores, partial(torch.softmax, dim=-1))


def _argmax_within(groups: Rows, scores: Tensor) -> Tensor:
    member = torch.arange(scores.shape[0], device=scores.device)[:, None, None]
    largest = scores == groups.spread(groups.amax(scores.detach()))
    first = groups.spread(groups.amax(torch.where(largest, -member, -scores.shape[0])))
    return _straight_through((first == -member).to(scores.dtype), scores, partial(_softmax_within, groups))


def _straight_through(hard: Tensor, scores: Tensor, softmax: _Separate) -> Tensor:
    """Gives ``hard`` the gradient of the softmax of the scores."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return hard
    soft = softmax(scores)
    return hard + (soft - soft.detach())


_SEPARATE: dict[str, _Separate] = {
    "softmax": softmax, "sparsemax": sparsemax, "entmax15": entmax15, "argmax": argmax, "entmax": entmax
}  # fmt: skip
SEPARATIONS = tuple(_SEPARATE)


class Separation(nn.Module):
    """A separation by name, with the learned parameter of ``"entmax"``.

    Args:
        name: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax"`` (learned alpha between 1 and 2, initially
            1.5) or ``"argmax"``.
        num_heads: ``H`` for one alpha per head of scores ``(..., H, L, S)``; ``None`` for a single alpha.

    >>> Separation("sparsemax")(torch.tensor([[2.0, 0.0], [-torch.inf, -torch.inf]]))
    tensor([[1., 0.],
            [0., 0.]])
    """

    def __init__(self, name: str = "softmax", num_heads: int | None = None) -> None:
        super().__init__()
        check_choice("separation", name, SEPARATIONS)
        check_given_sizes(num_heads=num_heads)
        self.name = name
        shape = () if num_heads is None else (num_heads, 1, 1)
        self.alpha_logit = nn.Parameter(torch.zeros(shape)) if name == "entmax" else None

    def reset_parameters(self) -> None:
        """Resets the learned alpha to 1.5."""
        if self.alpha_logit is not None:
            nn.init.zeros_(self.alpha_logit)

    @property
    def alpha(self) -> Tensor | float:
        """The alpha of a member of the entmax family: 1 for softmax, 2 for sparsemax. Others raise an AHopError."""
        if self.alpha_logit is not None:
            # Below 1.01 the power 1 / (alpha - 1) overflows float32. The limit at 1 is softmax.
            return 1 + self.alpha_logit.sigmoid().clamp(min=0.01)
        known = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}
        check_choice("separation", self.name, (*known, "entmax"))
        return known[self.name]

    def forward(self, scores: Tensor, masked: bool = True, groups: Rows | None = None) -> Tensor:
        """Turns ``scores (..., [H,] L, S)`` into weights of the same shape.

        Args:
            scores: rows along the last axis, or with ``groups`` along the first: ``(total, H, L)``.
            masked: False skips handling of fully masked rows.
            groups: reductions over groups along the first axis, such as :class:`ahop_layers.packed.Bags`.
        """
        if groups is None:
            parameters = () if self.alpha_logit is None else (self.alpha,)
            return _SEPARATE[self.name](scores, *parameters, masked=masked)
        # The scores of a group are not an axis that could be sorted.
        if self.name == "softmax":
            return _softmax_within(groups, scores)
        if self.name == "argmax":
            return _argmax_within(groups, scores)
        alpha = self.alpha
        # (H, 1, 1) belongs to scores (..., H, L, S), and (H, 1) to (total, H, L).
        return _entmax(scores, alpha.squeeze(-1) if isinstance(alpha, Tensor) and alpha.ndim else alpha, groups)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        return f"{self.name!r}"
