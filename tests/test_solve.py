"""Learning a similarity as a regression: features, gradients, missing values, units, and accuracy."""

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.learn import questions
from ahop_layers.memory.learn.members import Trial
from ahop_layers.memory.learn.ranks import bin_edges, block_features, features, pools
from ahop_layers.memory.learn.regression import Problem, solve
from ahop_layers.memory.learn.solve import _preferences
from ahop_layers.memory.variants import Replaced

pytestmark = pytest.mark.usefixtures("small_fit")


def random_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(n, d, seed=0):
    return torch.rand(n, d, generator=random_generator(seed))


def accuracy(memory, damage, seed=7):
    query = damage(memory.patterns, random_generator(seed))
    return (memory.recall(query) == torch.arange(len(memory.patterns))).double().mean().item()


def unknown(x, share, seed):
    return x.masked_fill(torch.rand(x.shape, generator=random_generator(seed)) < share, torch.nan)


BLOCKS = [None, 4, torch.tensor([0, 1, 1, 2, 0, 2, 2, 0, 1, 1, 2, 0]), ah.Blocks(3, normalize=True)]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS, ids=["none", "4", "named", "normalized"])
def test_features_of_a_similarity_give_its_scores(blocks, missing):
    query, patterns = uniform(5, 12), uniform(9, 12, seed=1)
    if missing:
        query, patterns = unknown(query, 0.4, 2), unknown(patterns, 0.2, 3)
    bases = ("dot", "l1", ("near", 0.3))
    similarity = ah.AdaptiveSimilarity(12, bases=bases, init="l1", debias=True, blocks=blocks)
    torch.nn.init.normal_(similarity.bias, generator=random_generator(5))
    similarity.fix_scales_(patterns)
    edges = bin_edges(similarity.blocks.count(12), 3, both_ends=True)
    weight = torch.randn(3, 1 + len(edges), generator=random_generator(4))
    binned = block_features(query, patterns, torch.arange(9).expand(5, 9), similarity, [edges])
    similarity.set_ranks_([weight @ pools(edges)])
    expected = binned @ weight.flatten()
    scores = similarity(query, patterns, missing=missing)
    torch.testing.assert_close(scores, expected.nan_to_num(-torch.inf), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("bounded", [False, True])
def test_few_losses_are_needed_for_the_minimum(bounded, monkeypatch):
    """Features of one base are nearly multiples of each other: plain gradients need hundreds of steps."""
    level = torch.randn(300, 20, 1, generator=random_generator(), dtype=torch.float64)
    level[:, 0] += 3 * torch.rand(300, 1, generator=random_generator(1), dtype=torch.float64)
    noise = torch.randn(300, 20, 8, generator=random_generator(2), dtype=torch.float64)
    problem = Problem(level + 0.1 * noise, torch.zeros(300, 20), 1, [8])
    start = torch.zeros(8, dtype=torch.float64)
    penalty, evaluated = torch.full_like(start, 1e-4), []
    weight = start.clone().requires_grad_()
    second = torch.autograd.functional.hessian(lambda weight: problem.objective(weight, False)[0], weight.detach())
    torch.testing.assert_close(problem.curvature(start, False), second)

    objective = Problem.objective
    monkeypatch.setattr(Problem, "objective", lambda *given: evaluated.append(1) or objective(*given))

    def loss(found):
        return objective(problem, found, bounded)[0] + penalty @ found.square()

    found = solve(problem, start, bounded, penalty)
    optimizer = torch.optim.LBFGS([weight], max_iter=2000, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        value = loss(weight)
        value.backward()
        return value

    optimizer.step(closure)
    assert loss(found) < loss(weight) + 1e-4
    assert len(evaluated) < 40


def trial(member, name="learned", loss=0.0):
    return Trial(name, member, loss)


def test_the_solution_that_fails_least_where_damage_is_heavy_is_preferred():
    first = torch.arange(400) % 10 < 8
    slightly, clearly = first.clone(), first.clone()
    slightly[[8, 18, 28]], slightly[0] = True, False
    clearly[8:60] = True
    trials = [trial("L1", "L1"), *(trial("near", loss=loss) for loss in (0.4, 0.3, 0.2))]
    cases = (slightly, 2.0, 1), (clearly, 2.0, 2), (slightly, 0.0, 2), (first.roll(1), 0.0, 2), (first, 2.0, 1)
    for other, errors, number in cases:
        right = torch.stack([~first, first, other, ~first])
        order = _preferences(trials, right, errors, lambda loss: loss)
        assert order[0] == number
        assert sorted(order) == list(range(4))
    assert _preferences(trials, torch.cat([torch.ones(1, 400, dtype=torch.bool), right[1:]]), 2.0, None)[0] == 0


def test_a_member_that_costs_more_must_be_better_by_a_standard_error():
    cheap = torch.arange(400) % 10 < 8
    equal, better = cheap.roll(1), cheap.clone()
    better[8:40] = True
    trials = [trial("cheap"), trial("dear"), trial("dearest")]
    assert _preferences(trials, torch.stack([cheap, equal, equal]), 2.0, None)[0] == 0
    assert _preferences(trials, torch.stack([cheap, equal, better]), 2.0, None)[0] == 2
    assert _preferences(trials, torch.stack([cheap, better, better]), 2.0, None)[0] == 1
    assert _preferences(trials, torch.stack([equal & cheap, cheap, better]), 2.0, None)[0] == 2


@pytest.mark.slow
def test_learned_similarity_beats_l1_at_any_scale():
    found = []
    for scale in (1e-3, 1e3):
        memory, damage = ah.AssociativeMemory(uniform(150, 24) * scale), Replaced((0.0, 0.95), 0.0, scale)
        rows = dict(memory.fit(damage).rows)
        found.append(accuracy(memory, damage))
        assert rows["learned"] > rows["L1"] + 0.05
    assert max(found) - min(found) < 0.03


@pytest.mark.slow
def test_dimensions_in_different_units_get_units_of_their_own(monkeypatch):
    sizes = {
        "questions.QUERIES": 256,
        "questions.MOST_QUERIES": 256,
        "members.TRIAL_QUERIES": 256,
    }
    for name, value in sizes.items():  # trials as by default: few queries say little about units
        monkeypatch.setattr(f"ahop_layers.memory.learn.{name}", value)

    def damage(unit):
        wrong = Replaced((0.0, 0.8), torch.zeros(16), unit)
        return lambda x, generator: wrong(x + 0.03 * unit * torch.randn(x.shape, generator=generator), generator)

    for scales in (torch.ones(16), 10 ** torch.linspace(-3, 3, 16)):
        memory = ah.AssociativeMemory(uniform(100, 16) * scales)
        before = accuracy(memory, damage(scales))
        memory.fit(damage(scales))
        assert (memory.similarity.units is None) == (scales == 1).all()
    assert accuracy(memory, damage(scales)) > max(0.8, before)


@pytest.mark.slow
def test_labels_leave_the_own_pattern_out():
    generator, labels = random_generator(), torch.arange(8).repeat_interleave(12)
    centers = uniform(8, 32, seed=1)[labels]
    patterns, fresh = ((centers + 0.02 * torch.randn(96, 32, generator=generator)).clamp(0, 1) for _ in range(2))
    memory = ah.AssociativeMemory(patterns, labels=labels * 10)
    memory.fit(Replaced((0.0, 0.9), 0.0, 1.0))
    fresh = Replaced((0.0, 0.5), 0.0, 1.0)(fresh, generator)
    for found in (memory.classify(fresh), memory.labels[memory.recall(fresh)]):
        assert (found == 10 * labels).double().mean() > 0.95


@pytest.mark.slow
def test_missing_values_are_learned_with():
    def damage(x, generator):
        gone = torch.rand(x.shape, generator=generator) < 0.6
        noise = 0.02 * torch.randn(x.shape, generator=generator)
        return torch.where(gone, torch.nan, x + noise)

    memory = ah.AssociativeMemory(unknown(uniform(120, 24), 0.1, 1))
    memory.fit(damage)
    assert memory.similarity.w.isfinite().all()
    assert accuracy(memory, damage) > 0.9


def test_a_fixed_score_is_the_result_where_learning_does_not_pay(monkeypatch):
    """A solution that is always wrong leaves the best of the fixed scores, or the weights that there are."""
    monkeypatch.setattr(
        "ahop_layers.memory.learn.regression.solve", lambda problem, start, *rest, **kind: -torch.ones_like(start)
    )
    memory = ah.AssociativeMemory(uniform(60, 16))
    report = memory.fit(ah.variants.Noisy(0.01))
    rows = dict(report.rows)
    assert rows["learned"] < 0.1 < 0.9 < rows[report.chosen]
    assert f"{report.chosen} is as good and was chosen" in str(report)
    assert accuracy(memory, lambda x, generator: x + 0.05 * torch.randn(x.shape, generator=generator)) > 0.95
    memory = ah.AssociativeMemory(uniform(60, 16), ah.AdaptiveSimilarity(16, init="dis"))
    before = {name: value.clone() for name, value in memory.similarity.state_dict().items()}
    assert memory.fit(ah.variants.Noisy(0.01)).chosen == "start"
    assert all(torch.equal(memory.similarity.state_dict()[name], value) for name, value in before.items())


def mixed_accuracy(memory, variant):
    index, query = variant.sample(memory.patterns, 600, random_generator(9))
    return (memory.recall(query) == index).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{}, {"bases": ("l1", ("near", 0.1)), "init": "l1"}, {"blocks": 8}])
