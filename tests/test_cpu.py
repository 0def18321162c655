"""The native CPU kernel: its error is at most twice that of the reference in the same precision."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from torch import Tensor

import ahop_layers as ah
from ahop_layers.ops import chunked, cpu
from ahop_layers.ops.reference import block_sums, fold, unfold
from tests.gaps import separated_grad

pytestmark = [
    pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable())),
    pytest.mark.usefixtures("poisoned_memory"),
]

ALL = ("dis", "dot", "l1")
EVERY = (True, True, True)
DIMENSIONS = (1, 2, 3, 7, 16, 17, 48, 64, 100, 784, 1024, 1260)
BLOCKS = (
    (1, 2), (1, 7), (2, 4), (3, 21), (7, 49), (8, 64), (33, 66), (16, 784), (64, 1024), (1, 1024), (5, 2500),
    (1189, 2378),
)  # fmt: skip
SHAPES = ((1, 1, 1, 65), (2, 3, 5, 3), (1, 2, 66, 9), (70, 2, 1, 1))
CASES = [
    (shape, n, d)
    for n, d in (*((d, d) for d in DIMENSIONS), *BLOCKS)
    for shape in SHAPES
    if d < 500 or shape[2] < 66  # the reference of many pairs takes seconds
]
FLOAT, HALVES = torch.float32, (torch.float16, torch.bfloat16)
BOTH = ("dis", "dot")
SUBSETS = (("dis",), ("dot",), ("l1",), ("dot", "dis"), ("l1", "dot"))
OTHERS = {
    "subset of bases": [((2, 2, 4, 33), n, 24, bases, FLOAT) for bases in SUBSETS for n in (24, 8)],
    "half precision": [((2, 2, 3, 37), n, 20, ALL, dtype) for dtype in HALVES for n in (20, 5)],
    "several chunks of queries and tiles of keys": [((1, 1, 150, 500), n, 9, ALL, FLOAT) for n in (9, 3)],
    "few blocks, ranked in registers, some of them by products": [
        ((1, 2, 70, 69), n, 4 * n, bases, FLOAT)
        for n in (2, 3, 4, 6, 8, 16)
        for bases in (("dis",), ("l1", "dot", "dis"))
    ],
}
SMALL = ((1, 1, 1, 33), (2, 3, 5, 3), (1, 2, 9, 2), (20, 2, 1, 1))
SHARED = ("near", "l1", "dot", "near", "dis")
WIDTHS = (0.3, 1.0, 1.0, 2.0, 1.0)


def instruction_sets():
    """The fastest instruction set, then the others of this processor, which make test-fast leaves out."""
    first, *others = cpu.instruction_sets() or ("none",)
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(autouse=True, params=instruction_sets())
def _instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    number = cpu.instruction_sets()[request.param]
    monkeypatch.setattr(cpu, "instruction_sets", lambda: {request.param: number})


def inputs(n, heads, length, count, d, bases=ALL, dtype=torch.float32, seed=0, blocks=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, heads, length, d), (n, heads, count, d), (heads, len(bases), blocks or d))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_as_good(got: Tensor, low: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """The error of ``got`` is at most twice that of ``low``, the reference in the same precision, plus rounding.

    ``terms`` are the sums of absolute terms, which the rounding of a sum is relative to, by default the results.
    """
    assert got.shape == exact.shape
    assert got.is_contiguous()
    # In float64 the reference is exact, so only rounding remains.
    rounding = (64 if low.dtype == torch.float64 else 4) * torch.finfo(low.dtype).eps
    floor = rounding * (exact if terms is None else terms).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * (low.double() - exact).abs().max() + floor


def exact_grads(grad, query, key, weight, bases):
    """Computes gradients in float64, each with the sums of its absolute terms."""
    grad, query, key, weight = (tensor.double() for tensor in (grad, query, key, weight))
    sums = [[torch.zeros_like(tensor), torch.zeros_like(tensor)] for tensor in (query, key, weight)]
    grad, query, key, n = grad.unsqueeze(-1), query.unsqueeze(-2), key.unsqueeze(-3), weight.shape[-1]
    for index, base in enumerate(bases):
        ordered, order = block_sums(chunked.BASES[base].value(query, key), n).sort(dim=-1, descending=True)
        at_block = torch.zeros_like(ordered).scatter(-1, order, weight[:, index, None, None].expand_as(ordered)) * grad
        at_dimension = at_block.repeat_interleave(query.shape[-1] // n, -1)
        terms = [at_dimension * slope for slope in chunked.BASES[base].slopes(query, key)]
        for absolute in (False, True):
            parts = [part.abs() if absolute else part for part in (*terms, ordered * grad)]
            sums[0][absolute] += parts[0].sum(-2)
            sums[1][absolute] += parts[1].sum(-3)
            sums[2][absolute][:, index] = parts[2].sum((0, 2, 3))
    return sums


def check_grads(grad, query, key, weight, bases, need=EVERY):
    """Compares gradients with the reference in float64 and in the precision of the inputs."""
    got = cpu.score_backward(grad, query, key, weight, bases, need)
    low = chunked.score_backward(grad, query, key, weight, bases, need)
    exact = exact_grads(grad, query, key, weight, bases)
    for index in (index for index in range(3) if need[index]):
        assert got[index].dtype == (query, key, weight)[index].dtype
        assert_as_good(got[index], low[index], *exact[index])


def check(query, key, weight, bases):
    """Compares scores and gradients with the reference in float64 and in the precision of the inputs."""
    double = [tensor.double() for tensor in (query, key, weight)]
    weight = weight.to(chunked.accumulation_dtype(query.dtype))
    scores = cpu.score(query, key, weight, bases)
    assert scores.dtype == chunked.accumulation_dtype(query.dtype)
    assert_as_good(scores, chunked.score(query, key, weight, bases), chunked.score(*double, bases))
    check_grads(separated_grad(query, key, bases, weight.shape[-1]).to(scores.dtype), query, key, weight, bases)


def check_scores(query, key, weight, bases, missing=False):
    """Compares scores of saturating bases and of missing values, where NaN and infinity are as in the reference."""
    dtype = chunked.accumulation_dtype(query.dtype)
    widths = torch.tensor(WIDTHS[: len(bases)], dtype=dtype)
    double = [tensor.double() for tensor in (query, key, weight)]
    got = cpu.score(query, key, weight.to(dtype), bases, None, widths, missing)
    low = chunked.score(query, key, weight.to(dtype), bases, None, widths, missing)
    exact = chunked.score(*double, bases, None, widths.double(), missing)
    special = ~exact.isfinite()
    assert got.dtype == dtype
    torch.testing.assert_close(got[special], exact[special].to(dtype), rtol=0, atol=0, equal_nan=True)
    assert_as_good(*(scores.masked_fill(special, 0.0) for scores in (got, low, exact)))


def forget(share, *tensors):
    """Sets a share of all values to NaN, and all values of the last vector."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        tensor[torch.rand(tensor.shape, generator=generator) < share] = torch.nan
        tensor[-1, -1, -1] = torch.nan


