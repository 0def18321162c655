"""Search in an associative memory: the best patterns, ties, dtypes, NumPy arrays and errors."""

import numpy as np
import pytest
import torch

from ahop_layers.errors import AHopError
from ahop_layers.memory import scoring
from ahop_layers.memory import search as search_module
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.presets import PRESETS


def stable_sort(memory, x, k):
    scores, indices = memory.scores(x).detach().sort(dim=-1, descending=True, stable=True)
    return scores[..., :k], indices[..., :k]


@pytest.fixture(params=[1, 7, 60, 61, 2**21], ids=lambda size: f"block{size}")
def block(request, monkeypatch):
    """Patterns per block, for patterns of eight dimensions; nothing is concatenated."""
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 8 * request.param)
    monkeypatch.setattr(search_module, "RANKED_SCORES", 1)


@pytest.mark.parametrize("k", [1, 2, 10, 61])
@pytest.mark.parametrize("prior", [False, True])
def test_search_equals_a_full_sort(block, k, prior):
    memory = AssociativeMemory.preset("A-Hop", torch.randn(61, 8).double(), prior=prior)
    if prior:
        torch.nn.init.normal_(memory.prior, std=5.0)
    x = torch.randn(23, 8).double()
    scores, indices = memory.search(x, k)
    expected_scores, expected_indices = stable_sort(memory, x, k)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(scores, expected_scores)
    assert not scores.requires_grad
    assert torch.equal(memory.recall(x), indices[:, 0])


@pytest.mark.parametrize("k", [1, 2, 5, 30, 61])
def test_equal_scores_are_ordered_by_index(block, k):
    """Integers make all scores exact and most of them equal."""
    memory = AssociativeMemory(torch.randint(-1, 2, (61, 8)).float())
    x = torch.randint(-1, 2, (40, 8)).float()
    x[0] = 0  # all scores are equal
    for got, expected in zip(memory.search(x, k), stable_sort(memory, x, k), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("ranked", [1, 20 * 23, 2**21])
def test_concatenating_blocks_changes_nothing(ranked, monkeypatch):
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 8 * 7)
    monkeypatch.setattr(search_module, "RANKED_SCORES", ranked)
    monkeypatch.setattr(scoring, "QUERY_ROWS", 9)
    memory, x = AssociativeMemory(torch.randint(-2, 3, (61, 8)).float()), torch.randint(-2, 3, (23, 8)).float()
    for got, expected in zip(memory.search(x, 6), stable_sort(memory, x, 6), strict=True):
        assert torch.equal(got, expected)


def test_scores_are_ranked_in_bounded_blocks(monkeypatch):
    """The number of scores ranked at once does not depend on the number of patterns."""
    ranked = []
    top_of_block = search_module._top_of_block
    monkeypatch.setattr(search_module, "_top_of_block", lambda s, k: ranked.append(s.numel()) or top_of_block(s, k))
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 8 * 7)
    monkeypatch.setattr(search_module, "RANKED_SCORES", 100)
    for count in (50, 500):
        ranked.clear()
        AssociativeMemory(torch.randn(count, 8)).search(torch.randn(3, 8), 5)
        assert max(ranked) == 84  # four blocks of 21 scores
        assert sum(ranked) == 3 * count


def test_distinct_scores_are_ranked_by_one_topk(monkeypatch):
    """Only scores that equal the k-th largest need the slower ranking by index."""
    monkeypatch.setattr(search_module, "_first_of_block", lambda *args: pytest.fail("ranked by index"))
    memory = AssociativeMemory(torch.randn(300, 8).double())
    x = torch.randn(3, 8).double()
    for k in (2, 10, 299, 300):
        assert torch.equal(memory.search(x, k)[1], stable_sort(memory, x, k)[1])


