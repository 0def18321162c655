"""Learning a similarity as a regression: rank bins, gradients, missing values, units, and accuracy."""

import pytest
import torch

from ahop_layers.errors import AHopError
from benchmarks.robust import solve
from benchmarks.robust.solve import Learned, Problem, Report, bin_edges, expand, features, learn

pytestmark = pytest.mark.full

REPORT = Report((), "learned", 0.0)
BASES = ("l1", "dis", "dot", ("near", 0.2))
WIDTHS = [1.0, 1.0, 1.0, 0.3]


def random_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def replaced(share, low=0.0, high=1.0):
    def damage(x, generator):
        wrong = torch.rand(x.shape, generator=generator) < share * torch.rand(len(x), 1, generator=generator)
        return torch.where(wrong, low + (high - low) * torch.rand(x.shape, generator=generator), x)

    return damage


def accuracy(learned, patterns, damage, seed=7):
    query = damage(patterns, random_generator(seed))
    return (learned.scores(query, patterns).argmax(1) == torch.arange(len(patterns))).double().mean().item()


@pytest.mark.parametrize("d", [1, 2, 7, 64, 784])
@pytest.mark.parametrize("bins", [1, 2, 14])
def test_bins_cover_all_ranks_once(d, bins):
    edges = bin_edges(d, bins)
    assert edges == sorted({1, *edges, d} - ({1} if bins == 1 else set()) | {d})


@pytest.mark.parametrize("missing", [False, True])
def test_weights_of_bins_and_of_ranks_give_the_same_scores(missing):
    query, patterns = torch.rand(5, 11, generator=random_generator()), torch.rand(9, 11, generator=random_generator(1))
    if missing:
        query[torch.rand(query.shape, generator=random_generator(2)) < 0.4] = torch.nan
        patterns[torch.rand(patterns.shape, generator=random_generator(3)) < 0.2] = torch.nan
    edges = bin_edges(11, 4)
    weight = torch.randn(1 + len(edges), len(BASES), generator=random_generator(4))
    binned = features(query, patterns.expand(5, 9, 11), BASES, WIDTHS, edges).transpose(-1, -2).flatten(-2)
    learned = Learned(BASES, torch.tensor(WIDTHS), None, expand(weight, edges), 1.0, REPORT)
    torch.testing.assert_close(learned.scores(query, patterns), binned @ weight.flatten(), rtol=1e-4, atol=1e-4)


def test_missing_values_stretch_the_known_ones_to_all_ranks():
    u = torch.randn(1, 6, generator=random_generator())
    learned = Learned(("l1",), torch.ones(1), None, u, 1.0, REPORT)
    nan = torch.nan
    query, pattern = torch.tensor([[3.0, nan, 1.0, 2.0, nan, 0.5]]), torch.zeros(1, 6)
    pattern[0, 3] = nan
    # Three known differences, .5, 1 and 3: each takes the weights of two of six ranks.
    expected = -(0.5 * u[0, :2].sum() + 1.0 * u[0, 2:4].sum() + 3.0 * u[0, 4:].sum())
    torch.testing.assert_close(learned.scores(query, pattern), expected.reshape(1, 1))
    constant = learned._replace(weights=torch.ones(1, 6))
    torch.testing.assert_close(constant.scores(query, pattern), torch.tensor([[-4.5 * 6 / 3]]))
    assert learned.scores(torch.full((1, 6), nan), pattern).item() == -torch.inf


@pytest.mark.parametrize("smooth", [False, True])
def test_gradient_is_that_of_autograd(smooth):
    values = torch.randn(6, 8, 5, dtype=torch.float64, generator=random_generator())
    offset = torch.zeros(6, 8, dtype=torch.float64)
    offset[0, 1] = offset[2, 7] = -torch.inf
    offset[:, 6] = 1.5
    problem = Problem(values, offset, right=3)
    weight = torch.randn(5, dtype=torch.float64, generator=random_generator(1)).requires_grad_()
    log_p = torch.log_softmax(values @ weight + offset, 1)[:, :3].logsumexp(1)
    loss = (1 - log_p.exp()).mean() if smooth else -log_p.mean()
    (expected,) = torch.autograd.grad(loss, weight)
    value, gradient = problem.objective(weight.detach(), smooth)
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(gradient, expected)