def test_every_number_of_dimensions_is_sorted():
    """A network sorts if it sorts zeros and ones. Their scores are integers, and the smallest ones in order."""
    for d in (*range(1, 131), 255, 300, 513, 784, 1000, 1024):
        key = (torch.rand(1, 1, 64, d) < torch.rand(64, 1)).float()
        weight = unfold(torch.arange(1.0, d + 1)).reshape(1, 1, d)
        scores = cpu.score(torch.ones(1, 1, 1, d), key, weight, ("dot",))
        ones = key.sum(-1)
        assert torch.equal(scores[:, :, 0], ones * (ones + 1) / 2), d


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "n", "d"), [
    pytest.param(*case, id="{}-{}-{}".format(*case), marks=[] if index % 5 in (0, 2) else pytest.mark.full)
    for index, case in enumerate(CASES)
])  # fmt: skip
def test_against_reference(shape, n, d, dtype):
    check(*inputs(*shape, d, dtype=dtype, blocks=n), ALL)


@pytest.mark.parametrize(
    ("shape", "n", "d", "bases", "dtype"),
    [pytest.param(*case, id=f"{name} {index}") for name, cases in OTHERS.items() for index, case in enumerate(cases)],
)
def test_other_inputs_against_reference(shape, n, d, bases, dtype):
    query, key, weight = inputs(*shape, d, bases, blocks=n)
    check(query.to(dtype), key.to(dtype), weight, bases)


