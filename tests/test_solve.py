"""Learning a similarity as a regression: rank bins, gradients, missing values, units, and accuracy."""

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory import questions
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.candidates import find_candidates
from ahop_layers.memory.questions import Questions
from ahop_layers.memory.ranks import bin_edges, block_features, features, pools
from ahop_layers.memory.regression import Problem
from ahop_layers.memory.solve import AVAILABLE, Learned, Report, learn
from ahop_layers.variants import as_damage
from ahop_layers.widths import differences, quantiles, units

pytestmark = pytest.mark.usefixtures("small_fit")

BASES = ("l1", "dis", "dot", ("near", 0.2))
WIDTHS = (1.0, 1.0, 1.0, 0.3)
REPORT = Report((), "learned", 0, 0.0)


def random_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def replaced(share, low=0.0, high=1.0):
    def damage(x, generator):
        wrong = torch.rand(x.shape, generator=generator) < share * torch.rand(len(x), 1, generator=generator)
        return torch.where(wrong, low + (high - low) * torch.rand(x.shape, generator=generator), x)

    return damage


def learned_from(patterns, damage, labels=None, seed=0):
    generator = random_generator(seed)
    return learn(patterns, labels, questions.draw(as_damage(damage), patterns, labels, generator), generator)


def similarity_of(learned, patterns):
    similarity = AutoSimilarity(patterns)
    similarity.set_(learned)
    return similarity


def accuracy(memory, damage, seed=7):
    query = damage(memory.patterns, random_generator(seed))
    return (memory.recall(query) == torch.arange(len(memory.patterns))).double().mean().item()


def test_bins_cover_all_ranks_once():
    for d in (1, 2, 7, 64, 784):
        assert bin_edges(d, 1) == [d]
        for bins in (2, 14):
            edges, both = bin_edges(d, bins), bin_edges(d, bins, both_ends=True)
            assert edges == sorted({1, *edges, d})
            assert both == sorted({1, *both, d})
            assert set(both) == {d - edge for edge in both if edge < d} | {d}  # the same bins from either end


def unknown(x, share, seed):
    return x.masked_fill(torch.rand(x.shape, generator=random_generator(seed)) < share, torch.nan)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("unit", [None, torch.linspace(0.5, 2.0, 11)], ids=["plain", "units"])
def test_weights_of_bins_and_of_ranks_give_the_same_scores(missing, unit):
    query, patterns = torch.rand(5, 11, generator=random_generator()), torch.rand(9, 11, generator=random_generator(1))
    if missing:
        query, patterns = unknown(query, 0.4, 2), unknown(patterns, 0.2, 3)
    edges = bin_edges(11, 4)
    weight = torch.randn(len(BASES), 1 + len(edges), generator=random_generator(4))
    rows, keys = (x if unit is None else x / unit for x in (query, patterns))
    binned = features(rows, keys, torch.arange(9).expand(5, 9), BASES, WIDTHS, edges)
    learned = Learned(BASES, WIDTHS, unit, weight @ pools(edges), 1.0, REPORT)
    scores = similarity_of(learned, patterns)(query, patterns, missing=missing)
    torch.testing.assert_close(scores, binned @ weight.flatten(), rtol=1e-4, atol=1e-4)


BLOCKS = [None, 4, torch.tensor([0, 1, 1, 2, 0, 2, 2, 0, 1, 1, 2, 0]), ah.Blocks(3, normalize=True), [None, 3]]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=["none", "4", "named", "normalized", "two"])
def test_features_of_a_similarity_give_its_scores(blocks, missing):
    query, patterns = torch.rand(5, 12, generator=random_generator()), torch.rand(9, 12, generator=random_generator(1))
    if missing:
        query, patterns = unknown(query, 0.4, 2), unknown(patterns, 0.2, 3)
    bases = ("dot", "l1", ("near", 0.3))
    similarity = ah.AdaptiveSimilarity(12, bases=bases, init="l1", debias=True, blocks=blocks)
    torch.nn.init.normal_(similarity.bias, generator=random_generator(5))
    similarity.fix_norms_(patterns).fix_widths_(patterns)
    edges = [bin_edges(entry.count(12), 3, both_ends=True) for entry in similarity.blocks]
    weights = [torch.randn(3, 1 + len(ends), generator=random_generator(4)) for ends in edges]
    binned = block_features(query, patterns, torch.arange(9).expand(5, 9), similarity, edges)
    similarity.set_ranks_([weight @ pools(ends) for weight, ends in zip(weights, edges, strict=True)])
    expected = binned @ torch.cat([weight.flatten() for weight in weights])
    scores = similarity(query, patterns, missing=missing)
    torch.testing.assert_close(scores, expected.nan_to_num(-torch.inf), rtol=1e-4, atol=1e-4)


