"""The default of a memory: its similarity and inverse temperature before a fit, and what a fit solves."""

import copy
import functools
import math
import pickle
import re

import numpy as np
import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.learn.members import FAMILY
from ahop_layers.memory.variants import Missing, Noisy, Replaced
from ahop_layers.similarity.widths import NEARLY, differences, octaves, units

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_fit")]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def noisy(x):
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)


def finds_itself(memory):
    return torch.equal(memory.recall(memory.patterns), torch.arange(len(memory.patterns)))


PATTERNS = random(80, 10, seed=3)
LABELS = torch.arange(80) % 6 * 2 + 1
INDEX = torch.arange(160) % 80


@functools.cache
def _fit():
    memory = ah.AssociativeMemory(PATTERNS)
    return memory, memory.fit(Replaced(0.3))


def fitted():
    """Returns a memory of PATTERNS that was fitted to replaced values, a copy for each test."""
    return copy.deepcopy(_fit()[0])


def same_states(first, second):
    return [torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items()]


def test_the_default_is_the_mean_of_saturating_bases():
    patterns, query = random(50, 8, dtype=torch.float64), random(5, 8, seed=1, dtype=torch.float64)
    memory = ah.AssociativeMemory(patterns)
    names = memory.similarity.names
    widths = [width for name, width in zip(names, memory.similarity.widths, strict=True) if name == "near"]
    assert sorted(widths) == widths
    difference = (query[:, None] - patterns).abs()
    expected = torch.stack([(-difference / width).exp().sum(-1) for width in widths]).mean(0)
    torch.testing.assert_close(memory.scores(query), expected)


@pytest.mark.parametrize("seed", range(20))
def test_widths_that_are_nearly_an_octave_apart_share_an_exponential(seed):
    widths = (6 * random(6, seed=seed, dtype=torch.float64)).exp().tolist()
    found = octaves(widths)
    assert len(set(found)) == len(widths)
    for width, moved in zip(widths, found, strict=True):
        assert abs(moved / width - 1) < NEARLY
        assert moved == width or any(math.log2(wider / moved).is_integer() for wider in found if wider > moved)


@pytest.mark.parametrize("scale", [1e-37, 1e-39])
def test_tiny_differences_beside_a_large_one(scale):
    """The inverse of the smallest quantiles of these differences is infinite in float32."""
    patterns = scale * random(50, 8)
    patterns[3, 2] = 1.0
    memory = ah.AssociativeMemory(patterns)
    assert memory.scores(patterns).isfinite().all()
    assert torch.equal(memory.recall(patterns), torch.arange(50))
    assert (units(differences(patterns)) >= 1e-36).all()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_stored_pattern_finds_and_retrieves_itself_at_any_scale(scale):
    memory = ah.AssociativeMemory(scale * (random(300, 16) - 0.5))
    assert finds_itself(memory)
    torch.testing.assert_close(memory.retrieve(memory.patterns), memory.patterns, rtol=0, atol=1e-3 * scale)
    query = memory.patterns.clone()
    query[:, :4] = 1e3 * scale  # wrong values cost the same however wrong they are
    assert torch.equal(memory.recall(query), torch.arange(300))


