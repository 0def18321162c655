"""Distributions of variants, and the Bayes limit of every memory."""

from itertools import combinations
from math import comb, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahop_layers import variants
from ahop_layers.errors import AHopError
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.variants import Biased, Masked, Mixed, Noisy, bayes_accuracy, retrieval_accuracy, retrieval_error


def uniform(n, d, seed=0, dtype=torch.float32):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


def brute_force(variant, query, origin, bias_known):
    """log p(query | origin) as a sum over every mask and every choice of signs."""
    d, count = len(query), variant.masked_count(len(query))
    if bias_known:
        shifts = [variant.shift(query)]
    else:
        shifts = [
            variant.bias * torch.tensor(s, dtype=query.dtype)
            for s in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * d).tolist()
        ]
    total = 0.0
    normal = torch.distributions.Normal(origin, variant.noise**0.5)
    for shift in shifts:
        value = query - shift
        kept, replaced = normal.log_prob(value).exp(), 0.5 * (value.abs() <= 1)
        for masked in combinations(range(d), count):
            inside = torch.tensor([i in masked for i in range(d)])
            total += torch.where(inside, replaced, kept).prod().item()
    return log(total / comb(d, count) / len(shifts))


@pytest.mark.parametrize("bias_known", [True, False])
@pytest.mark.parametrize(
    ("mask", "noise", "bias"), [(0.4, 0.3, 0.5), (0.0, 0.3, 0.5), (1.0, 0.3, 0.2), (0.7, 0.05, 0.0)]
)
def test_the_likelihood_equals_brute_force(mask, noise, bias, bias_known):
    variant, patterns = Mixed(mask, noise, bias, seed=3), uniform(4, 5, dtype=torch.float64)
    index, query = variant.sample(patterns, 6)
    for row, origin in zip(query, patterns[index], strict=True):
        exact = brute_force(variant, row, origin, bias_known)
        assert variant.log_likelihood(row, origin, bias_known=bias_known).item() == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("bias_known", [True, False])
def test_the_shortlist_never_misses_the_most_likely_pattern(bias_known):
    variant, patterns = Mixed(0.5, 0.4, 0.4), uniform(60, 12)
    query = variant.sample(patterns, 200)[1]
    every = variant.log_likelihood(query[:, None], patterns[None], bias_known=bias_known)
    assert torch.equal(variant.most_likely(query, patterns, bias_known=bias_known), every.argmax(-1))


@pytest.mark.parametrize("d", [1, 7, 64, 100])
def test_mixed_variants_follow_the_definition_of_the_paper(d):
    variant, patterns = Mixed(mask=0.29, noise=0.0, bias=0.5, seed=1), uniform(20, d)
    index, query = variant.sample(patterns, 300)
    changed = ((query - variant.shift(patterns) - patterns[index]).abs() > 1e-5).sum(-1)
    assert (changed == int(0.29 * d + 1e-9)).all()  # 29 of 100: in floating point 0.29 * 100 is below 29
    assert (query - variant.shift(patterns)).abs().max() <= 1 + 1e-6
    assert set(variant.shift(patterns).abs().tolist()) == {0.5}


def test_noise_has_the_variance_it_is_given_and_masks_are_uniform():
    query = Noisy(0.4).sample(torch.zeros(1, 64), 4000)[1]
    assert query.var().item() == pytest.approx(0.4, rel=0.02)
    query = Masked(0.5).sample(torch.full((1, 64), 3.0), 4000)[1]
    replaced = query != 3.0
    assert (replaced.sum(-1) == 32).all()
    assert torch.allclose(replaced.double().mean(0), torch.tensor(0.5, dtype=torch.float64), atol=0.04)
    assert query[replaced].var().item() == pytest.approx(1 / 3, rel=0.02)


def test_signs_depend_on_the_seed_of_the_variant_alone():
    patterns = uniform(5, 32)
    one, same, other = Biased(0.3, seed=1), Biased(0.3, seed=1), Biased(0.3, seed=2)
    assert torch.equal(one.shift(patterns), same.shift(patterns))
    assert not torch.equal(one.shift(patterns), other.shift(patterns))
    index, query = one.sample(patterns, 50)
    torch.testing.assert_close(query - patterns[index], one.shift(patterns).expand(50, -1))


def test_samples_with_equal_generators_are_equal():
    patterns, variant = uniform(30, 16), Mixed(0.4, 0.4, 0.4)
    first, second, other = (variant.sample(patterns, 20, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], other[1])


