"""Search with a shortlist: the first stage, the second stage, bounded memory, FAISS and errors."""

import copy
import sys
from functools import partial

import pytest
import torch
from new_tensors import LargestNewTensor

import ahop_layers as ah
from ahop_layers.memory import search as search_module
from ahop_layers.memory import shortlist as shortlist_module
from ahop_layers.variants import Mixed
from tests.samples import refuses

N, D = 3000, 16
NORMALIZED = ah.Blocks(torch.tensor([0, 1, 2, 3] * 4), normalize=True)
MEMORIES = {
    "A-Hop": lambda p: ah.AssociativeMemory.preset("A-Hop", p, debias=True, init="uniform"),
    "l1": lambda p: ah.AssociativeMemory.preset("A-Hop", p, bases=("l1",), init="uniform", prior=True),
    "blocks": lambda p: ah.AssociativeMemory.preset("A-Hop", p, bases=("l1", "dot"), blocks=NORMALIZED),
    "table": lambda p: ah.AssociativeMemory.preset("A-Hop", p, table=True),
    "U-Hop": lambda p: ah.AssociativeMemory.preset("U-Hop", p),
    "K-Hop": lambda p: ah.AssociativeMemory.preset("K-Hop", p),
    "function": lambda p: ah.AssociativeMemory(p, lambda query, key: -torch.cdist(query, key).pow(1.5)),
}


def patterns(count=N):
    return torch.rand(count, D) * 2 - 1


def recall(memory, x, m, k=1):
    """Returns the fraction of the k patterns of an exact search that a search with a shortlist finds."""
    exact, found = memory.search(x, k)[1], memory.search(x, k, shortlist=m)[1]
    return (exact[..., None] == found[..., None, :]).any(-1).double().mean().item()


@pytest.mark.parametrize("similarity", ["dot", "dis"])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_first_stage_of_the_fixed_similarities_is_exact(similarity, spread):
    stored = (patterns().double() + 3) * torch.exp(spread * torch.randn(N, 1).double())
    memory, x = ah.AssociativeMemory(stored, similarity), stored[:20] + 0.1
    torch.testing.assert_close(memory.search(x, 10, shortlist=10), memory.search(x, 10))


@pytest.mark.parametrize("name", MEMORIES)
def test_the_shortlist_has_what_a_search_finds(name):
    memory = MEMORIES[name](patterns())
    x = memory.patterns[::100] + 0.1 * torch.randn(30, D)
    assert recall(memory, x, 100) >= 0.96
    scores, indices = memory.search(x, 5, shortlist=100)
    torch.testing.assert_close(scores, memory.scores(x).detach().gather(-1, indices))
    assert bool((scores.diff(dim=-1) <= 0).all())
    assert memory.search(x[:0], 5, shortlist=100)[1].shape == (0, 5)
    assert all(map(torch.equal, memory.search(x, 7, shortlist=10 * N), memory.search(x, 7)))  # of all patterns
    if name in ("A-Hop", "U-Hop"):
        half = MEMORIES[name](memory.patterns.bfloat16())
        assert recall(half, half.patterns[::100], 200) >= 0.96
        assert half.search(x, shortlist=5)[0].dtype == torch.bfloat16


def test_outliers_count_little_in_the_first_stage():
    """A query with outliers is far from its pattern; weights of the first stage follow those of the similarity."""
    variant, stored = Mixed(0.4, low=-6, high=6), patterns()
    memory = ah.AssociativeMemory.preset("A-Hop", stored, init=torch.tensor([[1.0] * 4 + [0.0] * 12, [0.0] * 16]))
    index, query = variant.sample(stored, 200, torch.Generator().manual_seed(0))
    distance = torch.cdist(query, stored).topk(50, largest=False).indices
    nearest = (distance == index[:, None]).any(-1).double().mean()
    found = (memory.search(query, 50, shortlist=50)[1] == index[:, None]).any(-1).double().mean()
    assert nearest < 0.5
    assert found > 0.9


def test_the_bias_is_removed_and_the_prior_counts():
    memory = ah.AssociativeMemory.preset("A-Hop", patterns().double(), debias=True, prior=True, init="dis")
    with torch.no_grad():
        memory.similarity.bias.fill_(2.0)
        memory.prior[7] = 100.0
    assert recall(memory, memory.patterns[::100] + 2.1, 20, k=10) == 1
    assert memory.search(memory.patterns[:5] + 2, shortlist=2)[1].flatten().tolist() == [7] * 5


def test_equal_scores_are_ordered_by_index():
    memory = ah.AssociativeMemory(patterns(40).repeat(3, 1), "dis")
    indices = memory.search(memory.patterns[:40], 3, shortlist=6)[1]
    assert torch.equal(indices, torch.arange(40)[:, None] + torch.tensor([0, 40, 80]))


def test_a_shortlist_modulates_matrices_of_patterns():
    stored = torch.randn(500, 8) * torch.rand(500, 1) * 3
    query = stored[:50] + torch.randn(50, 8)
    modulations = (partial(torch.nn.functional.normalize, dim=dim) for dim in (1, -1))
    assert torch.equal(*(ah.AssociativeMemory(stored, modulation=each).search(query, 3, 9)[1] for each in modulations))


