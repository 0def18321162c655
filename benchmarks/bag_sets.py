"""Labeled bags of instances, and bags of digits. ``benchmarks/bags.py`` reads published data sets."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ahop_layers.memory.variants import Replaced


class BagSet(NamedTuple):
    """A data set of n bags."""

    names: list[str]
    labels: Tensor  # (n,), 0 or 1
    features: int  # of an instance
    read: Callable[[int], Tensor]  # returns the instances of a bag by its index, (size, features)
    test: Sequence[int] | None = None  # indices of the test bags, if the data set defines them
    splits: Tensor | None = None  # (repeats, folds, n): True for the training bags of a fold, if published
    stored: Tensor | None = None  # clean instances (N, features) that are in no bag, for a lookup


def bags_of_digits(
    digits: Tensor,  # (n, pixels)
    classes: np.ndarray,  # (n,)
    held: int,  # number of digits that only test bags hold
    counts: tuple[int, int],  # number of training and of test bags
    generator: np.random.Generator,
    stored: int = 0,  # number of other digits, in no bag, for a lookup
) -> BagSet:
    """Draws bags of about ten handwritten digits; label 1: the bag holds a nine. Training and test share no digit."""
    order = generator.permutation(len(digits))
    pools = [(order[held + stored :], counts[0]), (order[:held], counts[1])]
    bags, labels = [], []
    for pool, count in pools:
        nines, others = pool[classes[pool] == 9], pool[classes[pool] != 9]
        for number in range(count):
            size = max(2, round(generator.normal(10, 2)))
            shown = number % 2 * min(generator.integers(1, 3), size)  # every second bag has one or two nines
            chosen = np.concatenate([generator.choice(nines, shown), generator.choice(others, size - shown)])
            bags.append(digits[generator.permutation(chosen)])
            labels.append(float(shown > 0))
    names, test = [f"bag {number}" for number in range(len(bags))], range(counts[0], sum(counts))
    clean = digits[order[held : held + stored]]
    return BagSet(names, torch.tensor(labels), digits.shape[1], bags.__getitem__, test, stored=clean)


def damage_bags(data: BagSet, share: float, seed: int = 0) -> BagSet:
    """Replaces a fraction of the pixels of every instance by uniform values. Seed and bag determine the values."""
    variant = Replaced(share, low=0.0, high=1.0)

    def read(number: int) -> Tensor:
        return variant(data.read(number), torch.Generator().manual_seed(100_000 * seed + number))

    return data._replace(read=read)
