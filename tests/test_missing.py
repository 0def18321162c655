"""Memories with unknown values: NaN in queries and in stored patterns."""

import copy

import numpy as np
import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory import scoring
from ahop_layers.ops import reference

SIMILARITIES = ["auto", "dot", "dis", "l1", "adaptive"]
LABELS = torch.arange(40) % 5 * 3 - 4
BY_LABEL = ("class_scores", "classify")
METHODS = ("scores", "recall", "retrieve", *BY_LABEL)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unknown(x, share, seed=1):
    """Makes a share of the values unknown, but not the first of a row."""
    gone = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    gone[..., 0] = False
    return x.masked_fill(gone, torch.nan)


def make(similarity, patterns, **keywords):
    """A memory with labels whose weights, if there are any, depend on ranks."""
    memory = ah.AssociativeMemory(patterns, similarity, labels=LABELS[: len(patterns)], **keywords)
    if isinstance(memory.similarity, ah.AdaptiveSimilarity):
        with torch.no_grad():
            for index, parameter in enumerate(memory.similarity.parameters()):
                parameter.copy_(random(*parameter.shape, seed=10 + index) / parameter.shape[-1])
        if similarity == "auto":
            memory.similarity.refresh()
    return memory


def by_hand(memory, query):
    """Scores ``(L, N)`` from the formula of the reference in float64."""
    similarity, patterns = memory.similarity, memory.patterns.double()
    if isinstance(similarity, ah.AdaptiveSimilarity):
        folded = reference.fold(similarity.footprint_weight().detach().double())
        widths = None if similarity.widths is None else similarity.widths.double()
        return reference.missing_similarity(query.double(), patterns, folded, similarity.names, widths=widths)
    base = {"dot_product": "dot", "negative_distance": "dis", "negative_manhattan": "l1"}[similarity.__name__]
    return reference.missing_similarity(query.double(), patterns, torch.ones(1, patterns.shape[1]).double(), (base,))


def check(memory, query):
    """Every result follows from the scores by hand."""
    scores, patterns = by_hand(memory, query), memory.patterns
    torch.testing.assert_close(memory.scores(query), scores)
    assert torch.equal(memory.recall(query), scores.argmax(-1))
    for shortlist in (None, len(patterns)):
        torch.testing.assert_close(memory.search(query, 4, shortlist), tuple(scores.topk(4)))
    logits = memory.beta * scores
    expected = torch.stack([logits[:, memory.labels == label].logsumexp(-1) for label in memory.classes], -1)
    torch.testing.assert_close(memory.class_scores(query), expected)
    assert torch.equal(memory.classify(query), memory.classes[expected.argmax(-1)])
    weights, known = logits.softmax(-1), (~patterns.isnan()).double()
    average = weights @ patterns.nan_to_num(0.0) / (weights @ known)
    torch.testing.assert_close(memory.retrieve(query), average)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(("asked", "stored"), [(0.4, 0.0), (0.0, 0.3), (0.4, 0.3)], ids=["queries", "patterns", "both"])
def test_results_are_those_of_the_known_values(similarity, asked, stored, monkeypatch):
    memory, query = make(similarity, unknown(random(40, 9), stored)), unknown(random(7, 9, seed=2), asked, 3)
    check(memory, query)
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 9 * 7)  # NaN in some blocks alone
    monkeypatch.setattr(scoring, "QUERY_ROWS", 3)
    check(memory, query)


@pytest.mark.parametrize("base", ["dot", "dis", "l1"])
def test_a_fixed_similarity_scales_the_sum_of_the_known_values(base):
    patterns, query = unknown(random(20, 6), 0.3), unknown(random(5, 6, seed=2), 0.3, 3)
    value = {"dot": lambda q, k: q * k, "dis": lambda q, k: -((q - k) ** 2), "l1": lambda q, k: -(q - k).abs()}[base]
    expected = 6 * value(query[:, None], patterns).nanmean(-1)
    torch.testing.assert_close(ah.AssociativeMemory(patterns, base).scores(query), expected)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_pairs_without_a_common_value_score_minus_infinity(similarity):
    patterns = random(40, 4).abs()
    patterns[:20, :2] = torch.nan
    patterns[20:, 2:] = torch.nan
    memory, query = make(similarity, patterns), random(3, 4, seed=2).abs()
    query[:, 2:] = torch.nan
    scores = memory.scores(query)
    assert (scores[:, :20] == -torch.inf).all()
    assert scores[:, 20:].isfinite().all()
    assert (memory.recall(query) >= 20).all()
    assert not memory.class_scores(query).isnan().any()
    retrieved = memory.retrieve(query)
    assert retrieved[:, :2].isfinite().all()
    assert retrieved[:, 2:].isnan().all()  # no pattern with a positive weight knows them


