"""Unknown values, NaN in queries and in stored patterns: scores of all kernels, similarities and memories."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory import state as state_module
from ahop_layers.ops import chunked, cpu, reference
from tests.new_tensors import peak_memory
from tests.samples import refuses

SIMILARITIES = ["auto", "dot", "dis", "l1", "adaptive", "normalized"]
BASES = ("dis", "dot", "l1", ("near", 0.3))
UNEQUAL = torch.tensor([0, 1, 0, 2, 0, 1])
BLOCKS = {
    "equal": 2,
    "unequal": UNEQUAL,
    "normalized": ah.Blocks(2, normalize=True),
    "normalized permuted": ah.Blocks(torch.tensor([0, 1, 0, 1, 0, 1]), normalize=True),
    "normalized unequal": ah.Blocks(UNEQUAL, normalize=True),
}
LABELS = torch.arange(40) % 5 * 3 - 4
BY_LABEL = ("class_scores", "classify")
METHODS = ("scores", "recall", "retrieve", *BY_LABEL)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unknown(x, share, seed=1):
    """Makes a share of the values unknown, but not the first two of a row: half of a normalized block is known."""
    gone = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    gone[..., :2] = False
    return x.masked_fill(gone, torch.nan)


def make(similarity, patterns, **keywords):
    """A memory with labels whose weights, if there are any, depend on ranks."""
    given, dim = similarity, patterns.shape[1]
    if similarity == "normalized":
        given = ah.AdaptiveSimilarity(dim, blocks=ah.Blocks(torch.arange(dim) // 3, normalize=True))
    given = given if isinstance(given, str) else given.to(torch.as_tensor(patterns).dtype)
    memory = ah.AssociativeMemory(patterns, given, labels=LABELS[: len(patterns)], **keywords)
    if isinstance(memory.similarity, ah.AdaptiveSimilarity):
        with torch.no_grad():
            for index, parameter in enumerate(memory.similarity.parameters()):
                parameter.copy_(random(*parameter.shape, seed=10 + index) / parameter.shape[-1])
        if similarity == "auto":
            memory.similarity.refresh()
    return memory


def value(base, query, key, width):
    """Similarities of one base by dimension."""
    difference = np.abs(query - key)
    return {"dis": -(difference**2), "dot": query * key, "l1": -difference, "near": np.exp(-difference / width)}[base]


def stretched(values, u):
    """Known similarities times the integrals of u, a step function, over equal parts of all ranks."""
    n, m = len(u), len(values)
    ends = [r * n / m for r in range(m + 1)]
    overlap = [[max(0.0, min(ends[r + 1], j + 1) - max(ends[r], j)) for j in range(n)] for r in range(m)]
    return float(np.sort(values)[::-1] @ np.array(overlap) @ u)


def normalized(row, numbers, constant):
    """A row with normalized blocks: unknown values at the mean, and 0 if fewer than half of a block are known."""
    result = np.zeros_like(row)
    for block in range(numbers.max() + 1):
        values = row[numbers == block]
        known = values[~np.isnan(values)]
        if 2 * len(known) >= len(values):
            deviation = np.where(np.isnan(values), known.mean(), values) - known.mean()
            result[numbers == block] = deviation / (np.linalg.norm(deviation) + constant)
    return result


def pair_score(query, key, folded, bases, widths, numbers):
    """The score of one pair: sums over the known dimensions of blocks, divided by their share."""
    known, blocks = ~np.isnan(query + key), []
    for block in range(numbers.max() + 1):
        inside = numbers == block
        width, m = inside.sum(), (inside & known).sum()
        if m:
            pair = [each[inside & known] for each in (query, key)]
            values = [value(base, *pair, unit).sum() * width / m for base, unit in zip(bases, widths, strict=True)]
            blocks.append(values)
    if not blocks:
        return -math.inf
    return sum(stretched(values, u) for values, u in zip(np.array(blocks).T, folded, strict=True))


def by_pairs(similarity, query, key):
    """Scores ``(L, S)`` by a loop over pairs in float64, which states the definition."""
    query = query.double() if similarity.bias is None else query.double() - similarity.bias.detach().double()
    query, key, scores = query.numpy(), key.double().numpy(), np.zeros((len(query), len(key)))
    widths = getattr(similarity, "widths", None)
    entry = getattr(similarity, "blocks", None)
    if entry is not None:
        folded = reference.fold(similarity.footprint_weight().detach().double()).numpy()
        options = similarity.names, np.ones(len(folded)) if widths is None else widths.tolist()
        numbers, pair = entry.numbers(similarity.dim).numpy(), (query, key)
        if entry.normalize:
            pair = [[normalized(row, numbers, 1e-3 * similarity.norm.item()) for row in rows] for rows in pair]
        for i, j in np.ndindex(*scores.shape):
            common = not np.isnan(query[i] + key[j]).all()
            scores[i, j] += pair_score(pair[0][i], pair[1][j], folded, *options, numbers) if common else -math.inf
    return torch.from_numpy(scores)


def by_hand(memory, query):
    """Scores ``(L, N)`` from the formula in float64."""
    similarity, patterns = memory.similarity, memory.patterns.double()
    if isinstance(similarity, ah.AdaptiveSimilarity):
        return by_pairs(similarity, query, patterns)
    query, key = query.double()[:, None], patterns
    values = {"dot": query * key, "dis": -((query - key) ** 2), "l1": -(query - key).abs()}
    return patterns.shape[1] * values[similarity.base].nanmean(-1)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_scores_of_all_backends_follow_the_definition(backend, missing):
    """With missing values: all combinations of NaN on both sides of four dimensions."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=4))) & missing
    query, key = (random(16, 4, seed=seed).masked_fill(masks, torch.nan) for seed in (1, 2))
    bases, widths = ("l1", "near", "dot", "near", "dis"), torch.tensor([1.0, 0.3, 1.0, 2.0, 1.0], dtype=torch.float64)
    weight = random(5, 4, seed=3)
    scores = ah.adaptive_similarity(query, key, weight, bases, widths=widths, missing=missing, backend=backend)
    options = reference.fold(weight).numpy(), bases, widths.tolist(), np.arange(4)
    expected = [[pair_score(each, other, *options) for other in key.numpy()] for each in query.numpy()]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