def test_missing_values_stretch_the_known_ones_to_all_ranks():
    u, nan = torch.randn(1, 6, generator=random_generator()), torch.nan
    query, pattern = torch.tensor([[3.0, nan, 1.0, 2.0, nan, 0.5]]), torch.zeros(1, 6)
    pattern[0, 3] = nan
    learned = Learned(("l1",), (1.0,), None, u, 1.0, REPORT)
    # Three known differences, .5, 1 and 3: each takes the weights of two of six ranks.
    expected = -(0.5 * u[0, :2].sum() + 1.0 * u[0, 2:4].sum() + 3.0 * u[0, 4:].sum())
    similarity = similarity_of(learned, pattern)
    torch.testing.assert_close(similarity(query, pattern, missing=True), expected.reshape(1, 1))
    constant = similarity_of(learned._replace(weights=torch.ones(1, 6)), pattern)
    torch.testing.assert_close(constant(query, pattern, missing=True), torch.tensor([[-4.5 * 6 / 3]]))
    assert similarity(torch.full((1, 6), nan), pattern, missing=True).item() == -torch.inf


def test_a_later_solution_replaces_all_of_an_earlier_one():
    patterns = torch.rand(9, 6, generator=random_generator())
    first = Learned(BASES, WIDTHS, torch.full((6,), 2.0), torch.rand(4, 6), 1.0, REPORT)
    second = Learned(("dis",), (1.0,), None, torch.ones(1, 6), 1.0, REPORT)
    similarity = similarity_of(first, patterns)
    similarity.set_(second)
    torch.testing.assert_close(similarity(patterns, patterns), -torch.cdist(patterns, patterns).square())
    assert similarity.extra_repr() == "6, bases=dis"


@pytest.mark.parametrize("bounded", [False, True])
def test_gradient_is_that_of_autograd(bounded):
    values = torch.randn(6, 8, 5, dtype=torch.float64, generator=random_generator())
    offset = torch.zeros(6, 8, dtype=torch.float64)
    offset[0, 1] = offset[2, 7] = -torch.inf
    offset[:, 6] = 1.5
    problem = Problem(values, offset, right=3, sizes=[5])
    weight = torch.randn(5, dtype=torch.float64, generator=random_generator(1)).requires_grad_()
    log_p = torch.log_softmax(values @ weight + offset, 1)[:, :3].logsumexp(1)
    loss = -((log_p.exp() + 0.05) / 1.05).log().mean() if bounded else -log_p.mean()
    (expected,) = torch.autograd.grad(loss, weight)
    value, gradient = problem.objective(weight.detach(), bounded)
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(gradient, expected)


def test_width_is_a_quantile_of_nonzero_differences():
    patterns = torch.rand(400, 8, generator=random_generator())

    def widths(x, *shares):
        return quantiles(differences(x), shares)

    (median,) = widths(patterns, 0.5)
    assert abs(median - (1 - 0.5**0.5)) < 0.02  # the median difference of two uniform values
    assert widths(patterns * 0.5, 0.5) == pytest.approx([0.5 * median])
    assert widths(torch.ones(5, 8), 0.5, 0.1) == [1.0, 1.0]
    low, high = widths((patterns > 0.5).float(), 0.05, 0.5)
    assert 0 < low < 0.1 < high < 1
    some = differences(patterns).flatten()
    for share, found in zip((0.02, 0.9), widths(patterns, 0.02, 0.9), strict=True):
        assert (some[some > 0] <= found).double().mean().item() == pytest.approx(share, abs=1e-4)
    scales = 10 ** torch.linspace(-3, 3, 8)
    own = units(differences(patterns * scales))
    torch.testing.assert_close(own / scales, torch.full((8,), median), rtol=0.1, atol=0)