def test_inference_mode_keeps_later_gradients():
    memory = MEMORIES["A-Hop"](patterns())
    with torch.inference_mode():
        for each in (memory, ah.AssociativeMemory(patterns(), "dis")):
            assert each.search(each.patterns[:3], shortlist=20)[1].flatten().tolist() == [0, 1, 2]
    memory.scores(patterns(2)).sum().backward()
    assert all(parameter.grad is not None for parameter in memory.parameters())


def test_norms_follow_the_patterns():
    memory = ah.AssociativeMemory(patterns(), "dis")
    memory.search(patterns(1), shortlist=5)
    memory.patterns.mul_(torch.linspace(1, 3, N)[:, None])
    assert recall(memory, patterns(10), 5, k=5) == 1


def test_memory_is_bounded(monkeypatch):
    """No tensor is as large as queries x patterns, or as queries x shortlist x dimensions."""
    memory, x = MEMORIES["A-Hop"](patterns(2000).double()), torch.randn(20, D).double()
    expected = memory.search(x, 3, shortlist=200)[1]
    monkeypatch.setattr(search_module, "BLOCK_ELEMENTS", 2**13)
    monkeypatch.setattr(shortlist_module, "SAMPLE_ELEMENTS", 2**13)
    monkeypatch.setattr(shortlist_module, "FIRST_STAGE_SCORES", 2**13)
    monkeypatch.setattr("ahop_layers.memory.arrays.RANKED_SCORES", 2**13)
    plain = ah.AssociativeMemory(memory.patterns)
    with LargestNewTensor() as largest:
        assert torch.equal(memory.search(x, 3, shortlist=200)[1], expected)
        plain.search(x, 3)
    assert largest.elements <= 2**13 + 20 * 200  # far less than 20 x 2,000 and 20 x 200 x 16


@pytest.mark.parametrize(("find", "message"), [
    (lambda m, x: m.search(x, 5, shortlist=4), "shortlist must be at least k = 5, got 4"),
    (lambda m, x: m.search(x, shortlist=2.0), r"shortlist must be an integer of at least 1, got 2\.0"),
    (lambda m, x: m.build_index(metric="l1"), "metric must be one of dis, dot, got 'l1'"),
    (
        lambda m, x: ah.AssociativeMemory(x, lambda q, k: (q @ k.T).detach()).search(x, shortlist=3),
        "shortlist needs a similarity that is differentiable in the patterns",
    ),
])  # fmt: skip
def test_errors(find, message):
    refuses(message, find, MEMORIES["A-Hop"](patterns(50)), patterns(50))


@pytest.mark.parametrize(("name", "description"), [("A-Hop", "Flat"), ("K-Hop", "HNSW16"), ("U-Hop", "IVF16,Flat")])
def test_an_index_finds_the_shortlist(name, description):
    pytest.importorskip("faiss")
    memory = MEMORIES[name](patterns())
    x = memory.patterns[::100] + 0.1 * torch.randn(30, D)
    index = memory.build_index(description)
    if description.startswith("IVF"):
        index.nprobe = 8
    assert recall(memory, x, 100) >= 0.9
    copied = copy.deepcopy(memory)
    assert recall(copied, x, 100) >= 0.96  # without the index
    memory.add(patterns(3))
    message = r"the index must be that of the stored patterns, .* call build_index again"
    refuses(message, memory.search, x, shortlist=100)


def test_errors_of_an_index_and_its_removal(monkeypatch):
    pytest.importorskip("faiss")
    memory = MEMORIES["A-Hop"](patterns())
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "faiss", None)
        refuses(r"build_index needs FAISS, .* install ahop-layers\[search\]", memory.build_index)
    refuses("description must be that of a FAISS index, got 'Nonsense'", memory.build_index, "Nonsense")
    weighted = ah.AssociativeMemory(patterns(), "dis", prior=True)
    weighted.build_index("Flat")
    assert weighted.search(weighted.patterns[:2], shortlist=5)[1].flatten().tolist() == [0, 1]
    weighted.prior.data[3] = 9.0
    refuses("an index needs equal priors, got different ones", weighted.search, weighted.patterns[:2], shortlist=5)
    memory.build_index("IVF64,Flat").nprobe = 1
    x = memory.patterns[:5].clone()
    refuses(r"the index must find at least k = 200 patterns .* set its nprobe", memory.search, x, 200, shortlist=400)
    x[1, 2] = torch.inf
    refuses("queries x must not be infinite, got infinity in row 1", memory.search, x, 200, shortlist=400)
    assert memory.build_index(None) is None
    assert memory.search(memory.patterns[:5], 200, shortlist=400)[1].shape == (5, 200)


@pytest.mark.parametrize("shape", [(16,), (8, 8)])
def test_a_memory_of_inference_mode_has_shortlists(shape):
    patterns = torch.rand(40, *shape)
    with torch.inference_mode():
        memory = ah.AssociativeMemory(patterns)
        inside = memory.search(patterns[:3], k=2, shortlist=10).indices
    assert torch.equal(memory.search(patterns[:3], k=2, shortlist=10).indices, inside)