def nan_euclidean(query, patterns):
    """The index of the nearest pattern by the distance of scikit-learn: the known squares, scaled to all dimensions."""
    return (query[:, None] - patterns).square().nanmean(-1).argmin(-1)


def accuracy(found):
    return (found == torch.arange(len(found))).double().mean().item()


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_missing_values_are_found_at_least_as_often_as_by_nan_euclidean(share):
    patterns = (3 * random(1000, 10, dtype=torch.float32)).round()  # several patterns share the known values
    memory, query = ah.AssociativeMemory(patterns), unknown(patterns[:200], share, 3)
    nearest = accuracy(nan_euclidean(query, patterns))
    assert accuracy(memory.recall(query)) >= nearest
    patterns = random(300, 24, dtype=torch.float32)
    memory, query = ah.AssociativeMemory(patterns), unknown(patterns[:100], share, 3)
    assert accuracy(memory.recall(query)) == accuracy(nan_euclidean(query, patterns)) == 1
    query[:, 0] = 10.0  # known, but wrong
    assert accuracy(memory.recall(query)) > 0.9 > 0.3 > accuracy(nan_euclidean(query, patterns))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_fit_finds_noisy_and_missing_values_as_often_as_nan_euclidean(share, small_fit):
    patterns = random(300, 24, dtype=torch.float32)
    query = unknown(patterns + 0.9 * random(300, 24, seed=2, dtype=torch.float32), share, 3)
    memory = ah.AssociativeMemory(patterns)
    memory.fit([ah.variants.Noisy(0.81), ah.variants.Missing((0.0, 0.8))])
    nearest = accuracy(nan_euclidean(query, patterns))
    assert 0.3 < nearest < 1
    assert accuracy(memory.recall(query)) >= nearest - 0.03  # Euclid is the best score for this noise


def test_retrieved_values_are_averaged_over_the_patterns_that_know_them():
    patterns = torch.tensor([[0.0, 1.0, torch.nan], [0.0, 3.0, 5.0], [9.0, torch.nan, 8.0]]).double()
    memory = ah.AssociativeMemory(patterns, "dis", beta=1.0)
    query = torch.tensor([0.0, torch.nan, torch.nan]).double()
    far = torch.tensor(-3 * 81.0).double().exp()  # the weight of the last pattern
    expected = torch.stack([9 * far / (2 + far), torch.tensor(2.0).double(), (5 + 8 * far) / (1 + far)])
    torch.testing.assert_close(memory.retrieve(query), expected)


@pytest.mark.parametrize("separation", ["identity", "polynomial", "exponential"])
def test_a_separation_without_normalized_weights_keeps_the_scale_of_complete_values(separation):
    """A value that all patterns know is retrieved as if the others were known as well."""
    patterns = random(6, 4)
    patterns[:, 3] = 0.0  # adds nothing to a dot product
    gaps = patterns.clone()
    gaps[2, 3] = torch.nan
    query = random(5, 4, seed=2)
    query[:, 3] = 0.0
    memory, complete = (ah.AssociativeMemory(each, "dot", separation) for each in (gaps, patterns))
    weights = complete.separation(memory.scores(query))
    torch.testing.assert_close(memory.retrieve(query)[:, :3], weights @ patterns[:, :3])


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_query_without_a_known_value_is_refused_with_its_row(similarity):
    memory, query = make(similarity, random(40, 4)), random(5, 4)
    query[3] = torch.nan
    for method in ("search", *METHODS):
        with pytest.raises(ah.AHopError, match="queries x must have a known value in each row, got NaN only in row 3"):
            getattr(memory, method)(query)
    with pytest.raises(ah.AHopError, match="NaN only in row 0"):
        memory.recall(query[3])


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_rows_without_nan_do_not_depend_on_the_others(similarity):
    patterns, query = random(40, 9, dtype=torch.float32), random(8, 9, seed=2, dtype=torch.float32)
    memory, mixed = make(similarity, patterns), query.clone()
    mixed[::2] = unknown(mixed[::2], 0.5, 3)
    for method in METHODS:
        torch.testing.assert_close(getattr(memory, method)(mixed)[1::2], getattr(memory, method)(query)[1::2])
    for shortlist in (None, 15):
        mixed_found, found = (memory.search(each, 3, shortlist) for each in (mixed, query))
        torch.testing.assert_close(mixed_found[0][1::2], found[0][1::2])
        assert torch.equal(mixed_found[1][1::2], found[1][1::2])


