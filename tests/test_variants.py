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
from ahop_layers.variants import (
    Biased,
    Brightened,
    Custom,
    DroppedChannels,
    Erased,
    Masked,
    Mixed,
    Noisy,
    Occluded,
    Replaced,
    SaltAndPepper,
    bayes_accuracy,
    retrieval_accuracy,
    retrieval_error,
)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


CORRUPTIONS = {
    "mixed": Mixed((0.1, 0.6), bias=(0.1, 0.5), std=(0.1, 0.3)),
    "noisy": Noisy(std=(0.1, 0.4)),
    "replaced": Replaced((0.1, 0.6), 0.0, 1.0),
    "erased": Erased((0.1, 0.9), value=(-1.0, 1.0)),
    "salt and pepper": SaltAndPepper((0.1, 0.9), 0.0, 1.0),
    "occluded": Occluded((0.1, 0.7), 4, 6, channels=2, value=(0.0, 1.0)),
    "brightened": Brightened((-0.5, 0.5), (0.5, 2.0)),
    "dropped": DroppedChannels((0.2, 0.8), channels=6),
    "custom": Custom(lambda origin, generator: origin + torch.empty_like(origin).normal_(generator=generator)),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_corruptions_keep_shape_and_dtype_and_depend_on_the_generator_alone(name, dtype):
    variant, origin = CORRUPTIONS[name], uniform(12, 48).to(dtype)
    before = origin.clone()
    first, second, other = (variant.corrupt(origin, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert first.shape == origin.shape
    assert first.dtype == dtype
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(origin, before)
    index, query = variant.sample(origin, 7, torch.Generator().manual_seed(0))
    assert index.shape == (7,)
    assert query.shape == (7, 48)
    assert variant.sample(origin, 0)[1].shape == (0, 48)
    assert variant.corrupt(origin.reshape(3, 4, 48)).shape == (3, 4, 48)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_corruptions_stay_on_the_device_of_the_patterns(name, device):
    assert CORRUPTIONS[name].corrupt(torch.zeros(5, 48, device=device)).device.type == device


def test_erased_dimensions_have_the_value_at_uniform_positions():
    query = Erased(0.3, value=7.0).corrupt(torch.zeros(4000, 10))
    assert set(query.unique().tolist()) == {0.0, 7.0}
    assert ((query == 7).sum(-1) == 3).all()
    assert torch.allclose((query == 7).double().mean(0), torch.tensor(0.3, dtype=torch.float64), atol=0.05)
    assert torch.equal(Erased(0.0).corrupt(query), query)
    assert not Erased(1.0).corrupt(query).any()


def test_salt_and_pepper_are_equally_frequent():
    query = SaltAndPepper(0.5, low=-3.0, high=2.0).corrupt(torch.zeros(2000, 20))
    assert ((query != 0).sum(-1) == 10).all()
    assert set(query.unique().tolist()) == {-3.0, 0.0, 2.0}
    assert ((query == 2).double().mean() / 0.5).item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("share", "sides"), [(0.25, (3, 4)), (0.0, (0, 0)), (1.0, (6, 8)), (0.5, (4, 6))])
def test_an_occluded_block_is_a_rectangle_in_all_channels(share, sides):
    query = Occluded(share, height=6, width=8, channels=3).corrupt(torch.ones(500, 3 * 6 * 8)).reshape(500, 3, 6, 8)
    covered = query == 0
    assert torch.equal(covered, covered[:, :1].expand(-1, 3, -1, -1))
    rows, columns = covered[:, 0].any(-1), covered[:, 0].any(-2)
    assert torch.equal(covered[:, 0], rows[:, :, None] & columns[:, None, :])
    for side, inside, size in zip(sides, (rows, columns), (6, 8), strict=True):
        assert (inside.sum(-1) == side).all()
        assert ((inside[:, 1:].int() - inside[:, :-1].int()).abs().sum(-1) <= 2).all()  # consecutive
        if 0 < side < size:
            assert len(inside.unique(dim=0)) == size - side + 1  # every position occurs


def test_brightness_is_one_gain_and_shift_for_each_query():
    origin = uniform(300, 8, dtype=torch.float64)
    query = Brightened((-0.5, 0.5), (0.5, 2.0)).corrupt(origin)
    gain = (query[:, 1] - query[:, 0]) / (origin[:, 1] - origin[:, 0])
    shift = query[:, 0] - gain * origin[:, 0]
    torch.testing.assert_close(query, gain[:, None] * origin + shift[:, None])
    for drawn, low, high in ((gain, 0.5, 2.0), (shift, -0.5, 0.5)):
        assert low - 1e-9 <= drawn.min() < low + 0.1
        assert high - 0.1 < drawn.max() <= high + 1e-9
    torch.testing.assert_close(Brightened(0.5).corrupt(origin), origin + 0.5)


def test_dropped_channels_are_dropped_completely():
    query = DroppedChannels(0.5, channels=5, value=2.0).corrupt(torch.zeros(1000, 15)).reshape(1000, 5, 3)
    dropped = (query == 2).all(-1)
    assert torch.equal(dropped, (query == 2).any(-1))
    assert (dropped.sum(-1) == 2).all()
    assert torch.allclose(dropped.double().mean(0), torch.tensor(0.4, dtype=torch.float64), atol=0.06)


def test_every_query_draws_its_own_level():
    shares = (Erased((0.2, 0.6)).corrupt(torch.ones(4000, 100)) == 0).double().mean(-1)
    assert shares.min() >= 0.2 - 1e-9
    assert shares.max() <= 0.6
    assert shares.mean().item() == pytest.approx(0.395, abs=0.01)  # rounded down to hundredths
    assert shares.std().item() == pytest.approx(0.4 / 12**0.5, rel=0.05)
    deviations = Noisy(std=(0.5, 1.5)).corrupt(torch.zeros(2000, 2000)).std(-1)
    assert deviations.mean().item() == pytest.approx(1.0, abs=0.03)
    assert 0.45 < deviations.min() < 0.55
    assert 1.45 < deviations.max() < 1.6
    squares = Noisy((0.5, 1.5)).corrupt(torch.zeros(2000, 2000)).var(-1)
    assert squares.mean().item() == pytest.approx(1.0, abs=0.03)  # uniform in the variance
    biases = Biased((0.2, 0.4), seed=2).corrupt(torch.zeros(500, 6))
    assert torch.equal(biases.sign(), Biased(1.0, seed=2).shift(biases).expand(500, -1))
    assert biases.abs().std(-1).max() < 1e-6
    assert 0.2 <= biases.abs().min() < 0.22
    assert 0.38 < biases.abs().max() <= 0.4
    values = Erased(1.0, value=(2.0, 3.0)).corrupt(torch.zeros(50, 4))
    assert (values == values[:, :1]).all()
    assert len(values.unique()) > 40


def test_a_standard_deviation_is_the_root_of_the_variance():
    origin = uniform(20, 8)
    by_variance, by_deviation = (
        variant.corrupt(origin, torch.Generator().manual_seed(1)) for variant in (Noisy(0.25), Noisy(std=0.5))
    )
    assert torch.equal(by_variance, by_deviation)
    variance, deviation = Mixed(0.3, 0.25, 0.2), Mixed(0.3, std=0.5, bias=0.2)
    assert torch.equal(variance.log_likelihood(origin + 0.1, origin), deviation.log_likelihood(origin + 0.1, origin))


def test_masked_is_the_older_name_of_replaced():
    pattern, generators = torch.ones(5, 16), [torch.Generator().manual_seed(0) for _ in range(2)]
    old, new = (kind(0.5).corrupt(pattern, each) for kind, each in zip((Masked, Replaced), generators, strict=True))
    assert isinstance(Masked(0.5), Replaced)
    assert torch.equal(old, new)
    query = Replaced(0.5, low=2.0, high=3.0).corrupt(torch.zeros(100, 8))
    assert ((query >= 2) & (query <= 3)).sum(-1).eq(4).all()


def test_the_likelihood_uses_the_range_of_the_replaced_values():
    variant = Replaced(1.0, low=0.0, high=4.0)
    inside, outside = variant.log_likelihood(torch.tensor([[1.0, 3.0], [1.0, -0.5]]), torch.zeros(2)).exp()
    assert inside.item() == pytest.approx(1 / 16)
    assert outside == 0
    assert bayes_accuracy(Replaced(0.25, 0.0, 4.0), uniform(50, 16), 200) == 1.0


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_memory_is_fitted_to_any_variant(name):
    memory = AssociativeMemory.preset("A-Hop", uniform(20, 48), debias=True)
    losses = memory.fit(CORRUPTIONS[name], epochs=3, batch=16, progress=False)
    assert losses.isfinite().all()


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
        (lambda: Noisy(), "either noise or std must be given, got noise=None and std=None"),
        (lambda: Noisy(0.1, std=0.1), "either noise or std must be given, got noise=0.1 and std=0.1"),
        (lambda: Noisy(std=-0.1), "std must be a number of at least 0, got -0.1"),
        (lambda: Mixed(noise=0.1, std=0.1), "noise must be 0 if std is given, got noise=0.1 and std=0.1"),
        (lambda: Replaced(0.1, 1.0, 1.0), "low must be below high, got 1.0 and 1.0"),
        (lambda: Replaced(0.1, float("nan")), "low must be a finite number, got nan"),
        (lambda: Erased(1.5), "share must be a number between 0 and 1, got 1.5"),
        (lambda: Erased((0.5, 1.5)), "share must be a number between 0 and 1, got 1.5"),
        (lambda: Erased((0.5, 0.2)), r"share must be a range \(low, high\) with low <= high, got \(0.5, 0.2\)"),
        (lambda: Erased((0.5,)), r"share must be a number between 0 and 1 or a range \(low, high\), got \(0.5,\)"),
        (lambda: Erased(0.5, value="a"), "value must be a finite number, got 'a'"),
        (lambda: SaltAndPepper(-1), "share must be a number between 0 and 1, got -1"),
        (lambda: SaltAndPepper(0.5, 2.0, 1.0), "low must be below high, got 2.0 and 1.0"),
        (lambda: Occluded(2, 4, 4), "share must be a number between 0 and 1, got 2"),
        (lambda: Occluded(0.5, 0, 4), "height must be an integer of at least 1, got 0"),
        (lambda: Occluded(0.5, 4, 4).corrupt(torch.zeros(2, 15)), r"= \(n, 16\), got \(2, 15\)"),
        (lambda: Brightened(gain=float("inf")), "gain must be a finite number, got inf"),
        (lambda: DroppedChannels(0.5, 0), "channels must be an integer of at least 1, got 0"),
        (lambda: DroppedChannels(0.5, 4).corrupt(torch.zeros(2, 15)), r"d a multiple of 4, got \(2, 15\)"),
        (lambda: Custom(3), "function must be callable, got 3"),
        (lambda: Custom(lambda x, _: x[:1]).corrupt(torch.zeros(2, 3)), r"return a tensor \(2, 3\).*got \(1, 3\)"),
        (lambda: Custom(lambda x, _: None).corrupt(torch.zeros(2, 3)), "query must be a tensor, got NoneType"),
        (lambda: bayes_accuracy(Erased(0.5), torch.zeros(3, 2)), "variant must be a Mixed, .* got Erased"),
        (lambda: bayes_accuracy(Replaced((0, 1)), torch.zeros(3, 2)), r"mask must be a number .* got the range \(0, 1"),
        (lambda: Noisy((0.1, 0.2)).variance, "noise must be a number"),
        (lambda: Noisy(std=(0.1, 0.2)).variance, "std must be a number"),
        (lambda: Biased((0.1, 0.2)).shift(torch.zeros(1, 2)), "bias must be a number"),
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
