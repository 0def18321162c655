"""Batches of queries for the training of associative memories.

Random numbers are drawn on the device of the patterns, because copies to a GPU synchronize with it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import (
    AHopError,
    check_floating,
    check_same_device,
    check_sizes,
    describe,
    has_unknown,
)
from ahop_layers.memory.shards import Rows
from ahop_layers.variants import Variant

Pairs = tuple[Tensor, Tensor]
"""Indices or labels ``(n,)``, and the queries ``(n, d)`` that belong to them."""

HELD_OUT = 512
"""Largest number of queries that are held out of training."""

HELD_OUT_SHARE = 0.1
"""Fraction of the given pairs that are held out."""

EVALUATED = 128
"""Number of held-out queries that are evaluated at once, if a batch is not larger."""


class Batches(NamedTuple):
    """The number of steps, an iterator over the batch of each step, and held-out batches."""

    steps: int
    draws: Iterator[Any]
    held_out: Sequence[Pairs] = ()


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """A random generator on ``device``.

    Its numbers differ from those of a generator with the seed ``seed``: patterns drawn with that seed would otherwise
    be the values that replace dimensions of the first queries.

    Raises:
        AHopError: ``seed`` is not an integer of 64 bits.
    """
    try:
        return torch.Generator(device).manual_seed(seed ^ 0x5851F42D4C957F2D)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise AHopError(f"seed must be an integer of 64 bits, got {seed!r}") from error


def retrieval_batches(data: object, patterns: Rows, epochs: int, batch: int, generator: torch.Generator) -> Batches:
    """Batches of ``(index, query)``: one random batch of a variant per epoch, or all of the given pairs per epoch.

    Of given pairs, a tenth is held out. A tenth of fewer than 320 pairs is too small an estimate, so all of them are
    used for training and for evaluation.

    Raises:
        AHopError: ``data`` is neither a variant nor a pair, or does not match the patterns.
    """
    check_sizes(epochs=epochs, batch=batch)
    epochs, batch = int(epochs), int(batch)  # PyTorch does not accept all integers of NumPy
    if isinstance(data, Variant):
        data = data.bind(patterns) if isinstance(patterns, Tensor) else data
        fresh = sample_pairs(data, patterns, HELD_OUT, generator)
        draws = (sample_pairs(data, patterns, batch, generator) for _ in range(epochs))
        return Batches(epochs, draws, _split(fresh, batch))
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise AHopError(f"data must be a variant or a pair (index, query), got {type(data).__name__}")
    index, query = check_pairs(data[0], data[1], patterns)
    size = min(int(HELD_OUT_SHARE * len(index)), HELD_OUT)
    mixed = torch.randperm(len(index), generator=generator, device=generator.device)
    held_out, kept = (mixed[:size], mixed[size:]) if size >= 32 else (mixed[:HELD_OUT], mixed)
    count = math.ceil(len(kept) / batch)

    def shuffled() -> Iterator[Pairs]:
        for _ in range(epochs):
            order = torch.randperm(len(kept), generator=generator, device=generator.device)
            for rows in torch.tensor_split(kept[order], count):  # of equal size: a small batch has a noisy gradient
                yield index[rows], query[rows]

    return Batches(epochs * count, shuffled(), _split((index[held_out], query[held_out]), batch))


def separation_batches(patterns: Rows, epochs: int, batch: int, generator: torch.Generator) -> Batches:
    """One batch per epoch: ``batch`` random patterns without replacement."""
    check_sizes(epochs=epochs, batch=batch)
    epochs, batch = int(epochs), int(batch)  # PyTorch does not accept all integers of NumPy

    def drawn() -> Iterator[Tensor]:
        for _ in range(epochs):
            yield patterns[torch.randperm(len(patterns), generator=generator, device=patterns.device)[:batch]]

    return Batches(epochs, drawn())


def sample_pairs(variant: Variant, patterns: Rows, n: int, generator: torch.Generator) -> Pairs:
    """Draws ``n`` queries as :meth:`ahop_layers.variants.Variant.sample`, the same on all ranks of a sharded memory."""
    if isinstance(patterns, Tensor):
        return variant.sample(patterns, n, generator)
    index = torch.randint(len(patterns), (n,), generator=generator, device=patterns.device)
    return index, variant.corrupt(patterns[index], generator)


def _split(pairs: Pairs, batch: int) -> list[Pairs]:
    """Splits pairs into batches, so that an evaluation needs little more memory than a step."""
    return list(zip(*(torch.split(each, max(batch, EVALUATED)) for each in pairs), strict=True))


def check_pairs(index: object, query: Tensor, patterns: Rows) -> Pairs:
    """Returns pairs as tensors; raises unless they fit the patterns. NaN is an unknown value."""
    check_floating(query=query)
    check_same_device(query=query, patterns=patterns)
    try:
        place = torch.as_tensor(index, device=query.device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise AHopError(f"index must be integers (n,), got {type(index).__name__}") from error
    if place.ndim != 1 or query.shape != (len(place), patterns.shape[1]) or not len(place):
        raise AHopError(
            f"data must be index (n,) and query (n, d) with d = {patterns.shape[1]} and n >= 1,"
            f" got {describe(place)} and {describe(query)}"
        )
    integers = not (place.is_floating_point() or place.is_complex() or place.dtype == torch.bool)
    if not integers or not 0 <= int(place.min()) <= int(place.max()) < len(patterns):
        got = f"{place.dtype} from {place.min().item()} to {place.max().item()}" if integers else f"{place.dtype}"
        raise AHopError(f"index must be integers from 0 to {len(patterns) - 1}, got {got}")
    has_unknown(query=query)
    return place.long(), query