def test_unit_vectors_are_retrieved_without_an_inverse_temperature():
    normal = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    patterns, some = torch.nn.functional.normalize(normal, dim=-1), torch.arange(0, 500, 20)
    memory, damaged = ah.AssociativeMemory(patterns), patterns[some]
    damaged[:, :20], damaged[:, 20:40] = 1.0, torch.nan
    for query in (patterns[some], damaged):
        assert torch.equal(memory.recall(query), some)
        torch.testing.assert_close(memory.retrieve(query), patterns[some], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("fit", [False, True])
def test_dtypes(dtype, fit):
    memory = ah.AssociativeMemory(random(100, 12, dtype=torch.float64).to(dtype))
    if fit:
        memory.fit(Replaced(0.3))
    query = memory.patterns[:9].clone()
    query[:, :3] = 0.5
    assert memory.scores(query).dtype == memory.retrieve(query).dtype == dtype
    assert memory.recall(query).tolist() == list(range(9))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert memory.similarity.w.dtype == memory.beta.dtype == wide
    if not fit:
        torch.testing.assert_close(memory.retrieve(memory.patterns[:9]), memory.patterns[:9], rtol=0, atol=2e-2)


def test_a_fitted_memory_keeps_its_weights_when_it_is_converted():
    memory = fitted()
    weight, widths = memory.similarity.w.detach().clone(), memory.similarity.widths.clone()
    for each in (memory.half(), memory.bfloat16(), memory.float()):
        assert torch.equal(each.similarity.w, weight)
        assert torch.equal(each.similarity.widths, widths)
    assert memory.double().similarity.w.dtype == torch.float64


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_single_constant_and_equal_patterns(dtype, fit):
    for patterns in (random(1, 5), torch.ones(5, 4), torch.zeros(3, 1), random(1, 5).expand(2, 5)):
        patterns = patterns.to(dtype)
        memory = ah.AssociativeMemory(patterns)
        if fit:
            memory.fit()
        assert memory.scores(patterns).isfinite().all()
        assert 0 < memory.beta < torch.inf
        assert torch.equal(memory.recall(patterns), torch.zeros(len(patterns)).long())
        torch.testing.assert_close(memory.retrieve(patterns), patterns)
        query = patterns.clone()
        query[:, 1:] = torch.nan
        torch.testing.assert_close(memory.retrieve(query), patterns)


def test_constant_dimensions_change_nothing():
    def wider(x):
        return torch.nn.functional.pad(x, (0, 4), value=3.0)

    patterns = random(60, 6)
    scores, expected = ah.AssociativeMemory(patterns).search(noisy(patterns), k=2)
    clear = scores[:, 0] - scores[:, 1] > 0.02  # widths are quantiles of other pairs of values
    assert clear.double().mean() > 0.8
    assert torch.equal(ah.AssociativeMemory(wider(patterns)).recall(wider(noisy(patterns)))[clear], expected[clear, 0])


DAMAGES = {
    "none": None,
    "strong noise": Noisy(0.09),
    "function with a generator": lambda x, generator: x + 0.1 * torch.rand(x.shape, generator=generator),
    "list": [Noisy(0.01), Missing(0.3), noisy],
    "arrays": (INDEX.numpy(), noisy(PATTERNS[INDEX]).double().numpy()),
    "few pairs, lists": (INDEX[:5].tolist(), noisy(PATTERNS[:5]).tolist()),
    "pairs with NaN": (INDEX, Missing(0.3)(PATTERNS[INDEX], torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_kind_of_damage(name):
    memory = ah.AssociativeMemory(PATTERNS)
    before = memory.similarity.w.detach().clone()
    report = memory.fit(DAMAGES[name])
    assert name == "strong noise" or dict(report.rows)["learned"] > 0.5
    fresh = PATTERNS + 0.03 * torch.randn(80, 10, generator=torch.Generator().manual_seed(6))
    if name == "none":
        fresh = Replaced(0.2).bind(PATTERNS)(PATTERNS, torch.Generator().manual_seed(6))
    assert (memory.recall(fresh) == torch.arange(80)).double().mean() > 0.8
    assert finds_itself(memory)  # queries without damage are easier
    assert not torch.equal(memory.similarity.w, before)


def test_a_memory_with_labels_is_fitted_by_label():
    centers = random(6, 10, seed=4)
    patterns, queries = (centers[torch.arange(80) % 6] + 0.1 * random(80, 10, seed=seed) for seed in (5, 6))
    memory, same, other = (ah.AssociativeMemory(patterns, labels=LABELS) for _ in range(3))
    assert dict(memory.fit((LABELS, queries)).rows)["learned"] > 0.8
    assert (memory.classify(queries) == LABELS).double().mean() > 0.9
    same.fit((LABELS.numpy(), queries.numpy()), by="label")
    assert all(same_states(memory, same))
    memory.fit(Replaced(0.3))
    same.fit(Replaced(0.3), by="label")
    other.fit(Replaced(0.3), by="pattern")
    assert all(same_states(memory, same))
    assert not torch.equal(memory.similarity.w, other.similarity.w)


def test_a_fit_with_one_seed_gives_the_same_bits():
    memory = ah.AssociativeMemory(PATTERNS)
    torch.manual_seed(7)  # the random numbers of the caller do not matter
    before = torch.get_rng_state()
    for seed in (0, 1, np.int64(0)):  # nor does an earlier fit
        memory.fit(Replaced(0.3), seed=seed)
        assert all(same_states(memory, fitted())) == (seed == 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_report_is_a_table():
    report = _fit()[1]
    first, *rows, last = str(report).splitlines()
    assert first == f"accuracy on {report.queries} held-out queries"
    assert re.fullmatch(r"fitted in \d+\.\d s", last)
    others = ("learning does not pay", "learned from", "the similarity is", "repair ")
    table = [line for line in rows if not line.startswith(others)]
    assert table == [f"{name:<14} {accuracy:.3f}" for name, accuracy in report.rows]
    assert report.seconds > 0
    names = [name for name, _ in report.rows]
    assert names == ["L1", "trimmed L1", "near", "Euclid", "dot product", "learned", "intact records"]
    assert f"the similarity is {report.result}" in rows
    assert report.result.startswith("AutoSimilarity(10, bases=")
    assert set(dict(report.members)) <= set(FAMILY)


def in_units(count, seed=0):
    return random(count, 10, seed=seed) * 10 ** torch.linspace(-3, 3, 10)


def fitted_in_units():
    memory = ah.AssociativeMemory(in_units(80))
    spread = memory.patterns.std(0)
    memory.fit(lambda x, generator: x + 0.4 * spread * torch.randn(x.shape, generator=generator))
    assert memory.similarity.units is not None
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        converted = copy.deepcopy(memory).to(dtype)
        scored = converted._state.stored.dtype  # the squares of these values exceed float16
        assert converted.scores(in_units(5, 1)).dtype == converted.search(in_units(5, 1))[0].dtype == scored
    return memory


@pytest.mark.parametrize("make", [fitted, fitted_in_units])
def test_a_fitted_memory_is_saved_and_loaded(make, tmp_path):
    memory = make()
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    query, others = noisy(memory.patterns[:7]), [copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))]
    for other in (ah.AssociativeMemory(random(3, 10)), ah.AssociativeMemory(in_units(60, 3)), fitted(), fitted()):
        state = torch.load(tmp_path / "memory.pt", weights_only=True)
        other.load_state_dict(state, assign=len(others) % 2 == 1)
        others.append(other)
    for other in others:
        assert str(other) == str(memory)
        assert all(same_states(memory, other))
        for method in ("scores", "recall", "retrieve"):
            assert torch.equal(getattr(other, method)(query), getattr(memory, method)(query)), method
        found, expected = (each.search(query, 5) for each in (other, memory))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(found.confidence, expected.confidence)


def fails(x):
    raise ah.AHopError("broken")


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m.fit(by="class"), "by must be one of pattern, label, got 'class'"),
    (lambda m: m.fit(by="label"), "the memory must have labels"),
    (lambda m: m.fit(seed="a"), "seed must be an integer .* 'a'"),
    (lambda m: m.fit((INDEX,)), "damage must be"),
    (lambda m: m.fit((INDEX, PATTERNS[INDEX], INDEX)), "damage must be"),
    (lambda m: m.fit((INDEX, PATTERNS)), r"damage must be index .* got \(160,\) and \(80, 10\)"),
    (lambda m: m.fit((INDEX + 1, PATTERNS[INDEX])), "index must be integers from 0 to 79, got .* 1 to 80"),
    (lambda m: m.fit((INDEX.double(), PATTERNS[INDEX])), "index must be integers"),
    (lambda m: m.fit((INDEX, None)), "query must be a tensor, an array or a list of numbers, got NoneType"),
    (lambda m: m.fit((INDEX[:1], torch.full((1, 10), torch.nan))), "query must have a known value .* row 0"),
    (lambda m: m.fit((INDEX[:2], torch.tensor([[0.0], [torch.inf]]).expand(2, 10))), "infinity in row 1"),
    (lambda m: m.fit(lambda x: x[:, :2]), "must .* got"),
    (lambda m: m.fit(lambda x: None), "must .* got"),
    (lambda m: m.fit(fails), "broken"),
    (lambda m: m.fit(lambda x: torch.full_like(x, torch.nan)), "damage must return finite .* got NaN only"),
    (lambda m: m.fit(lambda x: torch.full_like(x, torch.inf)), "damage must return finite .* got infinity"),
])  # fmt: skip
def test_an_error_leaves_a_fitted_memory_unchanged(call, message):
    memory = fitted()
    with pytest.raises(ah.AHopError, match=message):
        call(memory)
    assert all(same_states(memory, fitted()))


