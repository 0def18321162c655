"""Training by gradients: Adam with a unit for each parameter, and the parameters that are best for held-out data."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_numbers
from ahop_layers.learning.questions import Pairs
from ahop_layers.training import trainable_forms, warmup_cosine

EVALUATIONS = 10
"""Number of evaluations on the held-out queries during training."""

FORM_UNITS, FORM_STEPS = {"original0": 20.0, "original1": 1.0}, 40
"""Units of the weights of trainable forms, up to so many steps. With more, they fall with the root of the number."""

FORM_EPS = 0.3
"""Adam's eps of the weights of a base, the sum over ranks and heads, in their units. See :func:`_groups`."""


class Batches(NamedTuple):
    """The number of steps, an iterator over the batch of each step, and held-out batches."""

    steps: int
    draws: Iterator[Any]
    held_out: Sequence[Pairs] = ()


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
    :func:`ahop_layers.training.trainable_forms`. ``average`` averages gradients over ranks.

    Returns:
        The loss of every step ``(steps,)``, and the first and the smallest loss on the held-out queries.
    """
    check_numbers("a positive number", lr=lr)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise AHopError("the memory must have trainable parameters, got none in its similarity, modulation and prior")
    losses = []
    with torch.enable_grad(), trainable_forms(module, scale):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if lr > torch.finfo(parameters[0].dtype).max / 16:  # Adam divides by 1 - 0.9 in the first step
            raise AHopError(f"lr must be within the range of {parameters[0].dtype}, got {lr!r}")
        optimizer = torch.optim.Adam(_groups(module, lr, units, batches.steps), lr=lr, fused=parameters[0].is_cuda)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, batches.steps))
        first = best = mean_loss(loss, batches.held_out)
        kept = [parameter.detach().clone() for parameter in parameters]
        bar = _bar(batches, progress)
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
def mean_loss(loss: Callable[[Any], Tensor], batches: Sequence[Pairs]) -> float:
    """Returns the mean loss of the queries of all batches."""
    count = sum(len(target) for target, _ in batches)
    return sum(len(batch[0]) / count * loss(batch).item() for batch in batches)


def _check_finite(tensors: list[Tensor], step: int, lr: float) -> None:
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        got = f"NaN or infinity by step {step} with lr={lr!r}"
        raise AHopError(f"loss and parameters must stay finite, got {got}: use a smaller lr")


def _bar(batches: Batches, progress: bool) -> Any:
    """Returns the batches, with a progress bar if requested and tqdm is installed."""
    if not progress or importlib.util.find_spec("tqdm") is None:
        return batches.draws
    return importlib.import_module("tqdm").tqdm(batches.draws, total=batches.steps, desc="fit", unit="step")
