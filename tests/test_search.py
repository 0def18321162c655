"""Search in an associative memory: the best patterns, ties, dtypes, NumPy arrays and errors."""

import numpy as np
import pytest
import torch

from ahop_layers.memory import AssociativeMemory, Hits, arrays
from ahop_layers.memory import state as state_module
from tests.samples import refuses


def check_equals_sort(memory, x, *ks, tolerance=0.0):
    scores, indices = memory.scores(x).detach().sort(dim=-1, descending=True, stable=True)
    for k in ks:
        found = memory.search(x, k)
        assert not found[0].requires_grad
        torch.testing.assert_close(found[0], scores[..., :k], rtol=tolerance, atol=tolerance, equal_nan=True)
        assert torch.equal(found[1], indices[..., :k])
    assert torch.equal(memory.recall(x), indices[..., 0])


@pytest.fixture(params=[(7, 1), (7, 20 * 23), (61, 2**21)], ids=str)
def chunk(request, monkeypatch):
    """Patterns per chunk, for patterns of eight dimensions, and the number of scores up to which chunks are joined."""
    size, ranked = request.param
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 8 * size)
    monkeypatch.setattr(state_module, "QUERIES_AT_ONCE", 9)
    monkeypatch.setattr(arrays, "RANKED_SCORES", ranked)


def test_search_equals_a_full_sort(chunk):
    memory = AssociativeMemory(torch.randn(61, 8).double(), "adaptive")
    check_equals_sort(memory, torch.randn(23, 8).double(), 1, 2, 10, 61, tolerance=1e-7)


def test_equal_scores_are_ordered_by_index(chunk):
    """Integers make all scores exact and most of them equal."""
    x = torch.randint(-1, 2, (40, 8)).float()
    x[0] = 0  # all scores are equal
    check_equals_sort(AssociativeMemory(torch.randint(-1, 2, (61, 8)).float(), "dot"), x, 1, 2, 5, 30, 61)


@pytest.mark.parametrize("similarity", ["auto", "dot", "dis", "l1", "adaptive"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_queries_take_the_dtype_of_the_patterns(similarity, stored):
    memory = AssociativeMemory(torch.randn(30, 8).to(stored), similarity)
    for asked in (torch.float16, torch.float64):
        x = torch.randn(5, 8).to(asked)
        same = x.to(stored)
        assert all(map(torch.equal, memory.search(x, 4), memory.search(same, 4)))
        assert memory.search(x, 4)[0].dtype == stored
        for method in (memory.scores, memory.recall, memory.retrieve):
            assert torch.equal(method(x), method(same))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize(("stored", "asked"), [(torch.bfloat16, np.float16), (torch.float32, np.float64)])
def test_leading_dimensions_and_numpy_in_numpy_out(stored, asked, shape):
    memory = AssociativeMemory(torch.randn(30, 8).to(stored), "adaptive", labels=np.arange(30) % 4)
    array = np.random.default_rng(0).normal(size=shape).astype(asked)
    calls = [(method, ()) for method in (memory.recall, memory.classify)]
    calls += [(memory.scores, (30,)), (memory.class_scores, (4,)), (lambda x: memory.retrieve(x, steps=2), (8,))]
    calls += [(lambda x, i=i: memory.search(x, 3)[i], (3,)) for i in (0, 1)]
    for call, last in calls:
        got, expected = call(array), call(torch.from_numpy(array)).detach()
        assert isinstance(got, np.ndarray)
        assert got.shape == expected.shape == (*shape[:-1], *last)
        np.testing.assert_array_equal(got, (expected.float() if expected.dtype == torch.bfloat16 else expected).numpy())
    assert expected.dtype == torch.int64


@pytest.mark.parametrize("kind", ["read-only", "reversed", "transposed"])
def test_any_layout_of_a_numpy_array(kind, recwarn):
    memory, array = AssociativeMemory(torch.randn(30, 8)), np.random.default_rng(0).normal(size=(8, 8))
    array.flags.writeable = kind != "read-only"
    array = {"reversed": array[::-1, ::-1], "transposed": array.T}.get(kind, array)
    expected = memory.search(torch.tensor(array.copy()), 3)[1]
    np.testing.assert_array_equal(memory.search(array, 3)[1], expected.numpy())
    assert not recwarn.list


@pytest.mark.parametrize("bad", [[3, 17, 40], list(range(61))], ids=len)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_ordered_as_in_a_sort(chunk, bad, value):
    patterns = torch.randint(0, 3, (61, 8)).float() + 1
    patterns[bad] = value
    check_equals_sort(AssociativeMemory(patterns, "dot", check=False), torch.ones(2, 8), 1, 2, 3, 4, 61)


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [pytest.param("auto", marks=pytest.mark.full), "dot"])
def test_search_and_classification_compile_to_one_graph(similarity):
    patterns = torch.randint(-1, 2, (40, 4)).double()  # many equal scores
    memory = AssociativeMemory(patterns, similarity, labels=torch.arange(40) % 3)
    x = torch.randint(-1, 2, (5, 4)).double()

    def found(x):
        return *memory.search(x, 3), memory.recall(x), memory.class_scores(x)

    compiled = torch.compile(found, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(x), found(x)))
    hits = torch.compile(lambda x: memory.search(x, 3), fullgraph=True, backend="eager")(x)
    assert isinstance(hits, Hits)
    assert all(map(torch.equal, hits, memory.search(x, 3)))