def test_weights_of_a_network_are_solved(keywords):
    patterns = uniform(300, 32) * 2 - 1
    variant = ah.variants.Mixed(0.4, 0.1, 0.5, seed=1)
    memory = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(32, debias=True, **keywords))
    before = mixed_accuracy(memory, variant)
    report = memory.fit(variant)
    assert dict(report.rows)["learned"] >= dict(report.rows)["start"] - 0.01
    found = mixed_accuracy(memory, variant)
    assert found > before + 0.1
    assert memory.retrieve(patterns + memory.similarity.bias.detach()).sub(patterns).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_weights_of_other_dtypes_are_solved(dtype):
    patterns = uniform(60, 16).to(dtype)
    similarity = ah.AdaptiveSimilarity(16, bases=("l1", "dot"), init="l1", dtype=dtype)
    memory = ah.AssociativeMemory(patterns, similarity)
    memory.fit(Replaced((0.0, 0.6)))
    assert memory.similarity.w.dtype == dtype
    assert (memory.recall(patterns) == torch.arange(60)).all()
    assert memory.retrieve(patterns).sub(patterns).abs().max() < 0.05


def test_widths_that_a_user_set_stay():
    similarity = ah.AdaptiveSimilarity(6, bases=("l1", ("near", 0.1)), init="l1")
    similarity.widths[1] = 0.25
    assert ah.AssociativeMemory(torch.rand(9, 6), similarity).similarity.widths[1] == 0.25


