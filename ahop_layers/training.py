"""Training: parameter groups, folded weights, and the learning-rate schedule."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ahop_layers.errors import check_module
from ahop_layers.ops.reference import BASES, fold
from ahop_layers.similarity import AdaptiveSimilarity, named_similarities, similarity_parameters


def parameter_groups(
    model: nn.Module, lr: float | Tensor, similarity_lr: float | Tensor | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Splits the parameters of a model into optimizer groups: similarity parameters, and all others.

    Similarity parameters have no weight decay, because it would shrink all scores towards zero. If the model has some,
    their group is the second. The class of a model may have ``no_weight_decay()``, as those of timm do: the parameters
    that it names, biases and vectors are then in a last group without weight decay, as in ``timm.optim``.

    Args:
        model: any model, with or without adaptive layers.
        lr, similarity_lr: learning rate, and that of the similarity parameters; None means ``lr``.
        weight_decay: weight decay of all other parameters.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-3, similarity_lr=1e-4, weight_decay=0.05))
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.001, 0.05), (0.0001, 0.0)]
    """
    check_module(model=model)
    similarity = similarity_parameters(model)
    known = {id(parameter) for parameter in similarity}
    rest = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in known}
    exempt = _exempt(model, rest) if weight_decay and hasattr(type(model), "no_weight_decay") else []
    decayed = [parameter for name, parameter in rest.items() if name not in exempt]
    groups: list[dict[str, Any]] = [{"params": decayed, "lr": lr, "weight_decay": weight_decay}]
    if similarity:
        groups.append({"params": similarity, "lr": lr if similarity_lr is None else similarity_lr, "weight_decay": 0.0})
    if exempt:
        groups.append({"params": [rest[name] for name in exempt], "lr": lr, "weight_decay": 0.0})
    return groups


def _exempt(model: Any, parameters: dict[str, nn.Parameter]) -> list[str]:
    """Returns the names of those parameters that timm exempts from weight decay."""
    patterns = model.no_weight_decay()
    return [
        name
        for name, parameter in parameters.items()
        if parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


class _Folded(nn.Module):
    """Parametrizes ``w`` by the folded weight, whose differences it is, and on request by a second, unfolded weight.

    The weights are the sum of both, in units of each base. ``scale`` is the unit of the unfolded weight.
    """

    def __init__(self, units: Tensor, scale: float, and_unfolded: bool) -> None:
        super().__init__()
        self.units, self.scale, self.and_unfolded = units, scale, and_unfolded

    def forward(self, folded: Tensor, *unfolded: Tensor) -> Tensor:
        weight = folded - torch.nn.functional.pad(folded[..., 1:], (0, 1))
        return self.units * (weight + self.scale * unfolded[0] if unfolded else weight)

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        folded = fold(weight / self.units)
        return (folded, torch.zeros_like(weight)) if self.and_unfolded else folded


def folded_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Trains the folded weights of every adaptive similarity in ``module`` instead of ``w`` and ``beta``.

    A step on an entry of the folded weight ``u``, the reverse cumulative sum of ``beta * w``, changes the weight of one
    rank, a step on ``w`` those of many. Entering and leaving the context does not change the scores.
    """
    return _reparametrized(module)


def trainable_forms(module: nn.Module, scale: float = 1.0) -> AbstractContextManager[None]:
    """Trains folded and unfolded weights together: the weights are the sum of both.

    Noisy queries need small steps, masked queries without noise need weights in the thousands: Adam, with its fixed
    step size, reaches both with two parametrizations. Steps have the same effect for data of any ``scale``.
    """
    return _reparametrized(module, scale, and_unfolded=True)


def _degree(base: str) -> float:
    """Returns the power of the scale of query and key with which a base similarity grows."""
    if BASES[base].saturates:  # its width grows with the data
        return 0.0
    small, large = (BASES[base].value(torch.tensor(unit), torch.tensor(3.0 * unit)).item() for unit in (1.0, 2.0))
    return math.log2(large / small) if small * large > 0 else 2.0


def base_units(part: AdaptiveSimilarity, scale: float) -> list[Tensor]:
    """Returns the unit of the weights of each base, ``(n_bases,)`` for each resolution.

    In these units all bases grow with the same power of the scale of the data: that of the base that ``init`` names in
    the first resolution, whose unit is 1, else the largest.
    """
    degrees = [[0.0 if blocks.normalize else _degree(name) for name in part.names] for blocks in part.blocks]
    named = isinstance(part.init, str) and part.init in part.bases
    reference = degrees[0][part.bases.index(part.init)] if named else max(map(max, degrees))
    return [torch.tensor([scale ** (reference - degree) for degree in each]) for each in degrees]


def _scale(part: AdaptiveSimilarity, resolution: int) -> float:
    """Returns a factor that limits the effect of a step on all of ``w`` to that of a footprint of 64 dimensions.

    The step changes n folded weights in proportion to n; the sums they multiply grow with d / n unless normalized.
    """
    blocks = part.blocks[resolution]
    n = blocks.count(part.dim)
    return min(1.0, 64**2 / (n * (n if blocks.normalize else part.dim)))


@contextmanager
def _reparametrized(module: nn.Module, data_scale: float = 1.0, and_unfolded: bool = False) -> Iterator[None]:
    """Trains the weights of every adaptive similarity through a parametrization inside the context."""
    trained = []
    for part in [each for each in named_similarities(module).values() if isinstance(each, AdaptiveSimilarity)]:
        for resolution, (w, beta) in enumerate(part.parameter_names()):
            weight, factor = getattr(part, w), getattr(part, beta)
            if weight.requires_grad:
                trained.append((part, w, weight, factor, factor.requires_grad))
                with torch.no_grad():
                    weight.mul_(factor.unsqueeze(-1))
                    factor.fill_(1.0)
                factor.requires_grad_(False)
                units = base_units(part, data_scale)[resolution].to(weight).unsqueeze(-1)
                form = _Folded(units, _scale(part, resolution), and_unfolded)
                parametrize.register_parametrization(part, w, form)
    try:
        yield
    finally:
        for part, w, weight, factor, trains_beta in trained:
            parametrize.remove_parametrizations(part, w)
            with torch.no_grad():
                weight.copy_(getattr(part, w))
            setattr(part, w, weight)  # the same parameter object as before, which an optimizer may reference
            factor.requires_grad_(trains_beta)


def warmup_cosine(step: int, count: int) -> float:
    """Returns the learning-rate factor of a step: linear warmup over a tenth of the steps, then cosine decay."""
    warmup = count // 10
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, count - warmup)))