GRADIENTS = {"dimensions": (6, None), "equal": (3, None), "unequal": (3, UNEQUAL), "one": (1, None)}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("n", "blocks"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_with_missing_values_are_finite_and_right(n, blocks, missing, monkeypatch):
    bases, widths = ("l1", "near", "dot"), torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    query, key, weight = random(2, 1, 3, 6), random(2, 4, 6, seed=2)[:, None], random(2, 3, n, seed=3)
    gone = [torch.rand(each.shape, generator=torch.Generator().manual_seed(4)) < 0.4 * missing for each in (query, key)]
    gone[0][0, 0, 0] = missing  # a query without a known value

    def score(query, key, weight, backend="auto"):
        query, key = (x.masked_fill(mask, torch.nan) for x, mask in zip((query, key), gone, strict=True))
        options = {"widths": widths, "blocks": blocks, "missing": missing, "backend": backend}
        return ah.adaptive_similarity(query.expand(-1, 2, -1, -1), key, weight, bases, **options).clamp(min=-99)

    leaves = [x.requires_grad_() for x in (query, key, weight)]
    expected = torch.autograd.grad(score(*leaves, backend="reference").cos().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(score(*leaves).cos().sum(), leaves), expected)
    monkeypatch.setattr(chunked, "SCRATCH_BYTES", 20000)
    torch.testing.assert_close(torch.autograd.grad(score(*leaves).cos().sum(), leaves), expected)
    assert torch.autograd.gradcheck(score, leaves)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "blocks"), [(6, None), (3, UNEQUAL)])
def test_opcheck_with_missing_values(n, blocks):
    query, key, weight = unknown(random(1, 2, 3, 6), 0.3), unknown(random(1, 2, 4, 6, seed=2), 0.3), random(2, 2, n)
    tensors, options = (query, key, weight.requires_grad_(), "dis,dot", "auto"), (None, True, blocks)
    torch.library.opcheck(torch.ops.ahop.score, (*tensors, False, *options))
    arguments = random(1, 2, 3, 4), query, key, weight.detach(), *tensors[3:], *options, [True] * 3
    torch.library.opcheck(torch.ops.ahop.score_backward, arguments)


