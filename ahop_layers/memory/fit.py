"""Training of associative memories: optimizer, learning-rate schedule and choice of the best parameters.

Training synchronizes with a GPU only a few times: about every twentieth loss is read.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_numbers
from ahop_layers.memory.batches import Batches, Pairs
from ahop_layers.memory.shards import Shard
from ahop_layers.training import trainable_forms, warmup_cosine

EVALUATIONS = 10
"""Number of evaluations on the held-out queries during training."""

FORM_UNITS = {"original0": 20.0, "original1": 1.0}
"""Units of folded and of unfolded weights, by their names in :func:`ahop_layers.training.trainable_forms`."""

FORM_STEPS = 40
"""Number of steps up to which the weights have these units. With more steps, units fall with the root of the number."""

FORM_EPS = 0.3
"""Adam's eps of the weights of a base, the sum over ranks and heads, in their units. See :func:`_groups`."""


class Fitted(NamedTuple):
    """The loss of every step ``(steps,)``, and the first and the best loss on the held-out queries."""

    losses: Tensor
    first: float = math.inf
    best: float = -math.inf


def minimize(
    module: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Batches,
    lr: float,
    progress: bool,
    *,
    units: Sequence[tuple[Tensor | None, float]] = (),
    scale: float = 1.0,
    shard: Shard | None = None,
) -> Fitted:
    """Take one Adam step per batch. The learning rate rises for a tenth of the steps, then falls to zero.

    If the batches have held-out queries, the parameters are those with the smallest loss on them.

    Args:
        module: the module whose parameters are trained.
        loss: computes the loss of a batch.
        batches: the batches of all steps.
        lr: learning rate.
        progress: whether to show a progress bar.
        units: parameters and the size of a unit of each; the learning rate is in these units. Others have the unit 1.
        scale: scale of the data, for :func:`ahop_layers.training.trainable_forms`.
        shard: averages gradients over the ranks of a sharded memory; None for a memory on one rank.

    Raises:
        AHopError: there are no trainable parameters, ``lr`` is not a positive number, or the loss or a parameter is not
            finite.
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
        best = _Best(loss, batches.held_out, parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, batches.steps))
        bar = _bar(batches, progress)
        for step, batch in enumerate(bar):
            value = loss(batch)
            optimizer.zero_grad()
            torch.autograd.backward(value)
            if shard is not None:
                shard.average_gradients(parameters)
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
            if (step + 1) * EVALUATIONS // batches.steps > step * EVALUATIONS // batches.steps:
                best.evaluate()
            if step % max(1, batches.steps // 20) == 0:
                _check_finite([value], step, lr)
                if hasattr(bar, "set_postfix"):
                    bar.set_postfix(loss=f"{value.item():.3f}")
        history = torch.stack(losses)
        _check_finite([history, *parameters], len(losses) - 1, lr)
        best.restore()
    return Fitted(history, best.first, best.loss)


def _groups(
    module: nn.Module, lr: float, units: Sequence[tuple[Tensor | None, float]], steps: int
) -> list[dict[str, Any]]:
    """Returns a parameter group of Adam for each trained parameter, with its learning rate and ``eps``.

    Adam takes full steps along any gradient larger than ``eps``. If nearly all queries are right, gradients are small
    and noisy, and full steps would undo that. A larger ``eps`` for the weights makes such steps small. As gradients are
    inversely proportional to the unit, so is ``eps``. It is divided by the number of ranks and of heads, because heads
    share the gradient of a query; separate weights for each pattern are heads. Few steps must be large; many large
    ones overfit.
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
    """The mean loss of the queries of all batches."""
    count = sum(len(target) for target, _ in batches)
    return sum(len(batch[0]) / count * loss(batch).item() for batch in batches)


class _Best:
    """Keeps the parameters with the smallest loss on held-out queries. Without such queries it does nothing."""

    def __init__(self, loss: Callable[[Any], Tensor], held_out: Sequence[Pairs], parameters: Sequence[Tensor]) -> None:
        self._measure, self._held_out, self._parameters = loss, held_out, parameters
        self._values: list[Tensor] = []
        self.loss = math.inf
        self.evaluate()
        self.first = self.loss

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute the loss on the held-out queries, and copy the parameters if it is the smallest so far."""
        if not self._held_out:
            return
        loss = mean_loss(self._measure, self._held_out)
        if loss < self.loss:
            self.loss, self._values = loss, [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the parameters to those of the smallest loss."""
        for parameter, value in zip(self._parameters, self._values, strict=False):
            parameter.copy_(value)


def _check_finite(tensors: list[Tensor], step: int, lr: float) -> None:
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        raise AHopError(
            f"loss and parameters must stay finite, got NaN or infinity by step {step} with lr={lr!r}: use a smaller lr"
        )


def _bar(batches: Batches, progress: bool) -> Iterable[Any]:
    """The batches, with a progress bar if requested and tqdm is installed."""
    if not progress or importlib.util.find_spec("tqdm") is None:
        return batches.draws
    bar: Iterable[Any] = importlib.import_module("tqdm").tqdm(
        batches.draws, total=batches.steps, desc="fit", unit="step"
    )
    return bar