@pytest.mark.parametrize(("value", "count"), [(-9999.0, 1), (3e38, 3)])
def test_a_value_far_from_all_patterns_changes_neither_hits_nor_confidence(value, count):
    generator = torch.Generator().manual_seed(1)
    stored, foreign = torch.rand(300, 32, generator=generator), torch.rand(200, 32, generator=generator)
    memory = ah.AssociativeMemory(stored)
    memory.fit()
    assert memory.similarity.is_clamped
    known, limit = stored[:200].clone(), memory.threshold(0.01)
    known[:, :count], foreign[:, :count] = value, value
    hits = memory.search(known)
    assert torch.equal(hits.indices[:, 0], torch.arange(200))
    assert (hits.confidence[:, 0] > limit).float().mean() > 0.95
    assert (memory.search(foreign).confidence[:, 0] > limit).float().mean() < 0.05
    torch.testing.assert_close(memory.explain(known).sum(-1), hits.scores[:, 0], rtol=1e-4, atol=1e-4)


def test_a_value_counts_as_a_tenth_of_the_range_beyond_the_patterns_at_most():
    """Many spikes together would decide a score with products otherwise."""
    memory = fitted()
    assert memory.similarity.is_clamped
    (low, high), query = memory.patterns.aminmax(dim=0), memory.patterns[:9].clone()
    query[:, 1:] = high[1:] + (high - low)[1:] / 10
    scores = memory.search(query).scores
    query[:, 1:] = high[1:] + 3 * (high - low)[1:]
    torch.testing.assert_close(memory.search(query).scores, scores)


