"""Separations: from the scores of a row of patterns to the weight of each pattern.

All of them work along the last axis, leave out patterns whose score is ``-inf``, and give zeros, with finite gradients,
to a row that has nothing else.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

from ahop_layers.errors import check_choice, check_floating, check_sizes
from ahop_layers.ops.reference import accumulation_dtype

_Separate = Callable[..., Tensor]


def _zeros_for_empty_rows(separate: _Separate) -> _Separate:
    """Extend a separation of rows with at least one finite score to all rows; ``masked=False`` promises there are."""

    @wraps(separate)
    def extended(scores: Tensor, *args: Tensor, masked: bool = True) -> Tensor:
        check_floating(scores=scores)
        if scores.shape[-1] == 0 or not masked:
            return scores if scores.shape[-1] == 0 else separate(scores, *args)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return separate(scores.masked_fill(empty, 0.0), *args).masked_fill(empty, 0.0)

    return extended


def _below_largest(scores: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """The scaled distance to the largest score of the row, in a dtype that sums can bear.

    A pattern 1 or more below the largest gets no weight in any member of the entmax family. So -2 stands for everything
    further down. ``-inf`` becomes finite before it meets the scale, whose gradient it would poison.
    """
    wide = scores.to(accumulation_dtype(scores.dtype))
    return ((wide - wide.amax(-1, keepdim=True).detach()).clamp(min=-1e4) * scale).clamp(min=-2.0)


@_zeros_for_empty_rows
def softmax(scores: Tensor) -> Tensor:
    """Weights proportional to ``exp(score)``: ``(..., S) -> (..., S)``.

    >>> softmax(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    return scores.softmax(-1)


@_zeros_for_empty_rows
def sparsemax(scores: Tensor) -> Tensor:
    """The point of the probability simplex nearest to the scores: ``(..., S) -> (..., S)``, most weights exactly zero.

    >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    z = _below_largest(scores)
    with torch.no_grad():
        best = z.sort(-1, descending=True).values
        excess, rank = best.cumsum(-1) - 1, torch.arange(1, z.shape[-1] + 1, device=z.device)
        size = (excess < rank * best).sum(-1, keepdim=True).clamp(min=1)  # none where a score is NaN
        support = z > excess.gather(-1, size - 1) / size
    # The sort only finds the support; on it the threshold is a mean, which autograd differentiates cheaply.
    threshold = ((z * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return ((z - threshold).clamp(min=0.0) * support).to(scores.dtype)


@_zeros_for_empty_rows
def entmax15(scores: Tensor) -> Tensor:
    """Entmax with alpha = 1.5, half way between softmax and sparsemax: ``(..., S) -> (..., S)``.

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
    threshold = mean - ((1 - spread) / count).sqrt()  # positive: only on a support of equal scores is it 1 / count
    return ((z - threshold).clamp(min=0.0) * support).square().to(scores.dtype)


@_zeros_for_empty_rows
def entmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """Entmax of any ``1 < alpha <= 2``, differentiable in both: ``(..., S)``, alpha broadcastable to ``(..., 1)``.

    >>> entmax(torch.tensor([1.0, 0.5, -1.0]), torch.tensor(2.0))
    tensor([0.7500, 0.2500, 0.0000])
    """
    alpha = alpha.to(accumulation_dtype(scores.dtype))
    z, power = _below_largest(scores, alpha - 1), 1 / (alpha - 1)
    with torch.no_grad():
        low = torch.full_like(z[..., :1], -1.0)
        for step in range(25):
            middle = low + 0.5 ** (step + 1)
            heavy = (z - middle).clamp(min=0.0).pow(power).sum(-1, keepdim=True) >= 1
            low = torch.where(heavy, middle, low)
        gap = (z - low).clamp(min=0.0)
        slope = (power * gap.pow(power - 1) * (gap > 0)).sum(-1, keepdim=True)
    # One Newton step from the root found above squares its error, and gives the threshold its implicit gradient.
    threshold = low + ((z - low).clamp(min=0.0).pow(power).sum(-1, keepdim=True) - 1) / slope
    return (z - threshold).clamp(min=0.0).pow(power).to(scores.dtype)


@_zeros_for_empty_rows
def argmax(scores: Tensor) -> Tensor:
    """All weight on the best pattern (one of them at a tie): ``(..., S) -> (..., S)``.

    The gradient is that of softmax (straight through), since that of a hard choice is zero everywhere.

    >>> argmax(torch.tensor([1.0, 0.5, -1.0]))
    tensor([1., 0., 0.])
    """
    hard = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return hard
    soft = scores.softmax(-1)
    return hard + (soft - soft.detach())


def _elementwise(function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    blocked = scores == -torch.inf
    return function(scores.masked_fill(blocked, 0.0)).masked_fill(blocked, 0.0)


@_zeros_for_empty_rows
def identity(scores: Tensor) -> Tensor:
    """The scores themselves, as in the first Hopfield networks: ``(..., S) -> (..., S)``.

    >>> identity(torch.tensor([1.0, -torch.inf]))
    tensor([1., 0.])
    """
    return _elementwise(lambda s: s, scores)


@_zeros_for_empty_rows
def polynomial(scores: Tensor, degree: int) -> Tensor:
    """``score ** degree``, as in dense associative memories: ``(..., S) -> (..., S)``.

    >>> polynomial(torch.tensor([2.0, -1.0]), 3)
    tensor([ 8., -1.])
    """
    return _elementwise(lambda s: s**degree, scores)


@_zeros_for_empty_rows
def exponential(scores: Tensor) -> Tensor:
    """``exp(score)`` without normalisation: ``(..., S) -> (..., S)``.

    >>> exponential(torch.tensor([0.0, -torch.inf]))
    tensor([1., 0.])
    """
    return _elementwise(torch.exp, scores)


_PLAIN: dict[str, _Separate] = {
    "softmax": softmax,
    "sparsemax": sparsemax,
    "entmax15": entmax15,
    "argmax": argmax,
    "identity": identity,
    "exponential": exponential,
}
SEPARATIONS = (*_PLAIN, "entmax", "polynomial")


class Separation(nn.Module):
    """A separation by name, with the parameter that ``"entmax"`` learns.

    Args:
        name: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax"`` (learned alpha between 1 and 2, 1.5 at the
            start), ``"argmax"``, ``"identity"``, ``"polynomial"`` or ``"exponential"``.
        num_heads: ``H`` for an alpha per head against scores ``(..., H, L, S)``; ``None`` for one alpha.
        degree: the power of ``"polynomial"``.

    Raises:
        AHopError: an unknown name, or a degree below 1.

    >>> Separation("sparsemax")(torch.tensor([[2.0, 0.0], [-torch.inf, -torch.inf]]))
    tensor([[1., 0.],
            [0., 0.]])
    """

    def __init__(self, name: str = "softmax", num_heads: int | None = None, degree: int = 3) -> None:
        super().__init__()
        check_choice("separation", name, SEPARATIONS)
        check_sizes(degree=degree)
        self.name, self.degree = name, degree
        shape = () if num_heads is None else (num_heads, 1, 1)
        self.alpha_logit = nn.Parameter(torch.zeros(shape)) if name == "entmax" else None

    def reset_parameters(self) -> None:
        """Set the learned alpha back to 1.5."""
        if self.alpha_logit is not None:
            nn.init.zeros_(self.alpha_logit)

    @property
    def alpha(self) -> Tensor | float:
        """The member of the entmax family: 1 for softmax, 2 for sparsemax; for a separation outside it, an error."""
        if self.alpha_logit is not None:
            # Below 1.01 the power 1 / (alpha - 1) leaves float32; softmax is the limit.
            return 1 + self.alpha_logit.sigmoid().clamp(min=0.01)
        known = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}
        check_choice("separation", self.name, (*known, "entmax"))
        return known[self.name]

    def forward(self, scores: Tensor, masked: bool = True) -> Tensor:
        """Weigh ``scores (..., [H,] L, S)``; ``masked=False`` skips the care for rows that are all ``-inf``."""
        if self.alpha_logit is not None:
            return entmax(scores, self.alpha, masked=masked)
        if self.name == "polynomial":
            return polynomial(scores, self.degree, masked=masked)
        return _PLAIN[self.name](scores, masked=masked)

    def extra_repr(self) -> str:
        """Give the constructor back."""
        return f"{self.name!r}" + (f", degree={self.degree}" if self.name == "polynomial" else "")