def test_candidates_are_right_patterns_and_wrong_ones():
    patterns = torch.rand(40, 6, generator=random_generator())
    labels = torch.arange(40) % 4
    origin = torch.tensor([0, 5, 39])
    for of, query_labels in ((None, None), (labels, labels[origin])):
        asked = Questions(patterns[origin] + 0.01, origin, query_labels, 3)
        found = find_candidates(asked, patterns, of, random_generator(), 30)
        used = found.offset > -torch.inf
        for row, place in enumerate(origin.tolist()):
            rows = found.candidates[row]
            right, wrong = rows[: found.right][used[row, : found.right]], rows[found.right :][used[row, found.right :]]
            if of is None:
                assert right.tolist() == [place]
                assert place not in wrong.tolist()
            else:
                assert place not in rows[used[row]].tolist()  # a pattern does not answer for its own query
                assert (labels[right] == labels[place]).all()
                assert not (labels[wrong] == labels[place]).any()
            assert len(rows[used[row]].unique()) == used[row].sum()
    asked = Questions(torch.full((1, 6), torch.nan), torch.tensor([0]), None, 1)
    assert not find_candidates(asked, patterns, None, random_generator(), 30).usable.any()


@pytest.mark.slow
def test_learned_similarity_beats_l1_at_any_scale_and_is_deterministic():
    patterns = torch.rand(150, 24, generator=random_generator())
    found = []
    for scale in (1e-3, 1e3):
        memory, damage = ah.AssociativeMemory(patterns * scale), replaced(0.95, 0.0, scale)
        rows = dict(memory.fit(damage).rows)
        found.append(accuracy(memory, damage))
        assert rows["learned"] > rows["L1"] + 0.05
    assert max(found) - min(found) < 0.03
    again, same = (learned_from(patterns, replaced(0.95)) for _ in range(2))
    torch.testing.assert_close(again[1:5], same[1:5], rtol=0, atol=0)


@pytest.mark.slow
def test_dimensions_in_different_units_get_units_of_their_own(monkeypatch):
    sizes = {"questions.QUERIES": 256, "questions.MOST_QUERIES": 256, "solve.TRIAL": 256, "solve.TRIAL_CANDIDATES": 96}
    for name, value in sizes.items():  # trials as by default: few queries say little about units
        monkeypatch.setattr(f"ahop_layers.memory.{name}", value)
    scales = 10 ** torch.linspace(-3, 3, 20)
    patterns = torch.rand(150, 20, generator=random_generator())

    def damage(unit):
        wrong = replaced(0.6, 0.0, unit)
        return lambda x, generator: wrong(x + 0.03 * unit * torch.randn(x.shape, generator=generator), generator)

    memory = ah.AssociativeMemory(patterns * scales)
    before = accuracy(memory, damage(scales))
    memory.fit(damage(scales))
    assert memory.similarity.units is not None
    assert accuracy(memory, damage(scales)) > max(0.8, before)
    assert learned_from(patterns, damage(torch.ones(20))).units is None


@pytest.mark.slow
def test_labels_leave_the_own_pattern_out():
    generator = random_generator()
    centers = torch.rand(8, 32, generator=generator)
    labels = torch.arange(8).repeat_interleave(12)
    patterns = (centers[labels] + 0.02 * torch.randn(96, 32, generator=generator)).clamp(0, 1)
    memory = ah.AssociativeMemory(patterns, labels=labels * 10)
    memory.fit(replaced(0.9))
    fresh = replaced(0.5)((centers[labels] + 0.02 * torch.randn(96, 32, generator=generator)).clamp(0, 1), generator)
    for found in (memory.classify(fresh), memory.labels[memory.recall(fresh)]):
        assert (found == 10 * labels).double().mean() > 0.95


@pytest.mark.slow
def test_missing_values_are_learned_with():
    patterns = unknown(torch.rand(120, 24, generator=random_generator()), 0.1, 1)

    def damage(x, generator):
        gone = torch.rand(x.shape, generator=generator) < 0.6
        noise = 0.02 * torch.randn(x.shape, generator=generator)
        return torch.where(gone, torch.nan, x + noise)

    memory = ah.AssociativeMemory(patterns)
    memory.fit(damage)
    assert memory.similarity.w.isfinite().all()
    assert accuracy(memory, damage) > 0.9


@pytest.mark.parametrize("patterns", [torch.ones(1, 4), torch.ones(5, 4), torch.zeros(3, 1)])
def test_single_and_constant_patterns(patterns):
    learned = learned_from(patterns, lambda x: x)
    assert learned.bases
    assert similarity_of(learned, patterns)(patterns, patterns).isfinite().all()


