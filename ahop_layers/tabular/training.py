"""Training of the tabular network: batches, one optimiser, one schedule, and the best epoch on held-out rows."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.tabular.network import CaseNetwork, apply_in_chunks
from ahop_layers.training import rise_and_fall


class Examples(NamedTuple):
    """Rows ``(n, features)``, their targets ``(n,)`` and weights ``(n,)``."""

    rows: Tensor
    target: Tensor
    weight: Tensor


class Schedule(NamedTuple):
    """How long and how fast to learn."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int | None


Loss = Callable[[Tensor, Tensor], Tensor]
Report = Callable[[int, float, float | None], None]


def log_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Of ``outputs (n, classes)``, class ``target (n,)``: ``(n,)``."""
    return functional.cross_entropy(outputs, target, reduction="none")


def squared_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Squared error of the probabilities from ``outputs (n, classes)``, class ``target (n,)``: ``(n,)``."""
    return (outputs.softmax(-1) - functional.one_hot(target, outputs.shape[1])).square().sum(-1)


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Of ``outputs (n, 1)``, ``target (n,)``: ``(n,)``."""
    return (outputs[:, 0] - target).square()


def absolute_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Of ``outputs (n, 1)``, ``target (n,)``: ``(n,)``."""
    return (outputs[:, 0] - target).abs()


def train(
    network: CaseNetwork, examples: Examples, held_out: Examples | None, loss: Loss, schedule: Schedule, report: Report
) -> list[float]:
    """Train with AdamW and keep the epoch with the least loss on the held-out rows, where there are any.

    Args:
        network: on the device of the examples; left in evaluation mode.
        examples: to learn from.
        held_out: never learned from.
        loss: from outputs and targets to a loss for each row.
        schedule: the learning rate rises over a tenth of all steps, then falls to zero along half a cosine.
        report: called after each epoch with its number, the loss while learning and the held-out loss.

    Returns:
        The held-out loss after each epoch, or the loss while learning without held-out rows.
    """
    steps = schedule.max_epochs * math.ceil(len(examples.rows) / schedule.batch_size)
    history: list[float] = []
    best = None
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step, steps))
    for epoch in range(1, schedule.max_epochs + 1):
        network.train()
        total = torch.zeros((), device=examples.rows.device)
        for batch in _batches(examples, schedule.batch_size):
            value = (loss(network(batch.rows), batch.target) * batch.weight).mean()
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
            rate.step()
            total += value.detach() * len(batch.rows)
        learned = total.item() / len(examples.rows)
        judged = None if held_out is None else mean_loss(network, held_out, loss)
        report(epoch, learned, judged)
        history.append(learned if judged is None else judged)
        if judged is None:
            continue
        if judged <= min(history):
            best = copy.deepcopy(network.state_dict())
        if schedule.patience is not None and epoch - 1 - history.index(min(history)) >= schedule.patience:
            break
    if best is not None:
        network.load_state_dict(best)
    network.eval()
    return history


@torch.no_grad()
def mean_loss(network: CaseNetwork, examples: Examples, loss: Loss) -> float:
    """The weighted mean loss of the network at rest."""
    outputs = apply_in_chunks(network.eval(), examples.rows)
    return ((loss(outputs, examples.target) * examples.weight).sum() / examples.weight.sum()).item()


def _batches(examples: Examples, size: int) -> Iterator[Examples]:
    device = examples.rows.device
    for index in torch.split(torch.randperm(len(examples.rows), device=device), size):
        yield Examples(*(part[index] for part in examples))
