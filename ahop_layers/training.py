"""Training: parameter groups, folded weights, and the learning-rate curve."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ahop_layers.ops.reference import fold
from ahop_layers.similarity import AdaptiveSimilarity, named_similarities, similarity_parameters


def parameter_groups(
    model: nn.Module, lr: float | Tensor, similarity_lr: float | Tensor | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Split the parameters of a model into groups for an optimizer: the similarities, and the rest.

    Weight decay does not act on the similarities: it would pull every score towards zero.

    Args:
        model: a model with adaptive layers inside, or without.
        lr: learning rate.
        similarity_lr: learning rate of the similarities; None for the same.
        weight_decay: weight decay of the rest.

    Returns:
        One group for the rest and, where the model has similarities, one for them.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-3, similarity_lr=1e-4, weight_decay=0.05))
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.001, 0.05), (0.0001, 0.0)]
    """
    learned = similarity_parameters(model)
    known = {id(parameter) for parameter in learned}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": lr, "weight_decay": weight_decay}]
    if learned:
        groups.append({"params": learned, "lr": lr if similarity_lr is None else similarity_lr, "weight_decay": 0.0})
    return groups


class _Folded(nn.Module):
    """``w`` as a function of the folded weight ``u``, of which it is the difference."""

    def forward(self, folded: Tensor) -> Tensor:
        return folded - torch.nn.functional.pad(folded[..., 1:], (0, 1))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return fold(weight)


class _FoldedAndPlain(nn.Module):
    """``w`` as the sum of two: the difference of a folded weight, and a weight as it is."""

    def forward(self, folded: Tensor, weight: Tensor) -> Tensor:
        # A step on all of w moves a score by the square of the dimensions; beyond 64 no further than at 64.
        scale = min(1.0, (64 / weight.shape[-1]) ** 2)
        return folded - torch.nn.functional.pad(folded[..., 1:], (0, 1)) + scale * weight

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fold(weight), torch.zeros_like(weight)


def folded_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Train the folded weights of every adaptive similarity in ``module``, in place of ``w`` and ``beta``.

    The score is linear in the folded weight ``u``, the reverse cumulative sum of ``beta * w``. A step on one entry of
    ``u`` is fine: it weighs one similarity. A step on one of ``w`` is far: ``u`` accumulates it. Inside the context
    ``beta`` is 1 and rests; the scores are the same functions before, within and after.
    """
    return _reparametrised(module, _Folded)


def trainable_forms(module: nn.Module) -> AbstractContextManager[None]:
    """As :func:`folded_weights`, with ``w`` trained beside ``u``: the score weighs the sum of both.

    Noise asks for fine steps, but masks without noise for weights in the thousands. With both forms an optimiser whose
    steps have a given size can make either.
    """
    return _reparametrised(module, _FoldedAndPlain)


@contextmanager
def _reparametrised(module: nn.Module, form: type[nn.Module]) -> Iterator[None]:
    found = named_similarities(module).values()
    adaptive = [part for part in found if isinstance(part, AdaptiveSimilarity) and part.w.requires_grad]
    kept = [(part, part.w, part.beta.requires_grad) for part in adaptive]
    for part in adaptive:
        with torch.no_grad():
            part.w.mul_(part.beta.unsqueeze(-1))
            part.beta.fill_(1.0)
        part.beta.requires_grad_(False)
        parametrize.register_parametrization(part, "w", form())
    try:
        yield
    finally:
        for part, weight, learns in kept:
            parametrize.remove_parametrizations(part, "w")
            with torch.no_grad():
                weight.copy_(part.w)
            part.w = weight  # the same object as before, which others may hold
            part.beta.requires_grad_(learns)


def rise_and_fall(step: int, count: int) -> float:
    """The share of the learning rate at a step: a line up, half a cosine down."""
    rise = count // 10
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, count - rise)))