def test_a_gradient_with_missing_values_takes_bounded_memory():
    """No tensor of size L x S x d, forward or backward."""
    query, key = unknown(random(40, 64, dtype=torch.float32), 0.1), random(5000, 64, seed=2, dtype=torch.float32)
    leaves = query.requires_grad_(), key.requires_grad_(), random(3, 64, dtype=torch.float32).requires_grad_()

    def call():
        scores = ah.adaptive_similarity(*leaves, ("dis", "dot", "near"), missing=True)
        return torch.autograd.grad(scores.sum(), leaves)

    _, peak = peak_memory(call)
    assert peak < 64e6 + 3 * 40 * 5000 * 4


class Scores(torch.nn.Module):
    def __init__(self, similarity):
        super().__init__()
        self.similarity = similarity

    def forward(self, query, key):
        return self.similarity(query, key, missing=True)


@pytest.mark.parametrize("kernel", ["compiled", "exported"])
@pytest.mark.parametrize("blocks", [None, 2, UNEQUAL], ids=str)
def test_operators_serve_graphs_with_missing_values(kernel, blocks, monkeypatch):
    similarity = randomized(ah.AdaptiveSimilarity(6, bases=BASES, blocks=blocks))
    query, key = (unknown(random(size, 6, seed=size), 0.3) for size in (4, 7))
    expected = similarity(query, key, missing=True)
    monkeypatch.setattr(reference, "missing_similarity", lambda *_: pytest.fail("took the reference path"))
    if kernel == "compiled":
        graph = torch.compile(Scores(similarity), backend="aot_eager", fullgraph=True)
    else:
        graph = torch.export.export(Scores(similarity), (query, key)).module()
    scores = graph(query, key)
    torch.testing.assert_close(scores, expected)
    if kernel == "compiled":
        found = (torch.autograd.grad(each.clamp(min=-99).sum(), similarity.w) for each in (scores, expected))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_complete_values_take_the_kernel_for_complete_values(blocks, monkeypatch):
    query, key, weight = random(3, 6), random(4, 6, seed=2), random(2, blocks).requires_grad_()
    expected = ah.adaptive_similarity(query, key, weight)
    (grad,) = torch.autograd.grad(expected.sum(), weight)
    if cpu.unavailable() is None:
        monkeypatch.setattr(chunked, "score", lambda *_: pytest.fail("took the path for missing values"))
        monkeypatch.setattr(chunked, "score_backward", lambda *_: pytest.fail("took the path for missing values"))
    scores = ah.adaptive_similarity(query, key, weight, missing=True)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), weight)[0], grad)


def check(memory, query, scores):
    """Every result follows from the scores by hand."""
    torch.testing.assert_close(memory.scores(query), scores)
    assert torch.equal(memory.recall(query), scores.argmax(-1))
    torch.testing.assert_close(tuple(memory.search(query, 4)), tuple(scores.topk(4)))
    logits = memory.beta * scores
    expected = torch.stack([logits[:, memory.labels == label].logsumexp(-1) for label in memory.classes], -1)
    torch.testing.assert_close(memory.class_scores(query), expected)
    assert torch.equal(memory.classify(query), memory.classes[expected.argmax(-1)])
    weights, known = logits.softmax(-1), (~memory.patterns.isnan()).double()
    average = weights @ memory.patterns.nan_to_num(0.0) / (weights @ known)
    torch.testing.assert_close(memory.retrieve(query), average)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(("asked", "stored"), [(0.4, 0.0), (0.0, 0.3), (0.4, 0.3)], ids=["queries", "patterns", "both"])
def test_results_are_those_of_the_known_values(similarity, asked, stored, monkeypatch):
    memory, query = make(similarity, unknown(random(40, 9), stored)), unknown(random(7, 9, seed=2), asked, 3)
    scores = by_hand(memory, query)
    check(memory, query, scores)
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 9 * 7)  # NaN in some blocks alone
    monkeypatch.setattr(state_module, "QUERIES_AT_ONCE", 3)
    check(memory, query, scores)


def randomized(similarity):
    for index, parameter in enumerate(similarity.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=10 + index))
    return similarity.double()