@pytest.mark.parametrize("similarity", ["auto", "dot", "dis", "l1"])
def test_a_shortlist_finds_the_best_of_the_known_values(similarity):
    patterns = unknown(random(400, 16), 0.1)
    patterns = patterns / patterns.nan_to_num(0.0).norm(dim=-1, keepdim=True)
    query = unknown(patterns[:50], 0.2, 3)
    memory = ah.AssociativeMemory(patterns, similarity)
    scores, found = memory.search(query, 1, shortlist=150)
    exact, best = memory.search(query)
    assert (found == best).double().mean() > 0.9
    torch.testing.assert_close(scores[found == best], exact[found == best])


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_memories_with_nan_are_saved_loaded_copied_and_extended(similarity, tmp_path):
    patterns, query = unknown(random(40, 6, dtype=torch.float32), 0.3), unknown(random(4, 6, seed=2).float(), 0.3, 3)
    memory = make(similarity, patterns)
    expected = {method: getattr(memory, method)(query) for method in METHODS}

    def check_equal(other):
        for method, value in expected.items():
            assert torch.equal(getattr(other, method)(query), value), method

    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    loaded = make(similarity, random(3, 6, seed=5, dtype=torch.float32))
    loaded.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    check_equal(loaded)
    check_equal(copy.deepcopy(memory))
    grown = make(similarity, patterns[:25])
    grown.load_state_dict({**memory.state_dict(), "patterns": patterns[:1].nan_to_num(0.0), "labels": LABELS[:1]})
    grown.add(patterns, labels=LABELS)
    grown.remove([0])
    check_equal(grown)
    clean = make(similarity, random(3, 6, seed=5, dtype=torch.float32))
    loaded.load_state_dict(clean.state_dict())
    assert torch.equal(loaded.scores(query), clean.scores(query))


def test_a_failed_load_keeps_unknown_values():
    patterns, query = unknown(random(8, 4), 0.3), random(3, 4, seed=2)
    memory, complete = (ah.AssociativeMemory(each, "dis", prior=True) for each in (patterns, random(8, 4, seed=3)))
    before = memory.scores(query)
    with pytest.raises(ah.AHopError, match="prior must be"):
        memory.load_state_dict(complete.state_dict() | {"prior": torch.zeros(3)})
    assert torch.equal(memory.scores(query), before)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_numpy_in_numpy_out(similarity):
    patterns, query = unknown(random(40, 6), 0.2), unknown(random(4, 6, seed=2), 0.3, 3)
    memory, plain = make(similarity, patterns.numpy()), make(similarity, patterns)
    for method in METHODS:
        found = getattr(memory, method)(query.numpy())
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, getattr(plain, method)(query).detach().numpy())
    for shortlist in (None, 10):
        for found, expected in zip(
            memory.search(query.numpy(), 3, shortlist), plain.search(query, 3, shortlist), strict=True
        ):
            np.testing.assert_array_equal(found, expected.detach().numpy())
    memory.add(patterns.numpy(), labels=LABELS.numpy())
    assert memory.scores(query.numpy()).shape == (4, 80)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_other_dtypes(similarity, dtype):
    patterns, query = unknown(random(40, 6), 0.2).to(dtype), unknown(random(4, 6, seed=2), 0.3, 3).to(dtype)
    memory = make(similarity, patterns)
    scores = memory.scores(query)
    assert scores.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(scores.double(), by_hand(memory, query), rtol=tolerance, atol=8 * tolerance)
    assert memory.retrieve(query).isfinite().all()


def test_gradients_of_known_values_are_finite():
    memory = make("adaptive", unknown(random(40, 6), 0.2))
    query = unknown(random(4, 6, seed=2), 0.3, 3).requires_grad_()
    (memory(query).square().sum() + memory.class_scores(query).sum()).backward()
    known = ~query.detach().isnan()
    assert query.grad[known].isfinite().all()
    assert query.grad[known].abs().sum() > 0
    assert all(parameter.grad.isfinite().all() for parameter in memory.similarity.parameters())


@pytest.mark.parametrize("stored", [0.0, 0.2])
@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_other_similarities_are_trained_with_unknown_values(stored):
    patterns = unknown(random(30, 8, dtype=torch.float32), stored)
    memory = ah.AssociativeMemory(patterns, "adaptive")
    losses = memory.fit(ah.variants.Missing((0.0, 0.6)), epochs=20, batch=64, progress=False)
    assert losses.isfinite().all()
    assert losses[-5:].mean() < losses[:5].mean()


def test_a_bias_is_learned_from_known_values():
    patterns, shift = random(60, 8, dtype=torch.float32), torch.linspace(-1, 1, 8)
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, init="dis", debias=True)
    index = torch.arange(600) % 60
    memory.fit((index, unknown(patterns[index] + shift, 0.3)), epochs=3, lr=1e-3, progress=False)
    torch.testing.assert_close(memory.similarity.bias.detach(), shift, atol=0.05, rtol=0)