def test_width_is_a_quantile_of_nonzero_differences():
    patterns = torch.rand(400, 8, generator=random_generator())
    width = solve.width_of(patterns, 0.5, random_generator())
    assert abs(width - (1 - 0.5**0.5)) < 0.02  # the median difference of two uniform values
    half = solve.width_of(patterns * 0.5, 0.5, random_generator())
    assert half == pytest.approx(0.5 * width)
    assert solve.width_of(torch.ones(5, 8), 0.5, random_generator()) == 1.0
    assert 0 < solve.width_of((patterns > 0.5).float(), 0.05, random_generator()) < 0.1


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"QUERIES": 128, "MOST_QUERIES": 128, "TRIAL": 64, "CANDIDATES": 64, "STEPS": 30}.items():
        monkeypatch.setattr(solve, name, value)


def test_learned_similarity_beats_l1_at_any_scale_and_is_deterministic():
    patterns = torch.rand(150, 24, generator=random_generator())
    found = []
    for scale in (1e-3, 1e3):
        learned = learn(patterns * scale, None, replaced(0.95, 0.0, scale), generator=random_generator())
        found.append(accuracy(learned, patterns * scale, replaced(0.95, 0.0, scale)))
        rows = dict(learned.report.rows)
        assert rows["learned"] > rows["L1"] + 0.05
    assert max(found) - min(found) < 0.03
    again = learn(patterns, None, replaced(0.95), generator=random_generator())
    same = learn(patterns, None, replaced(0.95), generator=random_generator())
    torch.testing.assert_close(again[1:5], same[1:5], rtol=0, atol=0)


def test_dimensions_in_different_units_get_units_of_their_own():
    units = 10 ** torch.linspace(-3, 3, 20)
    patterns = torch.rand(150, 20, generator=random_generator())

    def damage(unit):
        wrong = replaced(0.6, 0.0, unit)
        return lambda x, generator: wrong(x + 0.03 * unit * torch.randn(x.shape, generator=generator), generator)

    learned = learn(patterns * units, None, damage(units), generator=random_generator())
    assert learned.scale is not None
    assert accuracy(learned, patterns * units, damage(units)) > 0.8
    assert learn(patterns, None, damage(torch.ones(20)), generator=random_generator()).scale is None


def test_labels_leave_the_own_pattern_out():
    generator = random_generator()
    centers = torch.rand(8, 32, generator=generator)
    labels = torch.arange(8).repeat_interleave(12)
    patterns = (centers[labels] + 0.02 * torch.randn(96, 32, generator=generator)).clamp(0, 1)
    learned = learn(patterns, labels, replaced(0.9), generator=generator)
    fresh = replaced(0.5)((centers[labels] + 0.02 * torch.randn(96, 32, generator=generator)).clamp(0, 1), generator)
    found = labels[learned.scores(fresh, patterns).argmax(1)]
    assert (found == labels).double().mean() > 0.95


def test_missing_values_are_learned_with():
    patterns = torch.rand(120, 24, generator=random_generator())
    patterns[torch.rand(patterns.shape, generator=random_generator(1)) < 0.1] = torch.nan

    def damage(x, generator):
        gone = torch.rand(x.shape, generator=generator) < 0.6
        noise = 0.02 * torch.randn(x.shape, generator=generator)
        return torch.where(gone, torch.nan, x + noise)

    learned = learn(patterns, None, damage, generator=random_generator())
    assert learned.weights.isfinite().all()
    assert accuracy(learned, patterns, damage) > 0.9


@pytest.mark.parametrize("patterns", [torch.ones(1, 4), torch.ones(5, 4), torch.zeros(3, 1)])
def test_single_and_constant_patterns(patterns):
    learned = learn(patterns, None, lambda x, generator: x, generator=random_generator())
    assert learned.bases
    assert learned.scores(patterns, patterns).isfinite().all()


def test_report_names_every_baseline_and_says_if_learning_does_not_pay():
    rows = (("L1", 0.5), ("learned", 0.4))
    assert "L1 is as good" in str(Report(rows, "L1", 1.0))
    assert "does not pay" not in str(Report(rows, "learned", 1.0))


def test_invalid_arguments():
    patterns = torch.rand(10, 4)
    with pytest.raises(AHopError, match="labels must be"):
        learn(patterns, torch.zeros(3), replaced(0.5), generator=random_generator())
    with pytest.raises(AHopError, match="damage must keep"):
        learn(patterns, None, lambda x, generator: x[:, :2], generator=random_generator())
    with pytest.raises(AHopError, match="start must be"):
        learn(patterns, None, replaced(0.5), generator=random_generator(), start=torch.ones(1, 4))
