"""Distributions of variants, their ranges, compositions and arguments."""

import numpy as np
import pytest
import torch
from torch import nn

from ahop_layers.errors import AHopError
from ahop_layers.memory import AssociativeMemory
from ahop_layers.memory import variants as v
from benchmarks.damages import Occluded


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def uniform(n, d, dtype=torch.float32):
    return torch.rand(n, d, generator=seeded(0), dtype=dtype) * 2 - 1


DAMAGES = {
    "mixed": v.Mixed((0.1, 0.6), (0.01, 0.1), (0.1, 0.5)),
    "noisy": v.Noisy(std=(0.1, 0.4)),
    "replaced": v.Replaced((0.1, 0.6), 0.0, 1.0),
    "replaced, range of the patterns": v.Replaced((0.1, 0.6)),
    "missing": v.Missing((0.1, 0.9)),
    "custom": v.as_damage(lambda origin, generator: origin + torch.empty_like(origin).normal_(generator=generator)),
    "composed": v.as_damage([v.Noisy(0.1), v.Replaced(0.3), lambda x: x + torch.randn(x.shape).to(x)]),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_variants_keep_shape_dtype_and_device_and_depend_on_the_generator_alone(name, dtype):
    variant, origin = DAMAGES[name], uniform(12, 48).to(dtype)
    before, state = origin.clone(), torch.get_rng_state()
    first, second, other = (variant(origin, seeded(seed)).nan_to_num(9.0) for seed in (3, 3, 4))
    assert first.shape == origin.shape
    assert first.dtype == dtype
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(origin, before)
    index, query = variant.sample(origin, 7, seeded(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert (index.shape, query.shape) == ((7,), (7, 48))
    assert variant.sample(origin, 0)[1].shape == variant(origin[:0]).shape == (0, 48)
    assert variant(origin.reshape(3, 4, 48)).shape == (3, 4, 48)
    for device in ("meta", "cuda") if torch.cuda.is_available() else ("meta",):
        assert variant(torch.zeros(5, 48, device=device)).device.type == device


@pytest.mark.parametrize("d", [1, 100])
def test_mixed_variants_follow_the_definition_of_the_paper(d):
    """Replaced values are within [-1, 1], so that they differ from patterns between 2 and 3, whatever the seed."""
    variant, patterns = v.Mixed(mask=0.29, bias=0.5, seed=1), 2.5 + 0.5 * uniform(20, d)
    index, query = variant.sample(patterns, 300)
    value = query - variant.shift(patterns)
    replaced = value < 1.5
    assert (replaced.sum(-1) == int(0.29 * d + 1e-9)).all()  # 29 of 100: in floating point 0.29 * 100 is below 29
    assert (value[replaced].abs() <= 1 + 1e-6).all()
    torch.testing.assert_close(value[~replaced], patterns[index][~replaced])
    assert set(variant.shift(patterns).abs().tolist()) == {0.5}


def test_signs_depend_on_the_seed_of_the_variant_alone():
    patterns = uniform(5, 32)
    one, same, other = (v.Mixed(bias=0.3, seed=seed).shift(patterns) for seed in (1, np.int64(1), 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    index, query = v.Mixed(bias=0.3, seed=1).sample(patterns, 50)
    torch.testing.assert_close(query - patterns[index], one.expand(50, -1))
    assert v.Mixed(bias=0.3, seed=2**64 - 1).shift(patterns).abs().unique().tolist() == pytest.approx([0.3])


def test_random_values_have_the_range_of_each_dimension_of_the_patterns(monkeypatch):
    patterns = uniform(200, 4) * torch.tensor([1.0, 100.0, 0.0, 1.0]) + torch.tensor([0.0, -500.0, 7.0, 0.0])
    patterns[::2, 0] = torch.nan
    patterns[:, 3] = torch.nan
    monkeypatch.setattr(v, "RANGE_ELEMENTS", 4 * 32)  # several chunks
    for variant in (v.Replaced(1.0), v.as_damage([v.Replaced(1.0)]).bind(patterns)):
        query = variant.sample(patterns, 4000)[1]
        assert query[:, 3].isnan().all()  # no known value
        assert not query[:, :3].isnan().any()
        for column, known in zip(query.T[:3], (patterns[1::2, 0], *patterns.T[1:3]), strict=True):
            width = known.max() - known.min()
            assert (column >= known.min()).all()
            assert (column <= known.max() + 1e-6 * width).all()
            assert column.max() - column.min() >= 0.95 * width
    rows = patterns[:2, 1:3]
    query = v.Replaced(1.0)(rows.expand(500, 2, 2))  # without patterns, the rows have the range
    assert (query >= rows.amin(0)).all()
    assert (query <= rows.amax(0) + 1e-4).all()


def test_damages_are_applied_in_order():
    origin = uniform(50, 8)
    double, shifted = v.as_damage(lambda x: 2 * x), lambda x: x + 1
    torch.testing.assert_close(v.as_damage((double, shifted))(origin), 2 * origin + 1)
    torch.testing.assert_close(v.as_damage([shifted, [double, torch.neg]])(origin), -2 * (origin + 1))
    assert v.as_damage(double) is double
    query = v.as_damage([lambda x: 100 * x, v.Replaced(0.5)]).sample(origin, 50)[1]  # the patterns' range
    assert (query.abs() <= 1).sum(-1).ge(4).all()
    assert repr(v.as_damage([v.Missing(0.5)])) == "_Composed(parts=(Missing(share=0.5),))"


def test_any_function_is_a_damage():
    origin, seen = torch.ones(2, 3), []
    for function in (torch.neg, lambda x: -x, lambda x, scale=-1.0: scale * x, lambda x, _: -x):
        assert torch.equal(v.as_damage(function)(origin, seeded(0)), -origin)
    v.as_damage(lambda x, generator=None: seen.append(generator) or x)(origin, generator := seeded(0))
    assert seen == [generator]
    assert torch.equal(v.as_damage(nn.Flatten(1))(origin, seeded(0)), origin)  # a module


def test_a_share_of_the_dimensions_is_set_at_uniform_positions():
    zeros = torch.zeros(32000, 10)
    missing, replaced = v.Missing(0.3)(zeros), v.Replaced(0.3, 1.0, 3.0)(zeros)
    assert not missing[~missing.isnan()].any()
    assert replaced[replaced != 0].var().item() == pytest.approx(1 / 3, rel=0.02)
    for chosen in (missing.isnan(), replaced != 0):
        assert (chosen.sum(-1) == 3).all()
        assert torch.allclose(chosen.double().mean(0), torch.tensor(0.3, dtype=torch.float64), atol=0.05)
    assert torch.equal(v.Missing(0.0)(zeros), zeros)
    assert v.Missing(1.0)(zeros).isnan().all()


@pytest.mark.parametrize(("share", "sides"), [(0.25, (3, 4)), (0.0, (0, 0)), (1.0, (6, 8))])
def test_an_occluded_block_is_a_rectangle_at_any_position(share, sides):
    covered = (Occluded(share, (6, 8))(torch.full((500, 6 * 8), 2.0)) != 2).reshape(500, 6, 8)
    rows, columns = covered.any(-1), covered.any(-2)
    assert torch.equal(covered, rows[:, :, None] & columns[:, None, :])
    for side, inside, size in zip(sides, (rows, columns), (6, 8), strict=True):
        assert (inside.sum(-1) == side).all()
        assert ((inside[:, 1:].int() - inside[:, :-1].int()).abs().sum(-1) <= 2).all()  # consecutive
        if 0 < side < size:
            assert len(inside.unique(dim=0)) == size - side + 1  # every position occurs


def test_every_query_draws_its_own_level():
    shares = v.Missing((0.2, 0.6))(torch.ones(4000, 100)).isnan().double().mean(-1)
    assert shares.min() >= 0.2 - 1e-9
    assert shares.max() <= 0.6
    assert shares.mean().item() == pytest.approx(0.395, abs=0.01)  # rounded down to hundredths
    assert shares.std().item() == pytest.approx(0.4 / 12**0.5, rel=0.05)
    deviations = v.Noisy(std=(0.5, 1.5))(torch.zeros(2000, 1000)).std(-1)
    assert deviations.mean().item() == pytest.approx(1.0, abs=0.04)
    assert 0.4 < deviations.min() < 0.6 < 1.4 < deviations.max() < 1.7
    assert v.Noisy(0.4)(torch.zeros(2000, 1000)).var().item() == pytest.approx(0.4, rel=0.02)
    squares = v.Noisy((0.5, 1.5))(torch.zeros(2000, 1000)).var(-1)
    assert squares.mean().item() == pytest.approx(1.0, abs=0.04)  # uniform in the variance
    biases = v.Mixed(bias=(0.2, 0.4), seed=2)(torch.zeros(500, 6))
    assert torch.equal(biases.sign(), v.Mixed(bias=1.0, seed=2).shift(biases).expand(500, -1))
    assert biases.abs().std(-1).max() < 1e-6
    assert 0.2 <= biases.abs().min() < 0.22 < 0.38 < biases.abs().max() <= 0.4
    assert torch.equal(*(variant(uniform(20, 8), seeded(1)) for variant in (v.Noisy(0.25), v.Noisy(std=0.5))))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: v.Mixed(1.5), "mask must be a number between 0 and 1, got 1.5"),
    (lambda: v.Missing((0.5, 1.5)), "share must be a number between 0 and 1, got 1.5"),
    (lambda: v.Missing((0.5, 0.2)), r"range \(low, high\) with low <= high, got \(0.5, 0.2\)"),
    (lambda: v.Missing((0.5,)), r"share must be a number between 0 and 1 or a range .* got \(0.5,\)"),
    (lambda: v.Noisy(10**400), "noise must be a number of at least 0, got 1000"),
    (lambda: v.Noisy(std=-0.1), "std must be a number of at least 0, got -0.1"),
    (lambda: v.Noisy(), "either noise or std must be given, got noise=None and std=None"),
    (lambda: v.Mixed(bias=(0.1, 0.2)).shift(torch.zeros(1, 2)), r"bias must be a number, got the range \(0.1, 0.2\)"),
    (lambda: v.Replaced(0.1, 1.0, 1.0), "low must be below high, got 1.0 and 1.0"),
    (lambda: v.Replaced(0.1, float("nan"), 1.0), "low must be a finite number, got nan"),
    (lambda: v.Replaced(0.1, 0.0), "high must be a finite number, got None"),
    (lambda: v.Replaced(0.1)(torch.zeros(1, 3)), "low and high must be given for a single row, got None"),
    (lambda: v.Missing(None), "share must be a number between 0 and 1, got None"),
    (lambda: v.Mixed(noise=None), "noise must be a number of at least 0, got None"),
    (lambda: v.Covered(0.5, 0, 4), "height must be an integer of at least 1, got 0"),
    (lambda: v.Covered(0.5, 4, 4)(torch.zeros(2, 15)), r"= \(n, 16\), got \(2, 15\)"),
    (lambda: v.as_damage(3), "damage must be a variant, a function or a list of these, got 3"),
    (lambda: v.as_damage(lambda x: x[:1])(torch.zeros(2, 3)), r"return a tensor \(2, 3\).*got \(1, 3\)"),
    (lambda: v.as_damage(lambda x: None)(torch.zeros(2, 3)), "query must be a tensor, got NoneType"),
    (lambda: v.as_damage([]), r"damage must be a list of at least one damage, got \[\]"),
    (lambda: v.Noisy(0.1).sample(torch.zeros(3, 2), -1), "n must be an integer of at least 0, got -1"),
    (lambda: v.Noisy(0.1).sample(torch.zeros(3), 2), r"patterns must be \(N, d\) with N, d >= 1, got \(3,\)"),
])  # fmt: skip
def test_errors(make, message):
    with pytest.raises(AHopError, match=message):
        make()


def test_a_memory_of_images_gives_covers_their_size(small_fit):
    memory = AssociativeMemory(torch.rand(40, 2, 6, 8))
    memory.fit(v.Covered(0.3))
    memory.fit([v.Covered(0.3), v.Replaced(0.1)])
    assert repr(v.Covered(0.3).of_shape((2, 6, 8))) == repr(v.Covered(0.3, 6, 8, 2))
    assert repr(v.Covered(0.3, 4, 4).of_shape((2, 6, 8))) == repr(v.Covered(0.3, 4, 4))
    with pytest.raises(AHopError, match=r"Covered needs a memory of images .* got height=None"):
        AssociativeMemory(torch.rand(40, 16)).fit(v.Covered(0.3))
