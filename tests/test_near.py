"""The saturating base, and missing values: every kernel against a direct statement of the formula."""

import itertools

import pytest
import torch

import ahop_layers as ah
from ahop_layers.ops import chunked, reference
from ahop_layers.similarity.widths import quantiles, units

BASES = ("l1", "near", "dot", "near", "dis")
WIDTHS = torch.tensor([1.0, 0.3, 1.0, 2.0, 1.0], dtype=torch.float64)


def direct(query, key, folded, bases, widths):
    """The score of one pair of vectors, by the formula of the reference, for blocks of one dimension."""
    known = [i for i in range(len(query)) if not (query[i].isnan() or key[i].isnan())]
    d, m, total = len(query), len(known), 0.0
    if not known:
        return -torch.inf
    for base, width, u in zip(bases, widths.tolist(), folded, strict=True):
        difference = (query - key).abs()
        value = {
            "l1": -difference,
            "dis": -(difference**2),
            "dot": query * key,
            "near": (-difference / width).exp(),
        }[base]
        ordered = sorted((value[i].item() for i in known), reverse=True)
        for r, similarity in enumerate(ordered):
            low, high = r * d / m, (r + 1) * d / m
            integral = sum(max(0.0, min(high, j + 1) - max(low, j)) * u[j].item() for j in range(d))
            total += similarity * integral
    return total


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_scores_follow_the_formula(backend, missing):
    """With missing values: all patterns of NaN on both sides of four dimensions."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=4))) & missing
    query, key = (torch.randn(16, 4, dtype=torch.float64).masked_fill(masks, torch.nan) for _ in range(2))
    weight = torch.randn(len(BASES), 4, dtype=torch.float64)
    scores = ah.adaptive_similarity(query, key, weight, BASES, widths=WIDTHS, missing=missing, backend=backend)
    for i, j in itertools.product(range(16), range(16)):
        expected = direct(query[i], key[j], reference.fold(weight), BASES, WIDTHS)
        assert scores[i, j].item() == pytest.approx(expected, rel=1e-9)


def test_gradients_with_missing_values_are_finite_and_right():
    query, key = torch.randn(2, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    query[0, 2], key[1, 4] = torch.nan, torch.nan
    weight = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    options = {"bases": ("l1", "near"), "widths": torch.tensor([1.0, 0.5], dtype=torch.float64), "missing": True}
    assert torch.autograd.gradcheck(lambda weight: ah.adaptive_similarity(query, key, weight, **options), weight)


@pytest.mark.parametrize("n", [6, 3])
def test_gradcheck_of_near(n):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 6), (3, 6), (2, n))]
    widths = torch.tensor([0.7, 2.0], dtype=torch.float64)
    options = {"bases": ("near", "near"), "widths": widths, "backend": "chunked"}
    assert torch.autograd.gradcheck(lambda *inputs: ah.adaptive_similarity(*inputs, **options), inputs)


def test_tiles_with_missing_values_equal_one_tile(monkeypatch):
    query, key, weight = torch.randn(9, 6), torch.randn(11, 6), torch.randn(2, 6)
    query[torch.rand(9, 6) < 0.3] = torch.nan
    options = {"bases": ("l1", "dot"), "missing": True, "backend": "chunked"}
    expected = ah.adaptive_similarity(query, key, weight, **options)
    monkeypatch.setattr(chunked, "SCRATCH_BYTES", 4000)
    assert torch.equal(ah.adaptive_similarity(query, key, weight, **options), expected)


NEAR = ("l1", ("near", 0.1), ("near", 0.5))


def test_widths_are_quantiles_and_scale_with_the_data():
    keys = torch.rand(300, 8)
    similarity = ah.AdaptiveSimilarity(8, bases=NEAR, init="uniform").fix_widths_(keys)
    assert similarity.widths[0] == 1
    values = (keys[:, None] - keys).abs().flatten()
    quantiles = torch.quantile(values[values > 0][:100_000], torch.tensor([0.1, 0.5]))
    torch.testing.assert_close(similarity.widths[1:], quantiles, rtol=0.05, atol=0)
    large = ah.AdaptiveSimilarity(8, bases=NEAR, init="uniform").fix_widths_(1000 * keys)
    torch.testing.assert_close(large.widths[1:], 1000 * similarity.widths[1:])


def test_patterns_without_differences_have_width_one():
    for keys in (torch.ones(5, 3), torch.rand(1, 3)):
        similarity = ah.AdaptiveSimilarity(3, bases=NEAR, init="uniform").fix_widths_(keys)
        assert torch.equal(similarity.widths, torch.ones(3))


def test_a_similarity_with_widths_and_units_is_saved_and_loaded():
    similarity = ah.AdaptiveSimilarity(6, bases=NEAR, init="uniform")
    similarity.units = torch.rand(6) + 0.5
    similarity.fix_widths_(torch.randn(20, 6))
    other = ah.AdaptiveSimilarity(6, bases=NEAR, init="l1")
    other.load_state_dict(similarity.state_dict())
    query, key = torch.randn(3, 6), torch.randn(5, 6)
    assert torch.equal(other(query, key), similarity(query, key))
    plain = ah.AdaptiveSimilarity(6, bases=NEAR, init="l1")
    other.load_state_dict(plain.state_dict())
    assert other.units is None
    with pytest.raises(ah.AHopError, match=r"must have the bases l1, near 0\.2, got l1, near 0\.1, near 0\.5"):
        ah.AdaptiveSimilarity(6, bases=("l1", ("near", 0.2)), init="l1").load_state_dict(similarity.state_dict())


def test_units_divide_the_dimensions():
    similarity = ah.AdaptiveSimilarity(4, bases=NEAR, init="uniform").fix_widths_(torch.randn(20, 4))
    query, key, units = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0.1, 2.0, 1.0, 30.0])
    expected = similarity(query / units, key / units)
    similarity.units = units
    torch.testing.assert_close(similarity(query, key), expected)


def test_near_never_sees_padding():
    """Blocks of unequal width are padded with zeros, at which near is 1."""
    blocks = torch.tensor([0, 0, 0, 1])
    similarity = ah.AdaptiveSimilarity(4, bases=(("near", 0.5),), init="uniform", blocks=blocks)
    query, key = torch.randn(2, 4), torch.randn(3, 4)
    expected = reference.adaptive_similarity(
        query, key, similarity.footprint_weight(), ("near",), blocks, similarity.widths
    )
    torch.testing.assert_close(similarity(query, key), expected)


def test_quantiles_and_units_of_differences():
    assert quantiles(torch.tensor([0.0, 2.0, 2.0, 4.0, 4.0]), [0.25, 1.0]) == [1.0, 4.0]
    assert quantiles(torch.zeros(3), [0.5]) == [1.0]
    assert units(torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [2.0, 0.0, 3.0]])).tolist() == [2.0, 1.0, 1.0]
