"""Associative memories at the edges of their domain: scales, dtypes, sizes, and kinds of arguments."""

import pytest
import torch

from ahop_layers.memory.memory import AssociativeMemory


def noisy_pairs(patterns, n, std=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(patterns), (n,), generator=generator)
    return index, patterns[index] + std * torch.randn(n, patterns.shape[1], generator=generator).to(patterns)


def test_fit_does_not_depend_on_the_scale_if_the_initial_scores_do_not_help():
    patterns = torch.randn(60, 16)
    index, query = noisy_pairs(-patterns, 400)  # the dot product of a query is smallest for its own pattern
    memories = [AssociativeMemory.preset("A-Hop", patterns * scale) for scale in (1.0, 2.0**-10, 2.0**10)]
    for memory, scale in zip(memories, (1.0, 2.0**-10, 2.0**10), strict=True):
        memory.fit((index, query * scale), epochs=2, batch=128, progress=False)
        assert memory.beta.item() * scale**2 == pytest.approx(memories[0].beta.item(), rel=1e-3)
        found = (memory.recall(query * scale) == memories[0].recall(query)).double().mean()
        assert found > 0.99
