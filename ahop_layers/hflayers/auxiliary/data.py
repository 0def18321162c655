"""``hflayers.auxiliary.data``: synthetic data sets; a seed draws the same data as in hopfield-layers."""

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from ahop_layers.errors import AHopError, check_sizes


class _Samples(Dataset[dict[str, Tensor]]):
    """Samples and targets in memory; an item is a dictionary with ``data`` and ``target``."""

    _data: Tensor
    _targets: Tensor
    _dtype: torch.dtype

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, item_index: int) -> dict[str, Tensor]:
        return {"data": self._data[item_index].to(self._dtype), "target": self._targets[item_index].to(self._dtype)}

    @property
    def targets(self) -> Tensor:
        """A copy of all targets."""
        return self._targets.clone()


def _bits(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape)


class BitPatternSet(_Samples):
    """Bags of bit patterns; only the bags of one class contain signals.

    Args:
        num_bags, num_instances: number of bags, and of patterns in each.
        num_signals, num_signals_per_bag: number of different signals, and how many a bag of the class contains.
        fraction_targets: fraction of bags with signals.
        num_bits: size of a pattern.
        dtype: of the items.
        seed_signals, seed_data: seeds of the signals, and of all else.

    >>> bags = BitPatternSet(num_bags=8, num_instances=4, num_signals=2)
    >>> len(bags), bags[0]["data"].shape, bags[0]["target"]
    (8, torch.Size([4, 8]), tensor(1.))
    """

    def __init__(
        self, num_bags: int, num_instances: int, num_signals: int, num_signals_per_bag: int = 1,
        fraction_targets: float = 0.5, num_bits: int = 8, dtype: torch.dtype = torch.float32, seed_signals: int = 43,
        seed_data: int = 44,
    ) -> None:  # fmt: skip
        check_sizes(num_bags=num_bags, num_instances=num_instances, num_signals=num_signals, num_bits=num_bits)
        if not 0 <= num_signals_per_bag <= num_instances:
            raise AHopError(f"num_signals_per_bag must be between 0 and {num_instances}, got {num_signals_per_bag}")
        if not 0 < fraction_targets < 1:
            raise AHopError(f"fraction_targets must be between 0 and 1, got {fraction_targets}")
        if num_signals >= 2**num_bits - 1:
            raise AHopError(f"num_signals must be less than 2**num_bits - 1 = {2**num_bits - 1}, got {num_signals}")
        self.num_bags, self.num_instances, self.num_bits = num_bags, num_instances, num_bits
        self.num_signals, self.num_signals_per_bag, self._dtype = num_signals, num_signals_per_bag, dtype
        self.num_targets_high = min(num_bags, max(1, ceil(num_bags * fraction_targets)))
        self.num_targets_low = num_bags - self.num_targets_high
        torch.manual_seed(seed_signals)
        self._signals = self._draw_signals()
        torch.manual_seed(seed_data)
        self._data = self._draw_bags()
        self._targets = (torch.arange(num_bags) < self.num_targets_high).long()

    def _draw_signals(self) -> Tensor:
        """Draws different patterns, none of which is zero."""
        drawn = _bits(0, self.num_bits)
        while (missing := self.num_signals - len(drawn)) > 0:
            drawn = torch.unique(torch.cat([drawn, _bits(missing, self.num_bits)]), dim=0)
            drawn = drawn[drawn.any(1)]
        return drawn

    def _draw_bags(self) -> Tensor:
        """Draws patterns that are neither zero nor a signal, then replaces some of the class by signals."""
        bags = _bits(self.num_bags, self.num_instances, self.num_bits)
        excluded = torch.cat([self._signals, torch.zeros_like(self._signals[:1])])
        while (invalid := (bags.unsqueeze(2) == excluded).all(-1).any(-1)).any():
            bags[invalid] = _bits(int(invalid.sum()), self.num_bits)
        for bag in bags[: self.num_targets_high]:
            places: list[int] = []
            while len(places) < self.num_signals_per_bag:
                place = int(torch.randint(self.num_instances, (1,)))
                if place not in places:
                    places.append(place)
                    bag[place] = self._signals[int(torch.randint(len(self._signals), (1,)))]
        return bags

    @property
    def bags(self) -> Tensor:
        """A copy of all bags."""
        return self._data.clone()

    @property
    def signals(self) -> Tensor:
        """A copy of the signals."""
        return self._signals.clone()


class LatchSequenceSet(_Samples):
    """Sequences of one-hot characters; the first character is the class.

    Args:
        num_samples, num_instances, num_characters: number of sequences, their length, and of different characters.
        dtype: of the items.
        seed: seed of the data.

    >>> sequences = LatchSequenceSet(num_samples=8)
    >>> sequences[0]["data"].shape, sequences[0]["target"].shape
    (torch.Size([20, 6]), torch.Size([]))
    """

    def __init__(
        self, num_samples: int, num_instances: int = 20, num_characters: int = 6, dtype: torch.dtype = torch.float32,
        seed: int = 43,
    ) -> None:  # fmt: skip
        check_sizes(num_samples=num_samples, num_instances=num_instances, num_characters=num_characters)
        self.num_samples, self.num_instances, self.num_characters = num_samples, num_instances, num_characters
        self.initial_seed, self._dtype = seed, dtype
        torch.manual_seed(seed)
        characters = torch.randint(2, num_characters, (num_samples, num_instances))
        self._targets = torch.randint(0, 2, (num_samples,))
        characters[:, 0] = self._targets
        self._data = functional.one_hot(characters, num_characters)