def test_both_kinds_of_the_default_damage_are_in_every_split_of_the_queries():
    """Every second query decides what is chosen, and the others are reported."""
    asked = questions.draw(questions.any_damage((20,)), torch.rand(50, 20), None, random_generator())
    missing = asked.query.isnan().any(-1).float()
    assert 0.3 < missing[::2].mean() < 0.6
    assert 0.3 < missing[1::2].mean() < 0.6


@pytest.mark.parametrize(("labels", "noisy"), [(None, True), (torch.arange(40), True), (torch.arange(40) // 4, False)])
def test_only_queries_for_copies_of_themselves_have_noise(monkeypatch, labels, noisy):
    """Other patterns of a class differ as queries do; a fit learns from them that equal values are intact."""
    drawn = []
    monkeypatch.setattr(questions, "draw", lambda *given, draw=questions.draw: drawn.append(draw(*given)) or drawn[-1])
    ah.AssociativeMemory((uniform(40, 8) > 0.5).float(), labels=labels).fit()
    query = drawn[0].query.nan_to_num(0.5)
    assert bool(((query < 0) | (query > 1)).any()) == noisy


def test_unknown_values_of_queries_give_the_features_of_unknown_values_of_pairs():
    """Pools for each query, if all patterns are complete, and the stretch of each pair otherwise."""
    query, patterns = torch.randn(6, 9), torch.randn(5, 9)
    query[torch.rand(query.shape) < 0.5] = torch.nan
    query[0] = torch.nan
    candidates, bases, edges = torch.randint(5, (6, 4)), ("l1", ("near", 0.1), "dot"), [1, 3, 9]
    gaps = torch.cat([patterns, torch.full((1, 9), torch.nan)])  # a pattern that is no candidate
    found, expected = (
        features(query, keys, candidates, bases, [1.0, 0.5, 1.0], [edges] * 3) for keys in (patterns, gaps)
    )
    torch.testing.assert_close(found, expected)
    assert (found[0] == 0).all()
