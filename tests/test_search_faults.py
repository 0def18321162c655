"""Associative memories at the edges of their domain: scales, dtypes, sizes, and kinds of arguments."""

import copy

import numpy as np
import pytest
import torch
from torch import distributed

from ahop_layers.errors import AHopError
from ahop_layers.memory import memory as memory_module
from ahop_layers.memory import scoring
from ahop_layers.memory.estimates import estimate_bias
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.shards import Shard
from ahop_layers.variants import Noisy


def noisy_pairs(patterns, n, std=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(patterns), (n,), generator=generator)
    return index, patterns[index] + std * torch.randn(n, patterns.shape[1], generator=generator).to(patterns)


@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_fit_does_not_depend_on_the_scale_if_the_initial_scores_do_not_help():
    patterns = torch.randn(60, 16)
    index, query = noisy_pairs(-patterns, 400)  # the dot product of a query is smallest for its own pattern
    memories = [AssociativeMemory.preset("A-Hop", patterns * scale) for scale in (1.0, 2.0**-10, 2.0**10)]
    for memory, scale in zip(memories, (1.0, 2.0**-10, 2.0**10), strict=True):
        memory.fit((index, query * scale), epochs=2, batch=128, progress=False)
        assert memory.beta.item() * scale**2 == pytest.approx(memories[0].beta.item(), rel=1e-3)
        found = (memory.recall(query * scale) == memories[0].recall(query)).double().mean()
        assert found > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_of_one_pattern_have_a_bias_of_their_mean_difference(dtype):
    patterns = torch.randn(20, 8, dtype=dtype) * 1000
    _, query = noisy_pairs(patterns[3:4], 101)  # 101 equal rows have a rounded mean
    bias = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
    estimate_bias(bias, (torch.full((101,), 3), query + 7), patterns, 1, torch.Generator())
    torch.testing.assert_close(bias.detach(), (query + 7).mean(0) - patterns[3], atol=1e-3, rtol=0)


def test_a_fit_that_ends_worse_than_it_began_warns(monkeypatch):
    patterns = torch.randn(20, 8)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", debias=True, beta=4.0)
    monkeypatch.setattr(memory_module, "estimate_bias", lambda bias, *_: bias.data.fill_(10.0))
    with pytest.warns(UserWarning, match="did not improve the loss"):
        memory.fit(noisy_pairs(patterns, 100, 0.5), epochs=3, lr=1e-3, progress=False)


def test_a_state_dict_without_the_memory_keeps_its_inverse_temperature():
    model = torch.nn.Sequential(AssociativeMemory(torch.randn(5, 3), beta=4.0), torch.nn.Linear(3, 3))
    model.load_state_dict({"1.bias": torch.zeros(3)}, strict=False)
    assert model[0].beta == 4
    adaptive = AssociativeMemory.preset("A-Hop", torch.randn(5, 3), beta=4.0)
    adaptive.load_state_dict({"similarity.w": torch.zeros(2, 3)}, strict=False)
    assert adaptive.beta == 4


def test_a_loaded_beta_is_kept_by_a_memory_that_was_given_one():
    state = AssociativeMemory.preset("A-Hop", torch.randn(20, 8), beta=7.0).state_dict()
    memory = AssociativeMemory.preset("A-Hop", torch.randn(3, 8), beta=1.0)
    memory.load_state_dict(state)
    memory.fit(Noisy(std=0.3), epochs=2, progress=False)
    assert memory.beta == 7


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dim", [1, 2, 64, 2**23])
@pytest.mark.parametrize("queries", [0, 1, 200, 256])
def test_a_block_has_a_bounded_number_of_scores(dim, queries, device):
    size = scoring.block_size(dim, queries, device)
    assert size >= 1
    assert size * queries <= scoring.BLOCK_SCORES


