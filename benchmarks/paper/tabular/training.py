"""Training of the network of the paper: batches, optimizer, schedule, and the best epoch on held-out rows."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError
from benchmarks.paper.tabular.network import CaseNetwork
from benchmarks.paper.tabular.rows import Examples, apply_in_chunks
from benchmarks.paper.training import warmup_cosine

# The mean loss of fewer held-out rows is too noisy to choose an epoch by.
MIN_HELD_OUT = 10


class Schedule(NamedTuple):
    """Hyperparameters of the optimization."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int


Loss = Callable[[Tensor, Tensor], Tensor]


def log_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of ``outputs (n, classes)`` and class ``target (n,)``: ``(n,)``."""
    return functional.cross_entropy(outputs, target, reduction="none")


def squared_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Squared error of the class probabilities, for ``outputs (n, classes)`` and class ``target (n,)``: ``(n,)``."""
    return (outputs.softmax(-1) - functional.one_hot(target, outputs.shape[1])).square().sum(-1)


LOSSES: dict[str, Loss] = {"log": log_loss, "squared": squared_loss}


def hold_out(target: np.ndarray, fraction: float, random: np.random.RandomState) -> np.ndarray:
    """Draws the indices of a fraction of the rows, stratified by class."""
    count = int(len(target) * fraction)
    if count < MIN_HELD_OUT:
        return np.array([], dtype=np.int64)
    order = random.permutation(len(target))
    order = order[np.argsort(target[order], kind="stable")]
    return order[((np.arange(count) + 0.5) / fraction).astype(np.int64)]


def train(
    network: CaseNetwork,
    examples: Examples,
    held_out: Examples | None,
    loss: Loss,
    schedule: Schedule,
    generator: torch.Generator,
) -> list[float]:
    """Trains with AdamW. With held-out rows, restores the epoch with the smallest held-out loss.

    Args:
        network: on the device of the examples.
        examples: training rows.
        held_out: validation rows, if any.
        loss: from outputs and targets to one loss per row.
        schedule: the learning rate rises for the first tenth of the steps, then falls to zero along half a cosine.
        generator: draws the batches and the dropout masks, on the device of the examples.

    Returns:
        The held-out loss after each epoch; without held-out rows, the training loss.

    Raises:
        AHopError: the training loss is not finite.
    """
    steps = schedule.max_epochs * math.ceil(len(examples.rows) / schedule.batch_size)
    history: list[float] = []
    best = None
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    for epoch in range(1, schedule.max_epochs + 1):
        total = torch.zeros((), device=examples.rows.device)
        for batch in _batches(examples, schedule.batch_size, generator):
            value = (loss(network(batch.rows, generator), batch.target) * batch.weight).mean()
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
            rate.step()
            total += value.detach() * len(batch.rows)
        learned = total.item() / len(examples.rows)
        judged = None if held_out is None else mean_loss(network, held_out, loss)
        history.append(learned if judged is None else judged)
        if not (math.isfinite(learned) and math.isfinite(history[-1])):
            raise AHopError(
                f"the loss must stay finite, got {learned} in epoch {epoch} and {history[-1]} after it,"
                f" with learning_rate={schedule.learning_rate!r}: use a smaller one"
            )
        if judged is None:
            continue
        if judged <= min(history):
            best = copy.deepcopy(network.state_dict())
        if epoch - 1 - history.index(min(history)) >= schedule.patience:
            break
    if best is not None:
        network.load_state_dict(best)
    return history


@torch.no_grad()
def mean_loss(network: CaseNetwork, examples: Examples, loss: Loss) -> float:
    """The weighted mean loss without dropout."""
    outputs = apply_in_chunks(network, examples.rows)
    return ((loss(outputs, examples.target) * examples.weight).sum() / examples.weight.sum()).item()


def _batches(examples: Examples, size: int, generator: torch.Generator) -> Iterator[Examples]:
    order = torch.randperm(len(examples.rows), generator=generator, device=generator.device)
    for index in torch.split(order, size):
        yield examples.take(index)