def test_patterns_that_are_added_far_from_the_others_are_found():
    memory = ah.AssociativeMemory(torch.rand(100, 8, generator=torch.Generator().manual_seed(0)))
    memory.similarity.set_(["l1"], [1.0], torch.ones(1, 8))
    far = 1000 * torch.rand(5, 8, generator=torch.Generator().manual_seed(1))
    memory.recall(far)  # the range of the patterns is kept until they change
    added = memory.add(far)
    assert torch.equal(memory.recall(far), added)


@pytest.mark.parametrize("labels", [None, [0, 1] * 40])
def test_a_fit_with_another_default_dtype(labels):
    torch.set_default_dtype(torch.float64)
    try:
        for patterns in (torch.rand(80, 8), torch.rand(80, 6, 6)):
            assert ah.AssociativeMemory(patterns.float(), labels=labels).fit().queries > 0
    finally:
        torch.set_default_dtype(torch.float32)


ODD_DAMAGES = (
    None,
    Replaced((0.0, 0.8)),
    Noisy(1.0),
    Missing(0.5),
    lambda x: -x,
    lambda x: x.roll(1, -1),
    lambda x: x[torch.randperm(len(x))],
)


@pytest.mark.parametrize("number", range(len(ODD_DAMAGES)))
def test_a_fit_loses_no_stored_record(number):
    """Copies of stored patterns are found after a fit, whatever the labels, the scales and the damage."""
    seed, damage = number % 2, ODD_DAMAGES[number]
    generator = torch.Generator().manual_seed(seed)
    count, dim = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((20, 150), (3, 24)))
    patterns = torch.randn(count, dim, generator=generator) * 10 ** (4 * torch.rand(dim, generator=generator) - 2)
    if seed % 2:
        patterns[:, : dim // 2] = patterns[:, : dim // 2].round()
    labels = None if seed else torch.randint(4, (count,), generator=generator)
    memory = ah.AssociativeMemory(patterns, labels=labels)
    report = memory.fit(damage, seed=seed)
    scores = memory.scores(patterns)
    assert (scores.diagonal() >= scores.amax(1)).all()
    assert dict(report.rows)["intact records"] == 1.0
    assert "intact records 1.000" in str(report)


def test_values_that_agree_equally_well_are_explained_equally():
    """Exact values tie: each adds as much as the others, and more than a wrong one."""
    patterns = random(300, 24)
    memory = ah.AssociativeMemory(patterns)
    memory.fit(Replaced((0.0, 0.6)))
    query = patterns[:100].clone()
    query[:, :8] = (query[:, :8] + 0.5) % 1.0
    reasons = memory.explain(query, index=torch.arange(100))
    assert (reasons[:, 8:].std(-1) < 1e-5 * reasons.abs().amax(-1)).all()
    assert (reasons[:, :8].amax(-1) < reasons[:, 8]).double().mean() > 0.95
    torch.testing.assert_close(reasons.sum(-1), memory.scores(query).diagonal())


def test_a_terminal_shows_what_a_fit_does(monkeypatch, capsys):
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit()
    assert capsys.readouterr().err == ""  # a file or a pipe
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    memory.fit(progress=False)
    assert capsys.readouterr().err == ""
    memory.fit()
    shown = capsys.readouterr().err
    assert "fit: solving for weights" in shown
    assert "fit: calibrating the confidence" in shown
    assert shown.endswith("\r\033[K")  # the line is empty again
