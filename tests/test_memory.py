"""The associative memory: scores, retrieval, what fit learns, storage, memory use and errors."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from ahop_layers.errors import AHopError
from ahop_layers.memory import AssociativeMemory, arrays, storage
from ahop_layers.memory import state as state_module
from ahop_layers.memory.variants import Mixed, Noisy
from ahop_layers.ops import chunked
from ahop_layers.separation import sparsemax
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from tests.new_tensors import peak_memory
from tests.samples import refuses, unchanged


def uniform(n, d, dtype=torch.float64):
    return torch.rand(n, d, dtype=dtype) * 2 - 1


def adaptive(patterns, **options):
    """A memory with the adaptive similarity that the options describe."""
    return AssociativeMemory(patterns, AdaptiveSimilarity(patterns.shape[1], **options).to(patterns))


SCORES = {
    "dot": lambda x, p: x @ p.T,
    "dis": lambda x, p: -(x[:, None] - p).square().sum(-1),
    "l1": lambda x, p: -(x[:, None] - p).abs().sum(-1),
    "adaptive": lambda x, p: x @ p.T,
}


@pytest.mark.parametrize("size", [7, 61], ids=lambda size: f"chunk{size}")
@pytest.mark.parametrize("separation", [None, "sparsemax"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_retrieval_equal_the_definition_with_any_chunk_size(name, separation, size, monkeypatch):
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 8 * size)
    monkeypatch.setattr(state_module, "CHUNK_SCORES", 5 * 61)
    patterns, x = uniform(61, 8), uniform(23, 8)
    memory = AssociativeMemory(patterns, name, separation=separation or "softmax", beta=3.0)
    scores = SCORES[name](x, patterns)
    weights = sparsemax(3 * scores) if separation else (3 * scores).softmax(-1)
    torch.testing.assert_close(memory.scores(x).detach(), scores)
    torch.testing.assert_close(memory.retrieve(x), weights @ patterns)
    torch.testing.assert_close(tuple(memory.search(x, 3)), tuple(scores.topk(3)))


def test_the_memory_itself_has_gradients():
    memory, x = adaptive(uniform(10, 4), debias=True), uniform(3, 4).requires_grad_()
    torch.testing.assert_close(memory(x, steps=2), memory.retrieve(x, steps=2))
    assert not memory.retrieve(x).requires_grad
    memory(x, steps=2).square().sum().backward()
    assert all(gradient.abs().sum() > 0 for gradient in (x.grad, memory.similarity.w.grad, memory.similarity.bias.grad))


def test_steps_follow_the_bias():
    """A query with the learned bias converges to its pattern, and the retrieved pattern has no bias."""
    patterns, shift = 3 * torch.randn(50, 16), torch.linspace(-2, 2, 16)
    memory = adaptive(patterns, init="dis", debias=True)
    with torch.no_grad():
        memory.similarity.bias.copy_(shift)
    for steps in (1, 2, 5):
        torch.testing.assert_close(memory.retrieve(patterns + shift, steps=steps), patterns, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("small_fit")
def test_a_zero_bias_is_set_to_its_least_squares_estimate():
    patterns, shift = uniform(50, 12, torch.float32) + 2.0, torch.linspace(-0.6, 0.6, 12)  # with a nonzero mean
    index = torch.randint(50, (20_000,))
    query = patterns[index] + shift + 0.3 * torch.randn(20_000, 12)
    memory, other = (adaptive(patterns, debias=True) for _ in range(2))
    memory.fit((index, query))
    torch.testing.assert_close(memory.similarity.bias.detach(), shift, atol=0.05, rtol=0)
    torch.nn.init.constant_(other.similarity.bias, 1.0)
    other.fit((index, query))
    assert torch.equal(other.similarity.bias, torch.ones(12))  # a bias that is set already stays
    patterns = 1000 * patterns
    query = patterns[3] + 0.3 * torch.randn(101, 12) + 7  # of one pattern: 101 equal rows have a rounded mean
    memory = adaptive(patterns, debias=True)
    memory.fit((torch.full((101,), 3), query))
    torch.testing.assert_close(memory.similarity.bias.detach(), query.mean(0) - patterns[3], atol=1e-3, rtol=0)


@pytest.mark.usefixtures("small_fit")
def test_a_frozen_similarity_and_a_module_of_the_user_are_calibrated_only():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(5.0))

        def forward(self, query, key):
            return -self.scale * torch.cdist(query, key)

    frozen = AdaptiveSimilarity(6, debias=True).requires_grad_(False)
    for similarity in ("dot", "l1", frozen, Scaled(), lambda query, key: -torch.cdist(query, key)):
        memory = AssociativeMemory(uniform(40, 6, torch.float32), similarity)
        before = {name: value.clone() for name, value in memory.named_parameters()}
        report = memory.fit(Noisy(0.05))
        assert all(torch.equal(value, before[name]) for name, value in memory.named_parameters())
        assert report.chosen == "start"
        assert "learned" not in dict(report.rows)
        assert "does not pay" not in str(report)
        assert memory.beta != 1
        known, foreign = (memory.search(each).confidence.mean() for each in (memory.patterns, 9 * memory.patterns))
        assert similarity in ("dot", frozen) or known > foreign + 0.3


@pytest.mark.usefixtures("small_fit")
def test_patterns_drawn_with_the_seed_of_a_fit_do_not_reappear_in_its_queries():
    patterns, seen = torch.rand(600, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1, []

    def damage(origin, generator):
        seen.append(Mixed(0.8)(origin, generator))
        return seen[-1]

    AssociativeMemory(patterns).fit(damage, seed=0)
    equal = (seen[0][:200, None] == patterns).double().mean(-1)  # a fifth of the dimensions of its own pattern
    assert equal.max(-1).values.mean() == pytest.approx(0.2, abs=0.05)


@pytest.mark.usefixtures("small_fit")
def test_a_fit_keeps_a_given_or_loaded_beta_and_sets_a_missing_one():
    patterns = uniform(50, 8, torch.float32)
    state = AssociativeMemory(patterns, "adaptive", beta=7.0).state_dict()
    for beta, kept in ((None, 1.0), (2.0, 2.0), (1.0, 7.0)):
        memory = AssociativeMemory(patterns, "adaptive", beta=beta)
        if kept == 7:
            memory.load_state_dict(state)
        memory.fit(Noisy(0.1))
        assert (memory.beta == kept).item() == (beta is not None)


@pytest.mark.usefixtures("small_fit")
def test_a_fit_in_inference_mode():
    memory = AssociativeMemory(torch.rand(40, 6))
    with torch.inference_mode():
        memory.fit()
    assert not memory.similarity.w.is_inference()


def test_add_and_remove_without_refitting():
    patterns, more = uniform(20, 8), uniform(5, 8)
    memory = AssociativeMemory(patterns, "dis", labels=torch.arange(20))
    x = more + 0.01
    assert memory.add(more, labels=np.arange(5)).tolist() == [20, 21, 22, 23, 24]
    assert torch.equal(memory.recall(x), torch.arange(20, 25))
    memory.remove([0, 3, 24])
    assert torch.equal(memory.recall(x[:4]), torch.arange(18, 22))
    assert memory.labels.tolist() == [1, 2, *range(4, 20), 0, 1, 2, 3]
    memory.remove(torch.arange(22) != 5)
    torch.testing.assert_close(memory.patterns, patterns[7:8])
    assert memory.labels.tolist() == [7]
    refuses("index must leave at least one pattern, got all 1", memory.remove, [0])


def test_add_and_remove_say_once_that_a_fit_is_due(small_fit, tmp_path):
    def changes(memory):
        memory.remove([0] * 5)
        memory.add(torch.rand(19, 8))  # as many as half of those fitted, with the one removed
        with pytest.warns(UserWarning, match="21 patterns were added or removed since the fit of 40: call memory.fit"):
            memory.add(torch.rand(1, 8))
        memory.remove(range(30))
        memory.add(torch.rand(50, 8))

    memory = AssociativeMemory(torch.rand(40, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.add(torch.rand(100, 8))  # nothing was fitted
        memory.remove(range(100))
        memory.fit()
        other = copy.deepcopy(memory)
        changes(memory)
        memory.fit()
        memory.add(torch.rand(5, 8))
        pytest.importorskip("safetensors", reason="memories are saved with safetensors")
        other.save(tmp_path / "memory")
        changes(AssociativeMemory.load(tmp_path / "memory"))


def test_confidence_follows_add_after_a_memory_is_loaded(small_fit, tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory, more = AssociativeMemory(torch.rand(60, 16)), torch.rand(20, 16)
    memory.fit()
    memory.save(tmp_path / "memory")
    loaded = AssociativeMemory.load(tmp_path / "memory")
    for each in (memory, loaded):
        each.add(more)
    first, second = (each.search(more).confidence for each in (memory, loaded))
    assert torch.equal(first, second)
    assert memory.threshold() == loaded.threshold()
    assert (first[:20, 0] > memory.threshold()).all()


def test_bad_indices_are_named():
    memory = AssociativeMemory(uniform(5, 3))
    memory.remove([])
    for index in ([7], 7, "a", 1.5, [0.0, 1.0], [None], {}, torch.ones(4, dtype=torch.bool)):
        refuses("index must be indices or a mask of the 5 patterns, got", memory.remove, index)
    assert len(memory.patterns) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_patterns_may_hold_nan_but_not_infinity_and_errors_name_the_row(dtype, monkeypatch):
    monkeypatch.setattr(storage, "READ_ELEMENTS", 4 * 7)  # seven rows at once
    memory, patterns = AssociativeMemory(uniform(40, 4, dtype)), uniform(40, 4, dtype)
    infinite, unknown, gaps = patterns.clone(), patterns.clone(), patterns.clone()
    infinite[[23, 31], [2, 0]], unknown[[24, 30]], gaps[[23, 31], [2, 0]] = -torch.inf, torch.nan, torch.nan
    for make in (memory.add, AssociativeMemory, partial(AssociativeMemory, similarity="adaptive")):
        refuses(r"patterns must .*finite, got (NaN or )?infinity in row 23$", make, infinite)
        refuses("patterns must have a known value in each row, got NaN only in row 24", make, unknown)
    assert len(memory.patterns) == 40
    assert len(memory.add(infinite, check=False)) == len(memory.add(gaps)) == 40
    half = AssociativeMemory(uniform(5, 3, torch.float16))
    assert half.add(uniform(2, 3)).tolist() == [5, 6]
    assert half.patterns.dtype == torch.float16
    overflowing = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e5, 3.0]])
    refuses("patterns must not be infinite, got infinity in row 1", half.add, overflowing)


@pytest.mark.parametrize("similarity", [lambda query, key: query @ key.T, torch.nn.Bilinear(4, 4, 1)])
def test_nan_is_refused_where_a_similarity_has_no_unknown_values(similarity):
    make, patterns = partial(AssociativeMemory, similarity=similarity), uniform(6, 4, torch.float32)
    memory, broken = make(patterns), patterns.clone()
    broken[2, 1] = torch.nan
    message = "must not hold NaN for this similarity, got NaN: similarity='auto' allows it"
    for call in (memory.add, make):
        refuses(f"patterns {message}", call, broken)
    for call in (memory.search, memory.scores, memory.recall, memory.retrieve):
        refuses(f"queries x {message}", call, broken)
    refuses(f"patterns {message}", memory.load_state_dict, memory.state_dict() | {"patterns": broken})
    refuses(f"query {message}", memory.fit, (torch.arange(6), broken))
    assert torch.equal(memory.patterns, patterns)


def test_distances_are_accurate_far_from_the_origin():
    patterns = torch.randn(200, 16)
    memory = AssociativeMemory(patterns + 3000, similarity="dis")
    assert torch.equal(memory.recall(patterns + 3000), torch.arange(200))
    binary = torch.randn(50, 16).sign()
    assert not AssociativeMemory(binary, similarity="dis").scores(binary).diagonal().any()  # exactly


def broken_state_dicts(memory):
    good = memory.state_dict()
    infinite, unknown = good["patterns"].clone(), good["patterns"].clone()
    infinite[1, 0], unknown[1] = float("inf"), float("nan")
    for kind, message, change in (
        (AHopError, r"patterns must be \(N, 8\) with N at least 1, got \(0, 8\)", {"patterns": good["patterns"][:0]}),
        (AHopError, "patterns must not be infinite, got infinity in row 1", {"patterns": infinite}),
        (AHopError, "patterns must have a known value in each row, got NaN only in row 1", {"patterns": unknown}),
        (AHopError, r"labels must be \(N,\) = \(20,\)", {"labels": torch.zeros(3).long()}),
        (AHopError, "labels must be integers .* got torch.float32", {"labels": torch.zeros(20)}),
        (AHopError, r"patterns must be \(N, 8\)", {"patterns": torch.zeros(20, 9)}),
        (AHopError, "must have 8 blocks, as .* got similarity.w with 9", {"similarity.w": torch.zeros(2, 9)}),
        (RuntimeError, "Unexpected key", {"other": torch.zeros(3)}),
        (AHopError, "patterns must be .* got str", {"patterns": "patterns"}),
    ):
        yield kind, message, good | change
    for kind, message, missing in (
        (AHopError, "labels must be given, got none", "labels"),
        (RuntimeError, "Missing key", "similarity.bias"),
        (RuntimeError, "Missing key", "beta"),
    ):
        yield kind, message, {key: value for key, value in good.items() if key != missing}


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("assign", [False, True])
def test_a_failed_load_leaves_the_memory_unchanged(count, assign):
    source, memory = (
        AssociativeMemory(uniform(n, 8), AdaptiveSimilarity(8, debias=True).double(), labels=range(n))
        for n in (20, count)
    )
    for parameter in (*source.parameters(), *memory.parameters()):
        torch.nn.init.normal_(parameter)
    for kind, message, state in broken_state_dicts(source):
        with unchanged(memory), pytest.raises(kind, match=message):
            memory.load_state_dict(state, assign=assign)
    load, message = torch.nn.Sequential(memory).load_state_dict, r"\(N, 8\) with N at least 1, got \(0, 8\)"
    refuses(rf"0\.patterns must be {message}", load, {"0.patterns": torch.zeros(0, 8)}, strict=False, assign=assign)
    memory.load_state_dict(source.state_dict(), assign=assign)
    assert all(torch.equal(memory.state_dict()[key], value) for key, value in source.state_dict().items())


@pytest.mark.parametrize("missing", ["foreign", "calibration", "similarity.units", "similarity.widths", "all"])
def test_a_partial_state_dict_is_refused_or_keeps_what_it_does_not_name(missing):
    memory, other = AssociativeMemory(torch.rand(60, 8), labels=["a", "b"] * 30), torch.nn.Linear(2, 2).state_dict()
    calibration = {"calibration": torch.tensor([0.3, 0.2, 0.5, -1.0]), "foreign": torch.linspace(0.1, 0.9, 1024)}
    memory.load_state_dict(calibration, strict=False)
    memory.similarity.units = torch.rand(8) + 0.5
    state = other if missing == "all" else {key: value for key, value in memory.state_dict().items() if key != missing}
    for each in (memory, AssociativeMemory(memory.patterns, labels=memory.labels)):
        with unchanged(each), pytest.raises(RuntimeError, match="Missing key.*" + missing.replace("all", "patterns")):
            each.load_state_dict(state)
    with unchanged(memory):
        report = memory.load_state_dict(state, strict=False)
    assert memory.threshold() == pytest.approx(0.892)
    everything = {*memory.state_dict()} - {"similarity._extra_state"}
    assert {*report.missing_keys} - {"similarity._extra_state"} == (everything if missing == "all" else {missing})
    assert report.unexpected_keys == [*other] * (missing == "all")
    without = AssociativeMemory(memory.patterns, labels=memory.labels)
    memory.load_state_dict(without.state_dict())  # which says that there is no fit
    assert memory.similarity.units is None
    assert memory.search(memory.patterns[:2]).confidence is None


def test_a_failed_load_keeps_the_blocks():
    memory, other = (adaptive(uniform(5, 4), blocks=torch.tensor(each)) for each in ([0, 0, 1, 1], [0, 1, 0, 1]))
    expected = memory.explain(memory.patterns, 0)
    state = {key: value for key, value in other.state_dict().items() if key != "beta"}
    with unchanged(memory), pytest.raises(RuntimeError, match=r"Missing key.*beta"):
        memory.load_state_dict(state)
    assert torch.equal(memory.explain(memory.patterns, 0), expected)


def test_loading_leaves_the_tensor_of_the_caller():
    patterns = uniform(5, 3)
    before, memory = patterns.clone(), AssociativeMemory(patterns, "dot")
    memory.load_state_dict(AssociativeMemory(uniform(5, 3), "dot").state_dict())
    assert torch.equal(patterns, before)
    AssociativeMemory(uniform(1, 3).expand(5, 3), "dot").load_state_dict(memory.state_dict())


def test_half_precision_memories_have_an_inverse_temperature_beyond_float16():
    patterns = torch.nn.functional.normalize(torch.randn(50, 32), dim=-1) * 0.01
    labels = torch.arange(50) % 5
    plain = AssociativeMemory(patterns, "dot", labels=labels, beta=2e5)
    for memory in (AssociativeMemory(patterns.half(), "dot", labels=labels, beta=2e5), copy.deepcopy(plain).half()):
        assert memory.beta == 2e5
        assert memory.double().beta.dtype == torch.float64
        memory.half()
        for method in ("retrieve", "class_scores"):
            result, expected = (getattr(each, method)(patterns) for each in (memory, plain))
            assert result.dtype == torch.float16
            torch.testing.assert_close(result.float(), expected, atol=2e-5, rtol=0.1)


@pytest.mark.parametrize("beta", [1e-50, 1e39])
def test_beta_is_within_the_range_of_the_dtype(beta):
    refuses("beta must be a positive number within the range of", AssociativeMemory, torch.eye(3), beta=beta)
    assert AssociativeMemory(torch.eye(3).double(), beta=beta).beta == beta


def test_recall_needs_little_memory_beside_the_patterns(monkeypatch):
    """Chunks bound the memory independently of the number of patterns."""
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 2**15)
    monkeypatch.setattr(arrays, "RANKED_SCORES", 2**15)
    monkeypatch.setattr(chunked, "SCRATCH_BYTES", 2**18)
    memory = AssociativeMemory(uniform(20_000, 64, torch.float32), "adaptive")
    found, held = peak_memory(lambda: memory.recall(memory.patterns[:16]))
    assert found.tolist() == list(range(16))
    assert held < 2**20


def fit(p, data, **keywords):
    return AssociativeMemory(p, "adaptive").fit(data, **keywords)


@pytest.mark.parametrize(("make", "message"), [
    (lambda p: AssociativeMemory(None), "patterns must be a tensor, an array or a list of numbers, got NoneType"),
    (lambda p: AssociativeMemory(p[0]), r"patterns must be \(N, d\), or images .* got \(4,\)"),
    (lambda p: AssociativeMemory(p, "cosine"), "similarity must be one of auto, dot, dis, l1, adaptive, got"),
    (lambda p: AssociativeMemory(p, beta=True), "beta must be a positive number, got True"),
    (lambda p: AssociativeMemory(p, beta=np.True_), "beta must be a positive number, got .*True"),
    (lambda p: AssociativeMemory(p).threshold(True), "false_accepts must be a number between 0 and 1, got True"),
    (lambda p: AssociativeMemory(p, 5), "similarity must be a module or a function, got 5"),
    (lambda p: AssociativeMemory(p, separation=5), "separation must be a module or a function, got 5"),
    (lambda p: AssociativeMemory(p).retrieve(p, steps=0), "steps must be .* at least 1, got 0"),
    (lambda p: AssociativeMemory(p).add(p[:, :3]), r"patterns must be \(n, 4\), as those stored"),
    (lambda p: fit(p, ("a", p)), "index must be integers .* got str"),
    (lambda p: fit(p, ([0], p[:1].to("meta"))), "one device, got query"),
])  # fmt: skip
def test_errors(make, message):
    refuses(message, make, torch.rand(6, 4))


@pytest.mark.parametrize("as_data", [np.ndarray.tolist, torch.from_numpy, np.asarray, np.ma.masked_array, np.uint64])
def test_integers_beyond_float32_are_told_apart(as_data):
    """Time stamps in seconds, for example."""
    rows = np.array([[1_700_000_000 + second, 5] for second in range(6)])
    data = as_data(rows)
    memory = AssociativeMemory(data)
    assert memory.patterns.dtype == torch.float64
    assert list(memory.recall(data)) == list(range(6))
    assert AssociativeMemory(rows % 1000).patterns.dtype == torch.float32
    narrow = AssociativeMemory(torch.eye(2))
    assert narrow.scores(data[:3]).dtype == (np.float32 if isinstance(data, np.ndarray) else torch.float32)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers(dtype):
    rows = torch.arange(12).reshape(4, 3)
    memory = AssociativeMemory(rows.to(dtype), labels=torch.arange(4).to(dtype))
    assert torch.equal(memory.recall(rows.to(dtype)), torch.arange(4))
    assert torch.equal(memory.labels, torch.arange(4))
    assert memory.explain(rows.to(dtype), torch.arange(4).to(dtype)).shape == (4, 3)