def masked_rows(count, seed):
    """Rows of six dimensions with all combinations of NaN, of which ``count`` are chosen."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=6)))
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:count]
    return random(count, 6, seed=seed).masked_fill(masks[chosen], torch.nan)


@pytest.mark.parametrize("bases", [BASES, ("dis", "dot")], ids=["near", "zero at zero"])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_blocks_follow_the_definition_for_all_combinations_of_known_dimensions(blocks, bases, monkeypatch):
    query, key = torch.cat([masked_rows(64, 1), random(1, 6)]), torch.cat([masked_rows(3, 2), random(1, 6, seed=3)])
    similarity = randomized(ah.AdaptiveSimilarity(6, bases=bases, debias=True, blocks=blocks))
    similarity.fix_scales_(key)
    expected = by_pairs(similarity, query, key)
    with torch.no_grad():
        torch.testing.assert_close(similarity(query, key, missing=True), expected)
        batch = similarity(query.reshape(5, 13, 6), key, missing=True)
        torch.testing.assert_close(batch, expected.reshape(5, 13, 4))
        order = torch.randperm(4)
        torch.testing.assert_close(similarity(query, key[order], missing=True), expected[:, order])
        monkeypatch.setattr(chunked, "SCRATCH_BYTES", 20000)
        torch.testing.assert_close(similarity(query, key, missing=True), expected)
    torch.testing.assert_close(similarity(query, key, missing=True).detach(), expected)  # on the path with gradients


@pytest.mark.parametrize("blocks", ["normalized permuted", "normalized unequal"])
@pytest.mark.parametrize("fixed", [True, False])
def test_normalized_blocks_without_nan_have_the_scores_of_complete_values(blocks, fixed):
    similarity = randomized(ah.AdaptiveSimilarity(6, 2, bases=BASES, blocks=BLOCKS[blocks]))
    inputs, found = [random(3, 2, 4, 6).requires_grad_(), random(3, 2, 5, 6, seed=2).requires_grad_()], []
    if fixed:
        similarity.fix_scales_(inputs[1].detach())
    for missing in (False, True):
        scores = similarity(*inputs, missing=missing)
        found.append((scores, *torch.autograd.grad((scores * scores.detach().cos()).sum(), inputs)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("blocks", ["normalized", "normalized unequal"])
def test_gradients_of_normalized_blocks_are_right(blocks):
    similarity = randomized(ah.AdaptiveSimilarity(6, bases=("dis", "dot"), blocks=BLOCKS[blocks]))
    query, key = masked_rows(12, 1), masked_rows(4, 2)
    query[0] = 1.0  # no contrast
    similarity.fix_scales_(key)
    known = [~each.isnan() for each in (query, key)]

    def scores(*values):
        pair = [torch.full_like(each, torch.nan) for each in (query, key)]
        pair = [each.masked_scatter(mask, part) for each, mask, part in zip(pair, known, values, strict=True)]
        found = similarity(*pair, missing=True)
        return found[found.isfinite()]

    values = [each[mask].requires_grad_() for each, mask in zip((query, key), known, strict=True)]
    assert all(each.isfinite().all() for each in torch.autograd.grad(scores(*values).sum(), values))
    values[0].data[:6] += random(6, seed=5)  # the norm of a block without contrast has no derivative
    assert torch.autograd.gradcheck(scores, values)


@pytest.mark.parametrize("blocks", ["normalized", "normalized unequal"])
def test_the_norm_of_stored_blocks_counts_their_known_values(blocks):
    entry, patterns = BLOCKS[blocks], masked_rows(40, 1)
    squares, numbers = [], entry.numbers(6)
    for row, block in itertools.product(patterns, range(int(numbers.max()) + 1)):
        part = row[numbers == block]
        known = part[~part.isnan()]
        squares.append((known - known.mean()).square().sum() if 2 * len(known) >= len(part) else known.sum() * 0)
    similarity = ah.AdaptiveSimilarity(6, blocks=entry).double().fix_scales_(patterns)
    torch.testing.assert_close(similarity.norm, torch.stack(squares).mean().sqrt())
    flat = ah.AdaptiveSimilarity(6, blocks=entry).double().fix_scales_(0 * patterns + 1)
    assert flat.norm == 0


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


@pytest.mark.full
def test_a_fit_finds_noisy_and_missing_values_as_often_as_nan_euclidean(monkeypatch):
    for name in ("QUERIES", "MOST_QUERIES"):
        monkeypatch.setattr(f"ahop_layers.memory.learn.questions.{name}", 512)
    patterns = random(300, 24, dtype=torch.float32)
    noisy = patterns + 0.9 * random(300, 24, seed=2, dtype=torch.float32)
    memory = ah.AssociativeMemory(patterns)
    memory.fit([ah.variants.Noisy(0.81), ah.variants.Missing((0.0, 0.8))])
    for share in (0.3, 0.6):
        query = unknown(noisy, share, 3)
        nearest = accuracy(nan_euclidean(query, patterns))
        assert 0.3 < nearest < 1
        assert accuracy(memory.recall(query)) >= nearest - 0.03  # Euclid is the best score for this noise


def test_a_query_without_a_known_value_is_refused_with_its_row():
    memory, query = make("auto", random(40, 4)), random(5, 4)
    query[3] = torch.nan
    for method in ("search", *METHODS):
        refuses("queries x must have a known value in each row, got NaN only in row 3", getattr(memory, method), query)
    refuses("NaN only in row 0", memory.recall, query[3])


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_rows_without_nan_do_not_depend_on_the_others(similarity):
    patterns, query = random(40, 9, dtype=torch.float32), random(8, 9, seed=2, dtype=torch.float32)
    memory, mixed = make(similarity, patterns), query.clone()
    mixed[::2] = unknown(mixed[::2], 0.5, 3)
    for method in METHODS:
        torch.testing.assert_close(getattr(memory, method)(mixed)[1::2], getattr(memory, method)(query)[1::2])
    mixed_found, found = (memory.search(each, 3) for each in (mixed, query))
    torch.testing.assert_close(mixed_found.scores[1::2], found.scores[1::2])
    assert torch.equal(mixed_found.indices[1::2], found.indices[1::2])


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


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint8, ">i2"])
def test_what_a_masked_array_masks_is_unknown(dtype):
    rows = np.random.default_rng(0).integers(1, 200, (30, 6)).astype(dtype)
    masked = np.ma.masked_array(rows, np.random.default_rng(1).random((30, 6)) < 0.3, fill_value=99)
    known = masked.astype(float).filled(np.nan)
    memory = ah.AssociativeMemory(masked, ids=range(30))
    assert memory.patterns.dtype == (torch.float32 if rows.dtype.kind in "iu" else torch.from_numpy(rows).dtype)
    assert torch.equal(memory.patterns.isnan(), torch.from_numpy(known).isnan())
    assert np.array_equal(memory.search(masked[3:9], 3).indices, memory.search(known[3:9], 3).indices)
    memory.add(masked[:2], ids=[30, 31])
    assert memory.patterns[30:].isnan().equal(memory.patterns[:2].isnan())
    whole = np.ma.masked_array(rows)
    assert ah.AssociativeMemory(whole).patterns.dtype == ah.AssociativeMemory(rows).patterns.dtype
    for name, message in (
        ("labels", "labels must be integers"),
        ("ids", "ids must be strings or integers, .* got float"),
    ):
        refuses(message, ah.AssociativeMemory, rows, **{name: np.ma.masked_equal(np.arange(30), 7)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_other_dtypes(similarity, dtype):
    patterns, query = unknown(random(40, 6), 0.2).to(dtype), unknown(random(4, 6, seed=2), 0.3, 3).to(dtype)
    memory = make(similarity, patterns)
    scores = memory.scores(query)
    assert scores.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(scores.double(), by_hand(memory, query), rtol=tolerance, atol=8 * tolerance)
    assert memory.retrieve(query).isfinite().all()


def test_a_bias_is_learned_from_known_values():
    patterns, shift = random(60, 8, dtype=torch.float32), torch.linspace(-1, 1, 8)
    memory = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(8, init="dis", debias=True))
    index = torch.arange(600) % 60
    memory.fit((index, unknown(patterns[index] + shift, 0.3)))
    torch.testing.assert_close(memory.similarity.bias.detach(), shift, atol=0.05, rtol=0)