@given(st.floats(0, 0.9), st.floats(0, 1.0), st.floats(0, 1.0), st.sampled_from(["M-Hop", "U-Hop", "A-Hop"]))
@settings(max_examples=25, deadline=None)
def test_no_memory_exceeds_the_bayes_limit(mask, noise, bias, name):
    """Compares expected accuracies on the same queries, with a tolerance of five standard errors."""
    variant, patterns = Mixed(mask, noise, bias), uniform(40, 8)
    index, query = variant.sample(patterns, 400, torch.Generator().manual_seed(0))
    memory = AssociativeMemory.preset(name, patterns)
    limit = (variant.most_likely(query, patterns) == index).double()
    found = (memory.recall(query) == index).double()
    difference = found - limit
    assert difference.mean() <= 5 * difference.std() / 400**0.5 + 1e-12


def test_knowing_the_bias_never_hurts():
    variant, patterns = Mixed(0.4, 0.4, 0.6), uniform(100, 24)
    known, guessed = (
        bayes_accuracy(variant, patterns, 500, torch.Generator().manual_seed(1), bias_known=known)
        for known in (True, False)
    )
    assert known > guessed + 0.1


def test_without_corruption_every_pattern_is_found():
    patterns = uniform(100, 16)
    for variant in (Noisy(0.0), Masked(0.25), Biased(0.7), Mixed(0.5, 0.0, 0.5)):
        assert bayes_accuracy(variant, patterns, 200) == 1.0


def test_accuracy_is_that_of_the_retrieved_pattern():
    """The scores of this memory identify each pattern, but it retrieves a mean, which is nearest to the third one."""
    patterns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.4, 0.4]])
    memory = AssociativeMemory(patterns, lambda query, key: 0.01 * query @ key.T)
    index = torch.tensor([0, 1])
    assert torch.equal(memory.recall(patterns[:2]), index)
    assert retrieval_accuracy(memory, index, patterns[:2]) == 0.0
    assert retrieval_accuracy(memory, torch.tensor([2, 2]), patterns[:2]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_accuracy_with_an_offset_and_in_half_precision(dtype):
    patterns = torch.randn(200, 16).to(dtype) + (10_000 if dtype == torch.float32 else 0)
    memory = AssociativeMemory(patterns, "dis", "argmax")
    assert retrieval_accuracy(memory, torch.arange(200), patterns) == 1.0


def test_accuracy_does_not_depend_on_the_block_size(monkeypatch):
    memory, index = AssociativeMemory(uniform(30, 4)), torch.arange(30)
    whole = retrieval_accuracy(memory, index, memory.patterns)
    monkeypatch.setattr(variants, "BLOCK_DISTANCES", 50)
    assert 0 < retrieval_accuracy(memory, index, memory.patterns) == whole


def test_accuracy_and_error_of_known_memories():
    patterns = torch.eye(4)
    memory = AssociativeMemory(patterns, separation="argmax")
    index = torch.tensor([0, 1, 2, 2])
    query = patterns[[0, 1, 2, 3]]
    assert retrieval_accuracy(memory, index, query) == 0.75
    assert retrieval_error(memory, index, query) == pytest.approx(2 / 4 / 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Masked(1.5), "mask must be a number between 0 and 1, got 1.5"),
        (lambda: Masked("a"), "mask must be a number between 0 and 1, got 'a'"),
        (lambda: Masked(None), "mask must be a number between 0 and 1, got None"),
        (lambda: Noisy(-1.0), "noise must be a number of at least 0, got -1.0"),
        (lambda: Noisy(float("inf")), "noise must be a number of at least 0, got inf"),
        (lambda: Noisy(10**400), "noise must be a number of at least 0, got 1000"),
        (lambda: Noisy(torch.ones(2)), "noise must be a number of at least 0, got tensor"),
        (lambda: Mixed(bias=float("nan")), "bias must be a number of at least 0, got nan"),
        (lambda: Biased(float("inf")), "bias must be a number of at least 0, got inf"),
        (lambda: Biased(0.5, seed="a"), "seed must be an integer, got 'a'"),
        (lambda: Biased(0.5, seed=0.5), "seed must be an integer, got 0.5"),
        (lambda: Noisy(0.1).sample(torch.zeros(3, 2), "a"), "n must be an integer of at least 0, got 'a'"),
        (lambda: Noisy(0.1).sample(torch.zeros(3, 2), -1), "n must be an integer of at least 0, got -1"),
        (lambda: bayes_accuracy(Noisy(0.1), torch.zeros(3, 2), 2.5), "n must be an integer of at least 0, got 2.5"),
        (lambda: Noisy(0.1).sample(None, 2), "patterns must be a tensor, got NoneType"),
        (lambda: Noisy(0.1).sample(torch.zeros(3), 2), r"patterns must be \(N, d\) with N, d >= 1, got \(3,\)"),
        (lambda: Noisy(0.1).sample(torch.zeros(3, 2).long(), 2), "patterns must have a floating-point dtype"),
    ],
)
def test_errors(make, message):
    with pytest.raises(AHopError, match=message):
        make()