@pytest.mark.parametrize("n", [4, 7])
def test_products_of_blocks_keep_their_digits_far_from_zero(n):
    """Equal keys have equal scores, in whatever panel they are, and NaN stays in its row."""
    query, key, weight = inputs(1, 2, 21, 700, 8 * n, BOTH, blocks=n)
    query, key, weight = (tensor.float() for tensor in (query + 30, key + 30, weight))
    key[:, :, 600:] = key[:, :, :100]
    check(query, key, weight, BOTH)
    scores = cpu.score(query, key, weight, BOTH)
    assert torch.equal(scores[..., :100], scores[..., 600:])
    query[0, 1, 3, 5] = torch.nan
    nan = torch.zeros_like(scores, dtype=torch.bool)
    nan[0, 1, 3] = True
    assert torch.equal(cpu.score(query, key, weight, BOTH).isnan(), nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_converts_every_number(dtype):
    """All 65536 bit patterns, including denormals, infinities and NaN."""
    key = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(1, 1, -1, 1)
    scores = cpu.score(torch.ones(1, 1, 1, 1, dtype=dtype), key, torch.ones(1, 1, 1), ("dot",))
    torch.testing.assert_close(scores.flatten(), key.flatten().float(), rtol=0, atol=0, equal_nan=True)


def results(grad, query, key, weight, bases=ALL):
    """Returns scores and gradients."""
    return cpu.score(query, key, weight, bases), *cpu.score_backward(grad, query, key, weight, bases, EVERY)


@pytest.mark.parametrize("n", [12, 4])
@pytest.mark.parametrize("shape", [(2, 3, 6, 10), (9, 3, 1, 1)], ids=str)
def test_any_strides(shape, n):
    query, key, weight = inputs(*shape, 12, blocks=n)
    wide = torch.randn(*shape[:-1], 24)[..., ::2][..., : shape[-1]]
    transposed = (wide, query.mT.contiguous().mT, key.transpose(0, 1).contiguous().transpose(0, 1), weight)
    parts = (torch.ones(1, 1, 1, 1), query[:1, :1], key[:1, :1], weight[:1])
    sizes = (shape, query.shape, key.shape, weight.shape)
    for strided in (transposed, [part.expand(size) for part, size in zip(parts, sizes, strict=True)]):
        dense = [tensor.contiguous() for tensor in strided]
        for one, other in zip(results(*strided), results(*dense), strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 1, 0, 3), (1, 1, 2, 0)], ids=str)
def test_empty(shape):
    case = inputs(*shape, 5)
    scores, *grads = results(torch.zeros(shape), *case)
    assert scores.shape == shape
    assert all(map(torch.equal, grads, map(torch.zeros_like, case)))


