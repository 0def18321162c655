"""Fitting: batches, one optimiser and one schedule for all memories.

On a GPU no step waits for the device: the generator lives there, and losses are read a few times in all.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_floating, check_sizes, describe
from ahop_layers.training import rise_and_fall, trainable_forms
from ahop_layers.variants import Mixed

Pairs = tuple[Tensor, Tensor]


class Batches(NamedTuple):
    """How many steps there are, and what each of them sees."""

    steps: int
    draws: Iterator[Any]


def retrieval_batches(data: object, patterns: Tensor, epochs: int, batch: int, generator: torch.Generator) -> Batches:
    """Batches of ``(index, query)``: a fresh draw of a variant each epoch, or given pairs, all of them each epoch.

    Raises:
        AHopError: ``data`` is neither, or does not fit the patterns.
    """
    check_sizes(epochs=epochs, batch=batch)
    if isinstance(data, Mixed):
        return Batches(epochs, (data.sample(patterns, batch, generator) for _ in range(epochs)))
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise AHopError(f"data must be a variant or a pair (index, query), got {type(data).__name__}")
    index, query = data
    check_floating(query=query)
    index = torch.as_tensor(index, device=query.device)
    if index.ndim != 1 or query.shape != (len(index), patterns.shape[1]) or not len(index):
        raise AHopError(
            f"data must be index (n,) and query (n, d) with d = {patterns.shape[1]} and n >= 1,"
            f" got {describe(index)} and {describe(query)}"
        )
    whole = not index.is_floating_point() and index.dtype != torch.bool
    if not whole or not 0 <= int(index.min()) <= int(index.max()) < len(patterns):
        got = f"{index.dtype} from {index.min().item()} to {index.max().item()}"
        raise AHopError(f"the index must be whole numbers from 0 to {len(patterns) - 1}, got {got}")
    index = index.long()

    def shuffled() -> Iterator[Pairs]:
        for _ in range(epochs):
            order = torch.randperm(len(index), generator=generator, device=generator.device).to(index.device)
            for rows in torch.split(order, batch):
                yield index[rows], query[rows]

    return Batches(epochs * math.ceil(len(index) / batch), shuffled())


@torch.no_grad()
def start_bias(bias: Tensor, data: Mixed | Pairs, patterns: Tensor, batch: int, generator: torch.Generator) -> None:
    """Set a bias ``(d,)`` that is still zero to the least-squares fit of ``query = a * pattern + bias``.

    ``a`` is one number: masking and noise shrink what is left of a pattern, but do not move its mean. Gradients find
    the bias too, but slowly, and until then the other weights learn to live with a wrong one.
    """
    if bias.any():
        return
    index, query = data.sample(patterns, 8 * batch, generator) if isinstance(data, Mixed) else data
    origin = patterns[index]
    centre, spread = origin.mean(0), origin - origin.mean(0)
    slope = (spread * query).sum() / spread.square().sum().clamp(min=torch.finfo(spread.dtype).tiny)
    bias.copy_(query.mean(0) - slope * centre)


def separation_batches(patterns: Tensor, epochs: int, batch: int, generator: torch.Generator) -> Batches:
    """``batch`` of the patterns, drawn anew each epoch."""
    check_sizes(epochs=epochs, batch=batch)

    def drawn() -> Iterator[Tensor]:
        for _ in range(epochs):
            yield patterns[torch.randperm(len(patterns), generator=generator, device=patterns.device)[:batch]]

    return Batches(epochs, drawn())


def minimise(module: nn.Module, loss: Callable[[Any], Tensor], batches: Batches, lr: float, progress: bool) -> Tensor:
    """Take a step of Adam for each batch, with a rate that rises for a tenth of the steps and then falls to zero.

    Returns:
        The loss of every step ``(steps,)``.

    Raises:
        AHopError: there is nothing to learn, or ``lr`` is not positive.
    """
    if not lr > 0:
        raise AHopError(f"lr must be positive, got {lr!r}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise AHopError("this memory has nothing to learn: its similarity, modulation and prior have no parameters")
    losses = []
    with torch.enable_grad(), trainable_forms(module):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=lr, fused=parameters[0].is_cuda)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step, batches.steps))
        bar = _bar(batches, progress)
        for step, batch in enumerate(bar):
            value = loss(batch)
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
            if hasattr(bar, "set_postfix") and step % max(1, batches.steps // 20) == 0:
                bar.set_postfix(loss=f"{value.item():.3f}")
    return torch.stack(losses)


def _bar(batches: Batches, progress: bool) -> Iterable[Any]:
    """The batches, behind a progress bar where one is wanted and tqdm is installed."""
    if not progress or importlib.util.find_spec("tqdm") is None:
        return batches.draws
    bar: Iterable[Any] = importlib.import_module("tqdm").tqdm(
        batches.draws, total=batches.steps, desc="fit", unit="step"
    )
    return bar