@pytest.mark.parametrize("queries", [1, 2, 100, 10**6])
def test_blocks_on_a_gpu_are_large_for_few_queries(queries):
    """A GPU needs few large calls; the scores of a block stay bounded for many queries."""
    size = scoring.block_size(64, queries, "cuda")
    assert scoring.block_size(64, queries, "cpu") == 2**15 <= size <= 2**20
    assert size == 2**15 or size * queries <= scoring.BLOCK_SCORES
    assert queries > 2 or size == 2**20


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_search(name):
    memory, x = AssociativeMemory.preset(name, torch.randn(20, 8).double()), torch.randn(5, 8).double()
    for got, expected in zip(memory.search(x, 3), stable_sort(memory, x, 3), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("k", [1, 4])
def test_leading_dimensions_are_kept(shape, k):
    memory = AssociativeMemory(torch.randn(30, 8), similarity="dis")
    scores, indices = memory.search(torch.randn(shape), k)
    assert scores.shape == indices.shape == (*shape[:-1], k)
    assert indices.dtype == torch.int64


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("similarity", ["dot", "dis", "l1", "adaptive"])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
def test_queries_take_the_dtype_of_the_patterns(similarity, stored, asked):
    memory, x = AssociativeMemory(torch.randn(30, 8).to(stored), similarity), torch.randn(5, 8).to(asked)
    same = x.to(stored)
    for got, expected in zip(memory.search(x, 4), memory.search(same, 4), strict=True):
        assert torch.equal(got, expected)
    assert memory.search(x, 4)[0].dtype == stored
    for method in (memory.scores, memory.recall, memory.retrieve, memory.energy):
        assert torch.equal(method(x), method(same))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [np.float16, np.float32, np.float64])
def test_numpy_in_numpy_out(stored, asked):
    memory = AssociativeMemory.preset("A-Hop", torch.randn(30, 8).to(stored), prior=True)
    array = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(asked)
    x = torch.from_numpy(array)
    pairs = list(zip(memory.search(array, 4), memory.search(x, 4), strict=True))
    pairs += [(method(array), method(x)) for method in (memory.scores, memory.recall, memory.retrieve, memory.energy)]
    for got, expected in pairs:
        assert isinstance(got, np.ndarray)
        expected = expected.detach()
        np.testing.assert_array_equal(got, (expected.float() if stored == torch.bfloat16 else expected).numpy())


@pytest.mark.parametrize("kind", ["read-only", "reversed", "transposed", "empty"])
def test_any_layout_of_a_numpy_array(kind, recwarn):
    memory, array = AssociativeMemory(torch.randn(30, 8)), np.random.default_rng(0).normal(size=(8, 8))
    array.flags.writeable = kind != "read-only"
    array = {"reversed": array[::-1, ::-1], "transposed": array.T, "empty": array[:0]}.get(kind, array)
    expected = memory.search(torch.tensor(array.copy()), 3)[1]
    np.testing.assert_array_equal(memory.search(array, 3)[1], expected.numpy())
    assert not recwarn.list


@pytest.mark.parametrize("bad", [[], [40], [3, 17, 40], list(range(61))])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_ordered_as_in_a_sort(block, bad, value):
    patterns = torch.randint(0, 3, (61, 8)).float() + 1
    patterns[bad] = value
    memory, x = AssociativeMemory(patterns, check=False), torch.ones(2, 8)
    for k in (1, 2, 3, 4, 61):
        for got, expected in zip(memory.search(x, k), stable_sort(memory, x, k), strict=True):
            assert torch.equal(got.nan_to_num(7e30), expected.nan_to_num(7e30))


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda m: m.search(m.patterns, 0), "k must be an integer of at least 1, got 0"),
        (lambda m: m.search(m.patterns, -1), "k must be an integer of at least 1, got -1"),
        (lambda m: m.search(m.patterns, 2.0), "k must be an integer of at least 1, got 2.0"),
        (lambda m: m.search(m.patterns, 7), "k must be at most the number of patterns, 6, got 7"),
        (lambda m: m.search(torch.zeros(2, 3)), r"queries x must be \(..., d\) with the d = 4 of the patterns, got"),
        (lambda m: m.search(np.zeros((2, 3))), r"queries x must be \(..., d\) with the d = 4 of the patterns, got"),
        (lambda m: m.search(torch.tensor(1.0)), r"queries x must be \(..., d\) .* got \(\)"),
        (lambda m: m.search(np.zeros(())), r"queries x must be \(..., d\) .* got \(\)"),
        (lambda m: m.search([1.0]), "queries x must be a tensor, got list"),
        (lambda m: m.search(torch.zeros(2, 4).long()), "queries x must have a floating-point dtype, got torch.int64"),
        (lambda m: m.search(np.zeros((2, 4), int)), "queries x must have a floating-point dtype, got torch.int64"),
        (lambda m: m.search(np.array([["a"] * 4])), "queries x must have a floating-point dtype, got <U1"),
        (lambda m: m.search(torch.zeros(2, 4, device="meta")), "one device, got queries x on meta, patterns on cpu"),
    ],
)
def test_errors_name_queries_and_patterns(find, message):
    with pytest.raises(AHopError, match=message):
        find(AssociativeMemory(torch.rand(6, 4)))
