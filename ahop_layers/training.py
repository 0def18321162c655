"""Training: parameter groups, folded weights, the learning-rate schedule, and the loop that trains a memory."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ahop_layers.errors import AHopError, check_module, check_numbers
from ahop_layers.ops.reference import BASES, fold, unfold
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.associator import named_similarities, similarity_parameters

EVALUATIONS = 10
"""Number of evaluations on the held-out queries during training."""

FORM_UNITS, FORM_STEPS = {"original0": 20.0, "original1": 1.0}, 40
"""Units of folded and unfolded weights, up to so many steps. With more, they fall with the root of the number."""

FORM_EPS = 0.3
"""Adam's eps of the weights of a base, the sum over ranks and heads, in their units. See :func:`_groups`."""


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
    exempt: list[str] = []
    if weight_decay and hasattr(type(model), "no_weight_decay"):
        own: Any = model
        patterns = own.no_weight_decay()
        exempt = [
            name
            for name, parameter in rest.items()
            if parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
    decayed = [parameter for name, parameter in rest.items() if name not in exempt]
    groups: list[dict[str, Any]] = [{"params": decayed, "lr": lr, "weight_decay": weight_decay}]
    if similarity:
        groups.append({"params": similarity, "lr": lr if similarity_lr is None else similarity_lr, "weight_decay": 0.0})
    if exempt:
        groups.append({"params": [rest[name] for name in exempt], "lr": lr, "weight_decay": 0.0})
    return groups


class _Folded(nn.Module):
    """Parametrizes ``w`` by the folded weight, plus ``scale`` times an unfolded one on request, in units of bases."""

    def __init__(self, units: Tensor, scale: float, and_unfolded: bool) -> None:
        super().__init__()
        self.units, self.scale, self.and_unfolded = units, scale, and_unfolded

    def forward(self, folded: Tensor, *unfolded: Tensor) -> Tensor:
        weight = unfold(folded)
        return self.units * (weight + self.scale * unfolded[0] if unfolded else weight)

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        folded = fold(weight / self.units)
        return (folded, torch.zeros_like(weight)) if self.and_unfolded else folded


def _degree(base: str) -> float:
    """Returns the power of the scale of query and key with which a base similarity grows."""
    if BASES[base].saturates:  # its width grows with the data
        return 0.0
    small, large = (BASES[base].value(torch.tensor(unit), torch.tensor(3.0 * unit)).item() for unit in (1.0, 2.0))
    return math.log2(large / small) if small * large > 0 else 2.0


def base_units(part: AdaptiveSimilarity, scale: float) -> Tensor:
    """Returns the unit of the weights of each base, ``(n_bases,)``.

    In these units all bases grow with the same power of the scale of the data: that of the base that ``init`` names,
    whose unit is 1, else the largest.
    """
    degrees = [0.0 if part.blocks.normalize else _degree(name) for name in part.names]
    named = isinstance(part.init, str) and part.init in part.bases
    reference = degrees[part.bases.index(part.init)] if named else max(degrees)
    return torch.tensor([scale ** (reference - degree) for degree in degrees])


def _scale(part: AdaptiveSimilarity) -> float:
    """Returns a factor that limits the effect of a step on all of ``w`` to that of a footprint of 64 dimensions.

    The step changes n folded weights in proportion to n; the sums they multiply grow with d / n unless normalized.
    """
    n = part.w.shape[-1]
    return min(1.0, 64**2 / (n * (n if part.blocks.normalize else part.dim)))


@contextmanager
def folded_weights(module: nn.Module, scale: float = 1.0, and_unfolded: bool = False) -> Iterator[None]:
    """Trains the folded weights of every adaptive similarity in ``module`` instead of ``w`` and ``beta``.

    A step on an entry of the folded weight ``u``, the reverse cumulative sum of ``beta * w``, changes the weight of one
    rank, a step on ``w`` those of many. Entering and leaving the context does not change the scores. Steps have the
    same effect for data of any ``scale``.

    If ``and_unfolded``, the weights are the sum of folded and unfolded ones. Noisy queries need small steps, masked
    queries without noise need weights in the thousands: Adam, with its fixed step size, reaches both with this sum.
    """
    trained = []
    for part in [each for each in named_similarities(module).values() if isinstance(each, AdaptiveSimilarity)]:
        weight, factor = part.w, part.beta
        if weight.requires_grad:
            trained.append((part, weight, factor.requires_grad))
            with torch.no_grad():
                weight.mul_(factor.unsqueeze(-1))
                factor.fill_(1.0)
            factor.requires_grad_(False)
            units = base_units(part, scale).to(weight).unsqueeze(-1)
            parametrize.register_parametrization(part, "w", _Folded(units, _scale(part), and_unfolded))
    try:
        yield
    finally:
        for part, weight, trains_beta in trained:
            parametrize.remove_parametrizations(part, "w")
            with torch.no_grad():
                weight.copy_(part.w)
            part.w = weight  # the same parameter object as before, which an optimizer may reference
            part.beta.requires_grad_(trains_beta)


def warmup_cosine(step: int, count: int) -> float:
    """Returns the learning-rate factor of a step: linear warmup over a tenth of the steps, then cosine decay."""
    warmup = count // 10
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, count - warmup)))