@pytest.mark.parametrize("shape", [(1, 2, 3, 40), (2, 1, 70, 5), (10, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("n", [12, 3])
def test_only_the_needed_gradients(shape, n):
    query, key, weight = inputs(*shape, 12, blocks=n)
    grad = torch.randn(shape)
    every = cpu.score_backward(grad, query, key, weight, ALL, EVERY)
    for need in product((True, False), repeat=3):
        found = cpu.score_backward(grad, query, key, weight, ALL, need)
        for got, whole, wanted in zip(found, every, need, strict=True):
            torch.testing.assert_close(got, whole if wanted else whole.new_zeros(0))


@pytest.mark.parametrize(("n", "d"), [(1, 1), (33, 33), (11, 33), (10, 70)])
@pytest.mark.parametrize("base", [*ALL, "near"])
def test_nan_stays_in_its_pairs(base, n, d):
    query, key, weight = inputs(1, 1, 4, 70, d, (base,), blocks=n)
    spoiled, keys = query.clone(), key.clone()
    spoiled[0, 0, 1, d // 2] = keys[0, 0, 68, d - 1] = torch.nan
    touched = torch.zeros(4, 70, dtype=torch.bool)
    touched[1] = touched[:, 68] = True
    for scale in (1, 0):
        scores, clean = (cpu.score(*pair, scale * weight, (base,)) for pair in ((spoiled, keys), (query, key)))
        assert torch.equal(scores[0, 0].isnan(), touched)
        assert torch.equal(scores[0, 0][~touched], clean[0, 0][~touched])


@pytest.mark.parametrize("n", [18, 6, 1])
@pytest.mark.parametrize("base", [*ALL, "near"])
def test_infinity_as_in_the_reference(base, n):
    query, key, weight = (each.abs() for each in inputs(1, 1, 3, 20, 18, (base,), blocks=n))  # 1e30 does not cancel
    query[0, 0, 0, 3] = torch.inf
    key[0, 0, 5, 3] = torch.inf
    key[0, 0, 6, 2] = -torch.inf
    key[0, 0, 7] = 1e30
    for each in (weight, *(torch.full_like(weight, constant) for constant in (0.0, 0.5, torch.inf, torch.nan))):
        got, expected = (kernel.score(query, key, each, (base,)) for kernel in (cpu, chunked))
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize(("n", "d"), [(6, 6), (14, 70)])
def test_overflowing_similarities_keep_their_order(n, d):
    """Squares of finite numbers can overflow; gradients still follow their order."""
    query, key, weight = inputs(1, 1, 2, 9, d, ("dis",), blocks=n)
    key[..., 2] = 1e30
    case = torch.ones(1, 1, 2, 9), query, key, weight, ("dis",), (True, True, False)
    torch.testing.assert_close(cpu.score_backward(*case), chunked.score_backward(*case))


@pytest.mark.parametrize("base", ALL)
@pytest.mark.parametrize("d", [4, 40])
def test_ties_give_a_subgradient(base, d):
    """If all similarities are equal, any order is valid, and each weight is used once."""
    query, key = torch.full((1, 1, 1, d), 2.0), torch.full((1, 1, 1, d), 3.0)
    weight = torch.randn(1, 1, d)
    query_grad, key_grad, _ = cpu.score_backward(torch.ones(1, 1, 1, 1), query, key, weight, (base,), EVERY)
    by_query, by_key = chunked.BASES[base].slopes(query[0, 0, 0, 0], key[0, 0, 0, 0])
    for grad, slope in ((query_grad, by_query), (key_grad, by_key)):
        torch.testing.assert_close(grad.flatten().sort().values, (fold(weight).flatten() * slope).sort().values)


def test_near_ties_are_distinguished():
    """Similarities that differ only in bits that the sort replaces by a tag."""
    for d in (*range(1, 131), 300, 1024):
        steps = torch.randperm(d).float()
        key = (1 + steps * torch.finfo(torch.float32).eps).reshape(1, 1, 1, d)
        weight = unfold(torch.arange(1.0, d + 1)).reshape(1, 1, d)
        _, key_grad, _ = cpu.score_backward(torch.ones(1, 1, 1, 1), torch.ones_like(key), key, weight, ("dot",), EVERY)
        assert torch.equal(key_grad.flatten(), d - steps), d


@pytest.mark.parametrize("base", ALL)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_close_pairs_of_blocks(base, offset):
    """Differences of close numbers are computed before they are squared and summed."""
    query, key, weight = inputs(1, 1, 9, 40, 64, (base,), blocks=8)
    key[..., :9, :] = query + 1e-3 * key[..., :9, :]
    check(query + offset, key + offset, weight, (base,))


def test_nan_of_a_query_stays_in_its_gradients():
    query, key, weight = inputs(1, 1, 20, 70, 24, blocks=4)
    grad = torch.randn(1, 1, 20, 70, generator=torch.Generator().manual_seed(1))
    clean = cpu.score_backward(grad, query, key, weight, ALL, (True, False, False))[0]
    query[0, 0, 9, 5] = torch.nan
    touched = cpu.score_backward(grad, query, key, weight, ALL, (True, False, False))[0]
    others = torch.arange(20) != 9
    assert touched[0, 0, 9].isnan().any()
    torch.testing.assert_close(touched[0, 0, others], clean[0, 0, others], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(1, 6), (3, 6), (6, 6)])
def test_gradcheck(n, d):
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 1, 2, 3, d, ALL, torch.float64, blocks=n)]
    assert torch.autograd.gradcheck(lambda *args: ah.adaptive_similarity(*args, ALL, backend="cpu"), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("constants", [(0.0, 0.7, -0.3), (None, 0.7, None), (0.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize(("n", "d"), [(1, 1), (33, 33), (8, 64), (7, 49), (1, 130)])
def test_constant_weights_equal_sorted_ones(n, d, constants):
    """Weights that do not depend on the rank give the values of the reference, and so does each pair of gradients.

    The kernel does not sort for them, unless the weight has a gradient.
    """
    query, key, weight = inputs(1, 2, 9, 67, d, blocks=n)
    for index, constant in enumerate(constants):
        if constant is not None:
            weight[:, index] = constant
    check(query, key, weight, ALL)
    check_grads(separated_grad(query, key, ALL, n), query, key, weight, ALL, (True, True, False))


def test_what_is_served():
    """Blocks and dimensions are limited by the scratch memory."""
    for n, d in ((2**16, 2**16), (2**16, 2**17), (1, 2**18)):
        assert cpu.serves(torch.empty(1, 1, 1, d), ALL, n)
    for n, d in ((2**16 + 1, 2**16 + 1), (2**16 + 1, 2**17 + 2), (1, 2**18 + 1)):
        assert not cpu.serves(torch.empty(1, 1, 1, d), ALL, n)
    query = torch.empty(1, 1, 1, 12)
    assert all(cpu.serves(query, SHARED, n, missing) for n in (1, 4, 12) for missing in (False, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_the_exponential_is_exact_to_two_ulp(n, dtype):
    """From 1 at distance 0 to 0 at infinity. The distance in units of the width is rounded as well."""
    far = -torch.tensor(torch.finfo(dtype).tiny, dtype=torch.float64).log()
    distance = torch.cat([torch.linspace(0, far - 1, 5000), 10.0 ** torch.arange(-30, 1)]).to(dtype)
    key = torch.cat([distance, torch.tensor([2 * far, 1e30, torch.inf], dtype=dtype)]).reshape(1, 1, -1, 1)
    query, keys = torch.zeros(1, 1, 1, n, dtype=dtype), key.expand(-1, -1, -1, n)
    for weight in (torch.ones(1, 1, n, dtype=dtype), torch.ones(1, 1, n, dtype=dtype).cumsum(-1)):
        scores = cpu.score(query, keys, unfold(weight), ("near",))
        got, exact = scores.flatten().double(), (-key.flatten().double()).exp() * weight.sum()
        assert ((got - exact).abs() <= (2 + key.flatten()) * torch.finfo(dtype).eps * exact)[:-3].all()
        assert got[0] == weight.sum()
        assert torch.equal(got[-3:], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("bases", [("near",), SHARED, ("dis", "l1")], ids="-".join)
@pytest.mark.parametrize(("n", "d"), [(1, 1), (16, 16), (33, 33), (100, 100), (1, 2), (3, 21), (33, 66)])
def test_bases_of_the_distance_share_a_sort(n, d, bases):
    for shape, dtype in product(SMALL, (torch.float32, torch.float64)):
        check_scores(*inputs(*shape, d, bases, dtype, blocks=n), bases)


@pytest.mark.parametrize(("n", "missing"), [(4, False), (12, False), (12, True), (1, True)])
def test_near_with_constant_weights_and_half_precision(n, missing):
    query, key, weight = inputs(2, 3, 5, 30, 12, SHARED, blocks=n)
    weight[0, ::2, :-1], weight[1, :, :-1], weight[2, 3] = 0.0, 0.0, 0.0  # equal for all ranks, after a reverse cumsum
    if missing:
        forget(0.3, query, key)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_scores(query.to(dtype), key.to(dtype), weight, SHARED, missing)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("ranked", [1, 6])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (7, 7), (64, 64), (1, 66), (8, 64)])
def test_widths_that_differ_by_powers_of_two_share_an_exponential(n, d, ranked, missing):
    """One of the bases with equal weights takes over the others, and one of those by rank, unless one is infinite."""
    if missing and 1 < n < d:
        pytest.skip("the kernel takes unknown values in blocks of one or all dimensions")
    widths = torch.tensor([0.3, 0.3 / 4, 2.4, 0.29, 0.3 / 64, 0.6], dtype=torch.float64)
    for dtype, infinite in product((torch.float32, torch.float64), (False, True)):
        query, key = torch.randn(2, 5, d, dtype=dtype), torch.randn(2, 70, d, dtype=dtype)
        key[:, :5] = query
        query[0, 0, 0] = torch.inf if infinite else 0.0
        if missing:
            forget(0.3, query, key)
        weight = torch.zeros(len(widths), n, dtype=dtype)
        weight[:, -1] = torch.randn(len(widths))
        weight[-ranked:] = torch.rand(ranked, n) / (ranked * n)  # sorted, if there are ranks
        bases, scores = ("near",) * len(widths), []
        for wide, backend in ((dtype, "auto"), (torch.float64, "reference")):
            options = {"widths": widths.to(dtype).to(wide), "missing": missing, "backend": backend}
            rows = (each.to(wide) for each in (query, key, weight))
            scores.append(ah.adaptive_similarity(*rows, bases, **options).double())
        torch.testing.assert_close(*scores, rtol=0, atol=20 * (d + 5) * torch.finfo(dtype).eps)


@pytest.mark.parametrize("bases", [("dis",), ("dot",), ("near",), SHARED], ids="-".join)
@pytest.mark.parametrize("d", [3, 33, 64])
def test_missing_values(d, bases):
    for shape, dtype in product(SMALL, (torch.float32, torch.float64)):
        query, key, weight = inputs(*shape, d, bases, dtype)
        forget(0.3, query)  # all lanes know the same dimensions
        check_scores(query, key, weight, bases, missing=True)
        forget(0.3, key)
        check_scores(query, key, weight, bases, missing=True)


@pytest.mark.parametrize("n", [18, 1])
@pytest.mark.parametrize("base", [*ALL, "near"])
def test_infinity_beside_missing_values(base, n):
    query, key, weight = (each.abs() for each in inputs(1, 1, 4, 40, 18, (base,), blocks=n))  # 1e10 does not cancel
    forget(0.2, query, key)
    query[0, 0, 0, 3], query[0, 0, 1, 4] = torch.inf, 0.0
    key[0, 0, 5, 3], key[0, 0, 6, 2:5], key[0, 0, 7], key[0, 0, 8] = torch.inf, -torch.inf, 1e10, torch.inf
    check_scores(query, key, weight, (base,), missing=True)


def test_every_pair_knows_another_number_of_blocks():
    """Only the weights of some of these numbers are kept."""
    query, key, weight = inputs(1, 2, 5, 500, 400, SHARED)
    for row in range(500):
        key[..., row, : row * 4 // 5] = torch.nan
    check_scores(query, key, weight, SHARED, missing=True)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("bases", [("l1", "dis"), ("near", "near")], ids="-".join)
def test_thousands_of_blocks(bases, missing):
    """The pixels of an image of 96 x 96: 144 runs of 64 are added up in float32. Terms of one sign do not cancel."""
    query, key, weight = inputs(1, 1, 2, 9, 9216, bases)
    if missing:
        forget(0.3, query, key)
    weight, widths = weight.abs(), torch.tensor([1.0, 0.5])
    got = cpu.score(query, key, weight, bases, None, widths, missing)
    double = [each.double() for each in (query, key, weight)]
    exact = chunked.score(*double, bases, None, widths.double(), missing)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


def test_known_values_are_scored_as_without_missing_ones():
    case = inputs(2, 2, 9, 50, 33, SHARED)
    assert torch.equal(cpu.score(*case, SHARED, missing=True), cpu.score(*case, SHARED))


@pytest.mark.parametrize("n", [1, 3, 12])
@pytest.mark.parametrize("weights", [(1e30, 1e-30), (1e-30, 1e30), (1e-30, -1e30)])
def test_widths_an_octave_apart_with_weights_of_any_ratio(weights, n):
    query, key, _ = inputs(1, 1, 3, 40, 12, ("near", "near"))
    weight, widths = torch.zeros(1, 2, n), torch.tensor([0.5, 1.0])
    weight[0, :, -1] = torch.tensor(weights)
    arguments = query, key, weight, ("near", "near"), None, widths
    torch.testing.assert_close(cpu.score(*arguments), chunked.score(*arguments))


def test_gradients_of_near():
    tensors = *inputs(2, 2, 3, 9, 12, SHARED, blocks=4), SHARED, EVERY, torch.tensor(WIDTHS)
    grad = torch.randn(2, 2, 3, 9)
    assert all(map(torch.equal, cpu.score_backward(grad, *tensors), chunked.score_backward(grad, *tensors)))


THREADED = [((1, 1, 130, 300, 20), 5), ((3, 4, 9, 30, 33), 33), ((700, 2, 1, 1, 33), 3), ((1, 1, 1, 5000, 8), 8)]


@pytest.mark.parametrize(("shape", "n"), [*THREADED, ((1, 1, 70, 2100, 1024), 16)])  # the last one in two rounds
def test_threads_change_no_bit(shape, n):
    case, grad = inputs(*shape, blocks=n), torch.randn(shape[:4])
    partly = case[0].clone()
    forget(0.3, partly)

    def computed(threads):
        torch.set_num_threads(threads)
        known = cpu.score(partly, *case[1:], ALL, missing=True) if n == shape[-1] else grad
        return *results(grad, *case), known

    expected = computed(1)
    assert all(all(map(torch.equal, computed(threads), expected)) for threads in (2, 3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 1, 1), (1, 2, 66, 600), (3, 2, 9, 64)], ids=str)
def test_softmax_of_scores(shape, dtype):
    """Several panels of keys, lanes past the last key, and chunks of queries."""
    query, key, weight = inputs(*shape, 16, BOTH, torch.float64, blocks=4)
    grad = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def ours(dtype):
        tensors = [each.to(dtype) for each in (query, key, weight)]
        weights = cpu.score(*tensors, BOTH, softmax=True)
        return weights, *cpu.score_backward(grad.to(dtype), *tensors, BOTH, EVERY, softmax=weights)

    def separate(dtype, of_slopes=torch.clone):
        tensors = [each.to(dtype) for each in (query, key, weight)]
        weights = cpu.score(*tensors, BOTH).softmax(-1)
        slopes = weights * (grad.to(dtype) - (weights * grad.to(dtype)).sum(-1, keepdim=True))
        return weights, *cpu.score_backward(of_slopes(slopes), *tensors, BOTH, EVERY)

    results, exact, terms = ours(dtype), separate(torch.float64), separate(torch.float64, torch.abs)
    assert all(torch.equal(*pair) for pair in zip(results, ours(dtype), strict=True))
    for each in zip(results, separate(dtype), exact, terms, strict=True):
        assert_as_good(*each)


def test_softmax_of_scores_that_are_not_finite():
    query, key, weight = inputs(1, 2, 3, 40, 16, BOTH, blocks=4)
    query[0, 0, 0, 0], query[0, 0, 1] = torch.nan, 1e6
    weights = cpu.score(query, key, weight, BOTH, softmax=True)
    torch.testing.assert_close(weights, cpu.score(query, key, weight, BOTH).softmax(-1), equal_nan=True)


def test_several_python_threads():
    cases = [inputs(2, 1, 20, 90, d, seed=d) for d in (5, 16, 40, 64)]
    alone = [cpu.score(*case, ALL) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        assert all(map(torch.equal, pool.map(lambda case: cpu.score(*case, ALL), cases * 8), alone * 8))


def _total(seed: int) -> float:
    torch.set_num_threads(2)
    return cpu.score(*inputs(2, 1, 20, 90, 40, seed=seed), ALL).sum().item()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers():
    expected = [_total(seed) for seed in range(3)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_total, range(3)).get(timeout=60) == pytest.approx(expected, rel=1e-6)
