"""The default of a memory: its similarity and inverse temperature before a fit, and what a fit solves."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.solve import Learned, Report
from ahop_layers.variants import Missing, Noisy, Replaced

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_fit")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit_vectors(count, dim, seed=0):
    normal = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(normal, dim=-1)


def noisy(x):
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)


def finds_itself(memory):
    return torch.equal(memory.recall(memory.patterns), torch.arange(len(memory.patterns)))


def test_the_default_is_the_mean_of_saturating_bases():
    patterns, query = random(50, 8, dtype=torch.float64), random(5, 8, seed=1, dtype=torch.float64)
    memory = ah.AssociativeMemory(patterns)
    assert isinstance(memory.similarity, AutoSimilarity)
    widths = [
        width for name, width in zip(memory.similarity.names, memory.similarity.widths, strict=True) if name == "near"
    ]
    assert sorted(widths) == widths
    difference = (query[:, None] - patterns).abs()
    expected = torch.stack([(-difference / width).exp().sum(-1) for width in widths]).mean(0)
    torch.testing.assert_close(memory.scores(query), expected)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_stored_pattern_finds_and_retrieves_itself_at_any_scale(scale):
    memory = ah.AssociativeMemory(scale * (random(300, 16) - 0.5))
    assert finds_itself(memory)
    torch.testing.assert_close(memory.retrieve(memory.patterns), memory.patterns, rtol=0, atol=1e-3 * scale)
    query = memory.patterns.clone()
    query[:, :4] = 1e3 * scale  # wrong values cost the same however wrong they are
    assert finds_itself(memory)
    assert torch.equal(memory.recall(query), torch.arange(300))


def test_unit_vectors_are_retrieved_without_an_inverse_temperature():
    patterns, some = unit_vectors(500, 128), torch.arange(0, 500, 20)
    memory, damaged = ah.AssociativeMemory(patterns), patterns[some]
    damaged[:, :20], damaged[:, 20:40] = 1.0, torch.nan
    for query in (patterns[some], damaged):
        assert torch.equal(memory.recall(query), some)
        torch.testing.assert_close(memory.retrieve(query), patterns[some], rtol=0, atol=1e-3)
    assert ah.AssociativeMemory(patterns, beta=2.0).beta == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fitted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dtypes(dtype, fitted):
    memory = ah.AssociativeMemory(random(100, 12, dtype=torch.float64).to(dtype))
    if fitted:
        memory.fit(Replaced(0.3))
    query = memory.patterns[:9].clone()
    query[:, :3] = 0.5
    assert memory.scores(query).dtype == memory.retrieve(query).dtype == dtype
    assert memory.recall(query).tolist() == list(range(9))
    assert (
        memory.similarity.w.dtype == memory.beta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    if not fitted:
        torch.testing.assert_close(memory.retrieve(memory.patterns[:9]), memory.patterns[:9], rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_of_dimensions_keep_the_dtype_of_scores(dtype):
    memory = ah.AssociativeMemory(random(50, 6).to(dtype))
    report = Report((), "learned", 0, 0.0)
    memory.similarity.set_(Learned(("dis",), (1.0,), torch.full((6,), 2.0), torch.ones(1, 6), 1.0, report))
    scores = memory.scores(memory.patterns)
    assert scores.dtype == memory.search(memory.patterns)[0].dtype == dtype
    expected = -torch.cdist(memory.patterns.double(), memory.patterns.double()).square() / 4
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(scores.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_fitted_memory_keeps_its_weights_when_it_is_converted():
    memory = ah.AssociativeMemory(random(100, 12))
    memory.fit(Replaced(0.3))
    weight, widths = memory.similarity.w.detach().clone(), memory.similarity.widths.clone()
    for each in (memory.half(), memory.bfloat16(), memory.float()):
        assert torch.equal(each.similarity.w, weight)
        assert torch.equal(each.similarity.widths, widths)
    assert memory.double().similarity.w.dtype == torch.float64


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_constant_and_equal_patterns(dtype, fitted):
    for patterns in (random(1, 5), torch.ones(5, 4), torch.zeros(3, 1), random(1, 5).expand(2, 5)):
        patterns = patterns.to(dtype)
        memory = ah.AssociativeMemory(patterns)
        if fitted:
            memory.fit()
        assert memory.scores(patterns).isfinite().all()
        assert 0 < memory.beta < torch.inf
        assert torch.equal(memory.recall(patterns), torch.zeros(len(patterns)).long())
        torch.testing.assert_close(memory.retrieve(patterns), patterns)
        query = patterns.clone()
        query[:, 1:] = torch.nan
        torch.testing.assert_close(memory.retrieve(query), patterns)


def test_two_equal_patterns_share_the_weight():
    patterns = random(20, 8)
    patterns[7] = patterns[3]
    memory = ah.AssociativeMemory(patterns)
    scores, indices = memory.search(patterns[3], 3)
    assert set(indices[:2].tolist()) == {3, 7}
    assert scores[0] == pytest.approx(scores[1].item())
    torch.testing.assert_close(memory.retrieve(patterns[3]), patterns[3], rtol=0, atol=1e-3)


def test_constant_dimensions_change_nothing():
    patterns = random(60, 6)
    memory, wider = (
        ah.AssociativeMemory(each) for each in (patterns, torch.nn.functional.pad(patterns, (0, 4), value=3.0))
    )
    query = noisy(patterns)
    assert torch.equal(memory.recall(query), wider.recall(torch.nn.functional.pad(query, (0, 4), value=3.0)))


PATTERNS = random(80, 10, seed=3)
LABELS = torch.arange(80) % 6 * 2 + 1
INDEX = torch.arange(160) % 80
DAMAGES = {
    "none": None,
    "variant": Replaced((0.0, 0.6)),
    "function": noisy,
    "function with a generator": lambda x, generator: x + 0.1 * torch.rand(x.shape, generator=generator),
    "list": [Noisy(0.01), Missing(0.3), noisy],
    "pairs": (INDEX, noisy(PATTERNS[INDEX])),
    "arrays": (INDEX.numpy(), noisy(PATTERNS[INDEX]).double().numpy()),
    "few pairs": (INDEX[:5], noisy(PATTERNS[:5])),
    "pairs with NaN": (INDEX, Missing(0.3).corrupt(PATTERNS[INDEX], torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_kind_of_damage(name):
    memory = ah.AssociativeMemory(PATTERNS)
    before = memory.state_dict()["similarity.w"].clone()
    report = memory.fit(DAMAGES[name])
    assert dict(report.rows)["learned"] > 0.5
    fresh = Replaced(0.2).bind(PATTERNS).corrupt(PATTERNS, torch.Generator().manual_seed(6))
    if name not in ("none", "variant"):
        fresh = PATTERNS + 0.03 * torch.randn(80, 10, generator=torch.Generator().manual_seed(6))
    assert (memory.recall(fresh) == torch.arange(80)).double().mean() > 0.8
    assert not torch.equal(memory.similarity.w, before)
    assert memory.scores(PATTERNS).isfinite().all()


@pytest.mark.parametrize("std", [0.03, 0.1, 0.3])
def test_a_fit_with_noise_still_finds_the_stored_patterns(std):
    """A query without damage is easier than all queries of the fit."""
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit(Noisy(std**2))
    assert finds_itself(memory)


def test_a_fit_with_few_pairs_still_finds_the_stored_patterns():
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit(DAMAGES["few pairs"])
    assert finds_itself(memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "variant"])
def test_a_memory_with_labels_is_fitted_by_label(name):
    memory, same, other = (ah.AssociativeMemory(PATTERNS, labels=LABELS) for _ in range(3))
    memory.fit(DAMAGES[name])
    same.fit(DAMAGES[name], by="label")
    other.fit(DAMAGES[name], by="pattern")
    assert torch.equal(memory.similarity.w, same.similarity.w)
    assert not torch.equal(memory.similarity.w, other.similarity.w)


@pytest.mark.slow
def test_pairs_by_label_are_labels():
    centers = random(6, 10, seed=4)
    classes = torch.arange(80) % 6
    patterns, queries = (centers[classes] + 0.1 * random(80, 10, seed=seed) for seed in (5, 6))
    memory = ah.AssociativeMemory(patterns, labels=LABELS)
    report = memory.fit((LABELS, queries))
    assert dict(report.rows)["learned"] > 0.8
    assert (memory.classify(queries) == LABELS).double().mean() > 0.9
    fitted = ah.AssociativeMemory(patterns, labels=LABELS)
    fitted.fit((LABELS.numpy(), queries.numpy()), by="label")
    assert torch.equal(fitted.similarity.w, memory.similarity.w)
    memory.fit((torch.arange(80), noisy(patterns)), by="pattern")
    assert not torch.equal(fitted.similarity.w, memory.similarity.w)


@pytest.mark.slow
def test_a_fit_with_one_seed_gives_the_same_bits():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))  # the random numbers of the caller do not matter
        memory = ah.AssociativeMemory(PATTERNS)
        before = torch.get_rng_state()
        memory.fit(Replaced((0.0, 0.8)), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(memory.state_dict())
    again = ah.AssociativeMemory(PATTERNS)
    for _ in range(2):  # also where a fit starts from another one
        again.fit(Replaced((0.0, 0.8)))
    states.append(again.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name
        assert torch.equal(states[3][name], value), name
    assert not torch.equal(states[2]["similarity.w"], states[0]["similarity.w"])


def test_a_report_is_a_table():
    report = ah.AssociativeMemory(PATTERNS).fit(Replaced(0.3))
    first, *rows, last = str(report).splitlines()
    assert first == f"accuracy on {report.queries} held-out queries"
    assert re.fullmatch(r"fitted in \d+\.\d s", last)
    table = [line for line in rows if "does not pay" not in line]
    assert len(table) == len(report.rows)
    for line, (name, accuracy) in zip(table, report.rows, strict=True):
        assert line == f"{name:<12} {accuracy:.3f}"
    assert report.seconds > 0


def in_units(count, seed=0):
    return random(count, 10, seed=seed) * 10 ** torch.linspace(-3, 3, 10)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [lambda n, seed=0: random(n, 10, seed=seed), in_units], ids=["plain", "units"])
def test_a_fitted_memory_is_saved_and_loaded(make, assign, tmp_path):
    patterns, query = make(80), make(7, 1)
    memory = ah.AssociativeMemory(patterns)
    spread = patterns.std(0)
    memory.fit(lambda x, generator: x + 0.1 * spread * torch.randn(x.shape, generator=generator))
    assert make is not in_units or memory.similarity.units is not None
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    fresh, fitted = ah.AssociativeMemory(make(3, 2)), ah.AssociativeMemory(in_units(60, 3))
    fitted.fit(Replaced(0.3))
    others = [fresh, fitted, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))]
    for other in others[:2]:
        other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True), assign=assign)
    for other in others:
        assert other.beta == memory.beta
        assert str(other) == str(memory)
        for method in ("scores", "recall", "retrieve"):
            assert torch.equal(getattr(other, method)(query), getattr(memory, method)(query)), method
        for shortlist in (None, 20):
            for got, expected in zip(
                other.search(query, 5, shortlist), memory.search(query, 5, shortlist), strict=True
            ):
                assert torch.equal(got, expected)


def test_a_failed_load_leaves_the_scores_unchanged():
    memory, source, query = ah.AssociativeMemory(PATTERNS), ah.AssociativeMemory(in_units(80)), random(5, 10, seed=1)
    source.similarity.units = torch.linspace(0.5, 2.0, 10)
    source.similarity.w.data.fill_(1.0)
    before, text = memory.scores(query), str(memory)
    for state in (source.state_dict() | {"other": torch.zeros(3)}, source.state_dict() | {"beta": torch.zeros(3)}):
        with pytest.raises(RuntimeError, match=r"other|beta"):
            memory.load_state_dict(state)
        assert str(memory) == text
        assert torch.equal(memory.scores(query), before)


def test_a_failed_fit_leaves_the_memory_unchanged():
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit(Replaced(0.3))
    before = {name: value.clone() for name, value in memory.state_dict().items()}

    def broken(x):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        memory.fit(broken)
    with pytest.raises(ah.AHopError, match="infinity in row 1"):
        memory.fit((INDEX[:2], torch.tensor([[0.0], [torch.inf]]).expand(2, 10)))
    assert all(torch.equal(memory.state_dict()[name], value) for name, value in before.items())


def test_a_given_beta_is_kept():
    memory, free = (ah.AssociativeMemory(PATTERNS, beta=beta) for beta in (3.0, None))
    first = free.beta.item()
    for each in (memory, free):
        each.fit(Replaced(0.3))
    assert memory.beta == 3
    assert free.beta != first


def test_added_patterns_are_found_without_another_fit():
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit(Replaced(0.3))
    weight = memory.similarity.w.detach().clone()
    more = random(30, 10, seed=9)
    assert torch.equal(memory.recall(more[memory.add(more) - 80]), torch.arange(80, 110))
    assert torch.equal(memory.similarity.w, weight)


def test_a_prior_is_the_frequency_of_patterns_and_damage_leaves_it_even():
    memory = ah.AssociativeMemory(PATTERNS, prior=True)
    index = torch.cat([torch.arange(80), torch.full((160,), 7)])
    memory.fit((index, Noisy(0.1).corrupt(PATTERNS[index])))
    logits = memory.beta * memory.prior.detach()
    torch.testing.assert_close(logits[7] - logits[8], torch.tensor(162 / 2).log())
    assert torch.equal(logits[8:].min(), logits[8:].max())
    memory.fit(Replaced(0.3))
    assert not memory.prior.any()
    assert finds_itself(memory)


def test_inference_mode_and_no_grad():
    with torch.inference_mode():
        memory = ah.AssociativeMemory(PATTERNS)
        assert finds_itself(memory)
    memory = ah.AssociativeMemory(PATTERNS)
    with torch.no_grad():
        memory.fit(Replaced(0.3))
    assert memory.similarity.w.requires_grad
    assert finds_itself(memory)


def test_numpy_in_numpy_out():
    memory = ah.AssociativeMemory(PATTERNS.numpy())
    assert isinstance(memory.retrieve(PATTERNS.numpy()), np.ndarray)
    np.testing.assert_array_equal(memory.recall(PATTERNS.numpy()), np.arange(80))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.fit(epochs=5), "fit solves similarity='auto' without epochs, lr and batch, got epochs=5"),
        (lambda m: m.fit(lr=0.1, batch=3), "got lr=0.1, batch=3"),
        (lambda m: m.fit(by="class"), "by must be one of pattern, label, got 'class'"),
        (lambda m: m.fit(by="label"), "the memory must have labels"),
        (lambda m: m.fit(seed="a"), "seed must be an integer .* 'a'"),
        (lambda m: m.fit(5), "damage must be a variant, a function or a list of these, got 5"),
        (lambda m: m.fit([]), "parts must be a list of at least one damage"),
        (lambda m: m.fit((INDEX,)), "data must be"),
        (lambda m: m.fit((INDEX, PATTERNS[INDEX], INDEX)), "data must be"),
        (lambda m: m.fit((INDEX, PATTERNS)), r"data must be index .* got \(160,\) and \(80, 10\)"),
        (lambda m: m.fit((INDEX + 1, PATTERNS[INDEX])), "index must be integers from 0 to 79, got .* 1 to 80"),
        (lambda m: m.fit((INDEX.double(), PATTERNS[INDEX])), "index must be integers"),
        (lambda m: m.fit((INDEX, None)), "query must be a tensor, got NoneType"),
        (lambda m: m.fit((INDEX[:1], torch.full((1, 10), torch.nan))), "query must have a known value .* row 0"),
        (lambda m: m.fit(lambda x: x[:, :2]), "must .* got"),
        (lambda m: m.fit(lambda x: None), "must .* got"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ah.AHopError, match=message):
        call(ah.AssociativeMemory(PATTERNS))


@pytest.mark.parametrize(
    "damage",
    [lambda x: torch.full_like(x, torch.nan), lambda x: torch.full_like(x, torch.inf)],
    ids=["NaN", "infinity"],
)
def test_damage_that_leaves_nothing_is_refused(damage):
    memory = ah.AssociativeMemory(PATTERNS)
    before = memory.scores(PATTERNS)
    with pytest.raises(ah.AHopError):
        memory.fit(damage)
    assert torch.equal(memory.scores(PATTERNS), before)