class Batches(NamedTuple):
    """The number of steps, an iterator over the batch of each step, and held-out batches."""

    steps: int
    draws: Iterator[Any]
    held_out: Sequence[tuple[Tensor, Tensor]] = ()


def minimize(
    module: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Batches,
    lr: float,
    progress: bool,
    average: Callable[[Sequence[Tensor]], None],
    units: Sequence[tuple[Tensor | None, float]] = (),
    scale: float = 1.0,
) -> tuple[Tensor, float, float]:
    """Trains the parameters of a module: one step of Adam per batch.

    The learning rate rises for a tenth of the steps, then falls to zero. If the batches have held-out queries, the
    parameters are those with the smallest loss on them. ``units`` are parameters and the size of a unit of each; the
    learning rate is in these units. Others have the unit 1. ``scale`` is that of the data, see
    :func:`folded_weights`. ``average`` averages gradients over ranks.

    Returns:
        The loss of every step ``(steps,)``, and the first and the smallest loss on the held-out queries.
    """
    check_numbers("a positive number", lr=lr)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise AHopError("the memory must have trainable parameters, got none in its similarity, modulation and prior")
    losses = []
    with torch.enable_grad(), folded_weights(module, scale, and_unfolded=True):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if lr > torch.finfo(parameters[0].dtype).max / 16:  # Adam divides by 1 - 0.9 in the first step
            raise AHopError(f"lr must be within the range of {parameters[0].dtype}, got {lr!r}")
        optimizer = torch.optim.Adam(_groups(module, lr, units, batches.steps), lr=lr, fused=parameters[0].is_cuda)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, batches.steps))
        first = best = mean_loss(loss, batches.held_out)
        kept = [parameter.detach().clone() for parameter in parameters]
        bar: Any = batches.draws
        if progress and importlib.util.find_spec("tqdm") is not None:
            bar = importlib.import_module("tqdm").tqdm(bar, total=batches.steps, desc="fit", unit="step")
        for step, batch in enumerate(bar):
            value = loss(batch)
            optimizer.zero_grad()
            torch.autograd.backward(value)
            average(parameters)
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
            due = (step + 1) * EVALUATIONS // batches.steps > step * EVALUATIONS // batches.steps
            if due and batches.held_out and (now := mean_loss(loss, batches.held_out)) < best:
                best, kept = now, [parameter.detach().clone() for parameter in parameters]
            if step % max(1, batches.steps // 20) == 0:
                _check_finite([value], step, lr)
                if hasattr(bar, "set_postfix"):
                    bar.set_postfix(loss=f"{value.item():.3f}")
        history = torch.stack(losses)
        _check_finite([history, *parameters], len(losses) - 1, lr)
        if batches.held_out:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data.copy_(value)
    return history, first, best


def _groups(
    module: nn.Module, lr: float, units: Sequence[tuple[Tensor | None, float]], steps: int
) -> list[dict[str, Any]]:
    """Returns a parameter group of Adam for each trained parameter, with its learning rate and ``eps``.

    Adam takes full steps along any gradient larger than ``eps``. If nearly all queries are right, gradients are small
    and noisy, and full steps would undo that. A larger ``eps`` for the weights makes such steps small. As gradients are
    inversely proportional to the unit, so is ``eps``. It is divided by the number of ranks and of heads, which share
    the gradient of a query. Few steps must be large; many large ones overfit.
    """
    known = {id(parameter): unit for parameter, unit in units}
    groups = []
    for path, parameter in module.named_parameters():
        if parameter.requires_grad:
            name, eps = path.rpartition(".")[2], 1e-8
            unit = known.get(id(parameter), 1.0)
            if name in FORM_UNITS:
                unit = FORM_UNITS[name] * min(1.0, math.sqrt(FORM_STEPS / steps))
                eps = FORM_EPS * parameter.shape[-2] / parameter.numel()
            rate = min(lr * unit, torch.finfo(parameter.dtype).max / 16)
            groups.append({"params": [parameter], "lr": rate, "eps": eps / unit})
    return groups


@torch.no_grad()
def mean_loss(loss: Callable[[Any], Tensor], batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Returns the mean loss of the queries of all batches."""
    count = sum(len(target) for target, _ in batches)
    return sum(len(batch[0]) / count * loss(batch).item() for batch in batches)


def _check_finite(tensors: list[Tensor], step: int, lr: float) -> None:
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        got = f"NaN or infinity by step {step} with lr={lr!r}"
        raise AHopError(f"loss and parameters must stay finite, got {got}: use a smaller lr")