@pytest.mark.parametrize("k", [0, -1, 2.0, True, np.bool_(True), np.float64(2.0), np.int64(0), 5], ids=repr)
def test_k_is_an_integer_up_to_the_number_of_patterns(k):
    expected = "at most the number of patterns, 4" if k == 5 else "an integer of at least 1"
    refuses(f"k must be {expected}, got", AssociativeMemory(torch.eye(4)).search, torch.eye(4), k)


@pytest.mark.parametrize(("x", "message"), [
    (torch.zeros(2, 3), r"queries x must be \(..., d\) with the d = 4 of the patterns, got \(2, 3\)"),
    (np.zeros((2, 3)), r"queries x must be \(..., d\) with the d = 4 of the patterns, got \(2, 3\)"),
    (torch.tensor(1.0), r"queries x must be \(..., d\) .* got \(\)"),
    ([1.0], r"queries x must be \(..., d\) .* got \(1,\)"),
    (np.array([["a"] * 4]), "queries x must be a tensor, an array or a list of numbers, got <U1"),
    (torch.zeros(2, 4, device="meta"), "one device, got queries x on meta, patterns on cpu"),
])  # fmt: skip
def test_errors_name_queries_and_patterns(x, message):
    memory = AssociativeMemory(torch.rand(6, 4))
    for method in (memory.search, memory.scores, memory.recall, memory.retrieve):
        refuses(message, method, x)


def test_ids_keep_their_kind_and_frames_may_have_values_of_their_own_for_unknown():
    memory = AssociativeMemory(np.eye(3), ids=["a", 7, "c"])
    found = memory.search(np.eye(3)).ids
    assert found.tolist() == [["a"], [7], ["c"]]
    memory.remove(ids=found[1])
    assert memory.ids == ["a", "c"]
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"a": [1, None, 3], "b": [0.5, 1.5, 2.5]}).convert_dtypes()
    assert AssociativeMemory(frame).search(frame[:2]).indices.tolist() == [[0], [1]]


class Frame:
    """A data frame of a library other than pandas."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return type("Column", (), {"dtype": "a dtype", "to_numpy": lambda _: np.array(self._columns[name])})()

    def to_numpy(self):
        text = any(isinstance(column[0], str) for column in self._columns.values())
        return np.array(list(self._columns.values()), dtype=object if text else float).T


@pytest.mark.parametrize("kind", ["pandas", "other"])
def test_the_columns_of_a_data_frame_are_matched_by_name(kind, tmp_path, small_fit):
    make = Frame if kind == "other" else pytest.importorskip("pandas", reason="pandas is not installed").DataFrame
    rows, order = np.random.default_rng(0).random((20, 4)), list("cadb")

    def frame(rows, names):
        return make({name: rows[:, "abcd".index(name)].tolist() for name in names})

    memory, x, turned = (
        AssociativeMemory(frame(rows, "abcd"), labels=range(20)),
        frame(rows, "abcd"),
        frame(rows, order),
    )
    assert memory.columns == list("abcd")
    for method in (memory.scores, memory.recall, memory.classify, memory.class_scores):
        assert np.array_equal(method(turned), method(x))
    for method in (memory.explain, memory.retrieve):  # in the order of the query
        assert np.array_equal(method(turned), method(x)[:, [2, 0, 3, 1]])
    if kind == "pandas":
        assert memory.recall(turned.iloc[7]) == 7  # a row
    assert memory.recall(rows).tolist() == memory.recall(torch.tensor(rows)).tolist() == list(range(20))
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory.save(tmp_path / "memory")
    memory = AssociativeMemory.load(tmp_path / "memory")
    memory.add(turned, labels=range(20))
    assert torch.equal(memory.patterns[:20], memory.patterns[20:])
    other = AssociativeMemory(turned, labels=range(20))
    other.load_state_dict(memory.state_dict())
    assert other.columns == list("abcd")
    assert (
        memory.fit((list(range(20)), turned), by="pattern").rows == memory.fit((list(range(20)), x), by="pattern").rows
    )
    surplus = make({**{name: [0.5] for name in "abcd"}, "name": ["text"]})
    calls = (memory.search, memory.explain, memory.add, memory.classify, lambda x: memory.fit(([0], x)))
    for call in calls:
        refuses("must have the columns of the patterns, got no column 'c'", call, frame(rows, "abd"))
        refuses("must have the columns of the patterns, got a surplus column 'name'", call, surplus)
    refuses("patterns must be .* numbers, got .* in the column 'name'", AssociativeMemory, surplus)
    refuses(
        "columns must be given, got none",
        memory.load_state_dict,
        AssociativeMemory(rows, labels=range(20)).state_dict(),
    )


def test_columns_of_one_name_are_refused():
    frame = pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(
        np.eye(3), columns=["a", "b", "a"]
    )
    refuses("the columns of patterns must differ, got 'a' more than once", AssociativeMemory, frame)


def test_finite_queries_beyond_the_dtype_of_the_patterns_are_scored():
    patterns = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))
    for dtype, value in ((torch.float16, 7e4), (torch.float32, 1e39)):
        query = patterns[:5].double()
        query[:, 0] = value
        assert AssociativeMemory(patterns.to(dtype)).recall(query).tolist() == [0, 1, 2, 3, 4]


def test_a_memory_forgets_that_a_pattern_had_unknown_values():
    patterns = torch.rand(5, 4)
    patterns[0, 0] = torch.nan
    memory = AssociativeMemory(patterns, ids=range(5))
    memory.add(torch.rand(1, 4), ids=[0], replace=True)
    assert not memory._state.stored.unknown
    memory = AssociativeMemory(patterns)
    memory.remove([0])
    assert not memory._state.stored.unknown