def test_search_and_classification_compile_to_one_graph():
    patterns = torch.randint(-1, 2, (40, 4)).double()  # many equal scores
    memory, x = AssociativeMemory(patterns, labels=torch.arange(40) % 3), torch.randint(-1, 2, (5, 4)).double()

    def found(x):
        return *memory.search(x, 3), memory.recall(x), memory.class_scores(x)

    compiled = torch.compile(found, fullgraph=True, backend="eager")(x)
    for result, expected in zip(compiled, found(x), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("similarity", ["dot", "dis", "l1", "adaptive", lambda x, y: x @ y.mT])
def test_a_shortlist_without_queries_is_empty(similarity):
    memory = AssociativeMemory(torch.randn(50, 8), similarity)
    assert [part.shape for part in memory.search(torch.zeros(0, 8), k=2, shortlist=5)] == [(0, 2), (0, 2)]


def test_a_shortlist_modulates_matrices_of_patterns():
    class Normalize(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, patterns):
            return torch.nn.functional.normalize(patterns, dim=self.dim)

    patterns = torch.randn(500, 8) * torch.rand(500, 1) * 3
    query = patterns[:50] + torch.randn(50, 8)
    found = [AssociativeMemory(patterns, modulation=Normalize(dim)).search(query, 3, 9)[1] for dim in (1, -1)]
    assert torch.equal(*found)


def test_half_precision_memories_have_an_inverse_temperature_beyond_float16():
    patterns = torch.nn.functional.normalize(torch.randn(50, 32), dim=-1) * 0.01
    labels = torch.arange(50) % 5
    plain = AssociativeMemory(patterns, labels=labels, beta=2e5)
    for memory in (AssociativeMemory(patterns.half(), labels=labels, beta=2e5), copy.deepcopy(plain).half()):
        assert memory.beta == 2e5
        assert memory.double().beta.dtype == torch.float64
        memory.half()
        for result, expected in (
            (memory.retrieve(patterns), plain.retrieve(patterns)),
            (memory.class_scores(patterns), plain.class_scores(patterns)),
            (memory.energy(patterns), plain.energy(patterns)),
        ):
            torch.testing.assert_close(result.float(), expected, atol=2e-5, rtol=0.1)
        assert memory.retrieve(patterns).dtype == memory.energy(patterns).dtype == torch.float16


def test_classes_of_half_precision_are_compared_in_float32():
    memory = AssociativeMemory(torch.eye(3).half() * 100, labels=[4, 5, 6], beta=1e3)
    x = torch.tensor([[50.0, 100.0, 75.0]])
    assert memory.class_scores(x).dtype == torch.float16
    assert memory.classify(x) == 5


@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_numpy_arrays_are_accepted_everywhere():
    patterns = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    labels = np.arange(20) % 3
    for memory in (
        AssociativeMemory(patterns, "adaptive", labels=labels),
        AssociativeMemory.preset("A-Hop", patterns, labels=labels),
    ):
        memory.fit((np.arange(20), patterns), epochs=np.int64(2), batch=np.int32(8), progress=False)
        memory.fit((labels, patterns), by="label", epochs=2, progress=False)
        scores, indices = memory.search(patterns, k=np.int64(3), shortlist=np.int64(8))
        assert scores.shape == indices.shape == (20, 3)
        assert memory.search(patterns, k=np.int64(3))[1].shape == (20, 3)
        assert memory.retrieve(patterns, steps=np.int64(2)).shape == (20, 4)
        assert memory.add(patterns, labels=labels).tolist() == list(range(20, 40))


@pytest.mark.parametrize("k", [np.bool_(True), np.float64(2.0), np.int64(0), True])
def test_sizes_are_integers(k):
    with pytest.raises(AHopError, match="k must be an integer of at least 1"):
        AssociativeMemory(torch.eye(4)).search(torch.eye(4), k=k)


def test_labels_can_be_a_column_of_pandas():
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series([4, 5, 4], index=[7, 8, 9])
    memory = AssociativeMemory(torch.eye(3), labels=labels)
    assert memory.labels.tolist() == [4, 5, 4]
    memory.add(torch.eye(3), labels=labels)
    assert memory.classify(torch.eye(3)).tolist() == [4, 5, 4]
    with pytest.raises(AHopError, match="labels must be integers"):
        AssociativeMemory(torch.eye(3), labels=pandas.Series(["a", "b", "a"]))


@pytest.mark.parametrize("scale", [1e-15, 1e-12, 1.0, 1e12, 1e15])
def test_a_shortlist_finds_the_same_patterns_at_any_scale(scale):
    patterns = torch.randn(300, 8) * torch.rand(300, 1) * 3
    query = patterns[:50] + 0.3 * torch.randn(50, 8)
    memory, expected = (AssociativeMemory(patterns * factor, "dis") for factor in (scale, 1.0))
    found = memory.search(query * scale, 3, 10)[1] == expected.search(query, 3)[1]
    assert found.double().mean() > 0.98


@pytest.mark.parametrize("beta", [1e-50, 1e39])
def test_beta_is_within_the_range_of_the_dtype(beta):
    with pytest.raises(AHopError, match="beta must be a positive number within the range of"):
        AssociativeMemory(torch.eye(3), beta=beta)
    assert AssociativeMemory(torch.eye(3).double(), beta=beta).beta == beta


def test_a_fit_in_inference_mode_is_refused():
    memory = AssociativeMemory.preset("A-Hop", torch.randn(5, 3))
    with torch.inference_mode(), pytest.raises(AHopError, match="fit needs gradients"):
        memory.fit(Noisy(std=0.1), epochs=1, progress=False)


def test_bases_of_a_classifier_can_be_one_name():
    neighbors = pytest.importorskip("ahop_layers.tabular")
    rows = np.arange(16.0).reshape(8, 2)
    model = neighbors.AdaptiveNeighborsClassifier(bases="l1", epochs=2, random_state=0).fit(rows, np.arange(8) > 3)
    assert model.memory_.similarity.bases == ("l1",)


@pytest.fixture
def group(tmp_path):
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_failed_communication_is_not_blamed_on_the_device(group, monkeypatch):
    memory = AssociativeMemory(torch.eye(3)).shard_()

    def fail(*args, **keywords):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(distributed, "all_gather", fail)
    with pytest.raises(RuntimeError, match="connection closed by peer") as raised:
        memory.search(torch.eye(3))
    assert not isinstance(raised.value, AHopError)


def test_a_group_must_support_the_device_of_the_patterns(group):
    with pytest.raises(AHopError, match="group must support tensors on meta"):
        Shard(None, 3, 1.0, torch.device("meta"))


def test_invalid_queries_raise_on_every_rank(group, monkeypatch):
    memory, gather = AssociativeMemory(torch.eye(3)).shard_(), Shard.gather
    sent = []
    monkeypatch.setattr(Shard, "gather", lambda self, tensor: sent.append(tensor) or gather(self, tensor))
    with pytest.raises(AHopError, match="queries x must be"):
        memory.search(torch.eye(4))
    assert sent[0].tolist() == [0, 0, 1]  # the other ranks are told
    monkeypatch.setattr(Shard, "gather", lambda self, tensor: torch.stack([tensor, sent[0]]))
    with pytest.raises(AHopError, match="queries x must be valid on all ranks, got an error on rank 1"):
        memory.search(torch.eye(3))


class NothingFound:
    def check(self, patterns):
        pass

    def shortlist(self, linear, m):
        shape = len(linear.slope), m
        return torch.full(shape, -torch.inf), torch.zeros(shape, dtype=torch.long)


def test_an_index_names_queries_that_are_not_finite_and_can_be_removed():
    memory, x = AssociativeMemory(torch.eye(5)), torch.eye(5)[:2].clone()
    memory._index = NothingFound()
    with pytest.raises(AHopError, match="set its nprobe"):
        memory.search(x, 2, shortlist=3)
    x[1, 2] = torch.nan
    with pytest.raises(AHopError, match="queries x must be finite, got NaN or infinity in row 1"):
        memory.search(x, 2, shortlist=3)
    assert memory.build_index(None) is None
    assert memory.search(torch.eye(5), shortlist=3)[1].flatten().tolist() == [0, 1, 2, 3, 4]


def test_an_index_of_inference_tensors_is_refused():
    with torch.inference_mode():
        memory = AssociativeMemory(torch.randn(5, 3))
    with pytest.raises(AHopError, match="build_index needs patterns created outside inference mode"):
        memory.build_index("Flat")


@pytest.mark.parametrize("keywords", [{}, {"debias": True}, {"prior": True}, {"table": True}], ids=str)
def test_a_fit_of_float16_names_the_dtype(keywords):
    memory = AssociativeMemory.preset("A-Hop", torch.randn(20, 8).half(), **keywords)
    with pytest.raises(AHopError, match=r"got torch.float16: call memory.float\(\)"):
        memory.fit(Noisy(std=0.1), epochs=2, progress=False)
    assert memory.float().fit(Noisy(std=0.1), epochs=2, progress=False).isfinite().all()