def test_a_fixed_score_is_the_result_where_learning_does_not_pay(monkeypatch):
    """A solution that is always wrong leaves the best of the fixed scores."""
    monkeypatch.setattr(
        "ahop_layers.memory.regression.solve", lambda problem, start, bounded, penalty: -torch.ones_like(start)
    )
    patterns = torch.rand(60, 16, generator=random_generator())
    memory = ah.AssociativeMemory(patterns)
    report = memory.fit(ah.variants.Noisy(0.01))
    rows = dict(report.rows)
    assert report.chosen in AVAILABLE
    assert rows["learned"] < 0.1 < 0.9 < rows[report.chosen]
    assert f"{report.chosen} is as good and was chosen" in str(report)
    assert accuracy(memory, lambda x, generator: x + 0.05 * torch.randn(x.shape, generator=generator)) > 0.95


def test_report_names_every_baseline_and_says_if_learning_does_not_pay():
    rows = (("L1", 0.5), ("learned", 0.4))
    assert "L1 is as good" in str(Report(rows, "L1", 5, 1.0))
    assert "does not pay" not in str(Report(rows, "learned", 5, 1.0))
    learned = learned_from(torch.rand(30, 6, generator=random_generator()), replaced(0.5))
    names = [name for name, _ in learned.report.rows]
    assert set(names) >= {"cosine", "L1", "trimmed L1", "Euclid", "near", "clipped L1", "learned"}
    assert names[-1] == "learned"
    assert learned.report.queries == 64


def mixed_accuracy(memory, variant):
    index, query = variant.sample(memory.patterns, 600, random_generator(9))
    return (memory.recall(query) == index).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{}, {"bases": ("l1", ("near", 0.1)), "init": "l1"}, {"blocks": [None, 8]}])
def test_weights_of_a_network_are_solved(keywords):
    """Solved weights are about as good as trained ones, with every bias, base and block."""
    patterns = torch.rand(300, 32, generator=random_generator()) * 2 - 1
    variant = ah.variants.Mixed(0.4, 0.1, 0.5, seed=1)
    memory, trained = (ah.AssociativeMemory.preset("A-Hop", patterns, debias=True, **keywords) for _ in range(2))
    before = mixed_accuracy(memory, variant)
    report = memory.fit(variant)
    assert dict(report.rows)["learned"] >= dict(report.rows)["start"] - 0.01
    found = mixed_accuracy(memory, variant)
    assert found > before + 0.1
    if not keywords:
        trained.fit(variant, epochs=150, batch=128, progress=False)
        assert found > mixed_accuracy(trained, variant) - 0.03
    assert memory.retrieve(patterns + memory.similarity.bias.detach()).sub(patterns).abs().max() < 0.1


def test_weights_that_are_better_than_the_solution_stay(monkeypatch):
    monkeypatch.setattr("ahop_layers.memory.regression.solve", lambda problem, start, *rest: -torch.ones_like(start))
    patterns = torch.rand(60, 16, generator=random_generator())
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, init="dis")
    before = memory.similarity.w.detach().clone(), memory.similarity.beta.detach().clone()
    report = memory.fit(ah.variants.Noisy(0.01))
    assert report.chosen == "start"
    assert torch.equal(memory.similarity.w, before[0])
    assert torch.equal(memory.similarity.beta, before[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes_are_solved(dtype):
    patterns = torch.rand(60, 16, generator=random_generator()).to(dtype)
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, bases=("l1", "dot"), init="l1")
    memory.fit(ah.variants.Replaced((0.0, 0.6)))
    assert memory.similarity.w.dtype == dtype
    assert (memory.recall(patterns) == torch.arange(60)).all()
    assert memory.retrieve(patterns).sub(patterns).abs().max() < 0.05


def test_frozen_weights_and_networks_that_are_not_linear_are_trained():
    patterns = torch.rand(60, 16, generator=random_generator())
    for name, keywords in (("K2-Hop", {}), ("A-Hop", {"table": True})):
        losses = ah.AssociativeMemory.preset(name, patterns, **keywords).fit(ah.variants.Noisy(0.01), epochs=2)
        assert losses.shape == (2,)
    memory = ah.AssociativeMemory.preset("A-Hop", patterns)
    memory.similarity.w.requires_grad_(False)
    before = memory.similarity.w.clone()
    memory.fit(ah.variants.Noisy(0.01), epochs=2)
    assert torch.equal(memory.similarity.w, before)


def test_widths_that_a_user_set_stay():
    similarity = ah.AdaptiveSimilarity(6, bases=("l1", ("near", 0.1)), init="l1")
    similarity.widths[1] = 0.25
    assert ah.AssociativeMemory(torch.rand(9, 6), similarity).similarity.widths[1] == 0.25
