"""Sorting networks sort every input."""

from itertools import product

import pytest
import torch

from ahop_layers.ops.gpu.networks import bitonic_merge, sorting_network


def run(size: int, values: torch.Tensor, network=sorting_network) -> torch.Tensor:
    """Applies the network along the first axis."""
    rows = list(values)
    for low, high in network(size).comparators:
        rows[low], rows[high] = torch.minimum(rows[low], rows[high]), torch.maximum(rows[low], rows[high])
    return torch.stack(rows)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_sorts_every_0_1_sequence(size):
    """By the 0-1 principle, a network that sorts these sorts every input."""
    sequences = torch.tensor(list(product((0, 1), repeat=size)), dtype=torch.int8).T
    assert (run(size, sequences).diff(dim=0) >= 0).all()


@pytest.mark.parametrize("size", [17, 64, 784, 1023])
def test_sorts_random_sequences(size):
    values = torch.randn(size, 64)
    assert torch.equal(run(size, values), values.sort(dim=0).values)


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 1), (4, 5), (8, 19), (16, 63), (64, 543)])
def test_number_of_comparators_is_batchers(size, count):
    assert len(sorting_network(size).comparators) == count


@pytest.mark.parametrize("size", [1, 2, 3, 8, 25, 64])
def test_merge_sorts_every_bitonic_0_1_sequence(size):
    """The bitonic 0-1 sequences are the rotations of a block of ones."""
    blocks = torch.tensor([[position < ones for position in range(size)] for ones in range(size + 1)]).int()
    sequences = torch.cat([blocks.roll(shift, dims=1) for shift in range(size)]).T
    assert (run(size, sequences, bitonic_merge).diff(dim=0) >= 0).all()
