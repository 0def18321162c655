"""Footprints of blocks: the mathematics, the operators, and the kernels for CPU tensors."""

from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ahop_layers as ah
from ahop_layers.ops import chunked, cpu
from ahop_layers.ops.reference import BASES as FORMULAS
from ahop_layers.ops.reference import sorted_similarities
from tests import samples

BASES = ("dis", "dot", "l1")
UNEQUAL = torch.tensor([2, 0, 1, 0, 2, 2, 1, 3, 0])
problem = partial(samples.problem, d=12, n=4)


def per_block(query, key, base, numbers):
    """Similarities of each block by their definition: one masked sum for each block."""
    values = FORMULAS[base].value(query[..., :, None, :], key[..., None, :, :])
    return torch.stack([values[..., numbers == block].sum(-1) for block in range(int(numbers.max()) + 1)], -1)


def consecutive(n, d):
    return torch.arange(d) // (d // n)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("blocks", [1, 3, None, torch.tensor([0, 1, 1, 2, 0, 3, 3, 3, 3, 4, 2, 0])], ids=str)
def test_footprint_is_the_best_sum_of_any_k_blocks(base, blocks):
    query, key = torch.randn(3, 12, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    numbers = blocks if isinstance(blocks, torch.Tensor) else consecutive(blocks or 12, 12)
    values = per_block(query, key, base, numbers)
    n = values.shape[-1]
    best = [
        torch.stack([values[..., list(subset)].sum(-1) for subset in combinations(range(n), k)]).amax(0)
        for k in range(1, n + 1)
    ]
    torch.testing.assert_close(ah.footprint(query, key, base, blocks), torch.stack(best, -1))


@pytest.mark.parametrize("base", BASES)
def test_as_many_blocks_as_dimensions_is_the_plain_footprint_bit_by_bit(base):
    query, key = torch.randn(2, 3, 12), torch.randn(2, 4, 12)
    plain = FORMULAS[base].value(query[:, :, None], key[:, None]).sort(-1, descending=True).values.cumsum(-1)
    assert torch.equal(ah.footprint(query, key, base, 12), plain)
    assert torch.equal(ah.footprint(query, key, base, torch.arange(12)), plain)
    assert torch.equal(ah.footprint(query, key, base), plain)


def test_masked_lemma_for_masks_that_are_unions_of_blocks():
    """Counting equal blocks ranks patterns by likelihood if whole blocks are replaced, and not for other masks."""
    d, n, masked = 24, 8, 0.5
    patterns = torch.randint(0, 2, (50, d)).double()
    index, mask = torch.randint(50, (400,)), torch.rand(400, n) < masked
    noise = torch.randint(0, 2, (400, d)).double()
    query = torch.where(mask.repeat_interleave(d // n, 1), noise, patterns[index])
    scores = (sorted_similarities(query, patterns, "dis", n) == 0).double().sum(-1)
    blocks = (query[:, None] == patterns[None]).unflatten(-1, (n, d // n)).all(-1)
    alike = torch.tensor((1 - masked) + masked * 0.5 ** (d // n), dtype=torch.float64).log()
    other = torch.tensor(masked * 0.5 ** (d // n), dtype=torch.float64).log()
    likelihood = torch.where(blocks, alike, other).sum(-1)
    best = likelihood >= likelihood.amax(-1, keepdim=True) - 1e-9
    assert torch.equal(scores == scores.amax(-1, keepdim=True), best)
    assert (scores.gather(-1, index[:, None]) >= (~mask).sum(-1, keepdim=True)).all()
    # A mask that hits one dimension of every block leaves no block equal, although 16 of 24 dimensions are.
    query = patterns[index].clone()
    query[:, :: d // n] = 1 - query[:, :: d // n]
    scores = (sorted_similarities(query, patterns, "dis", n) == 0).double().sum(-1)
    assert (scores.gather(-1, index[:, None]) == 0).all()


def restride(tensor, kind):
    """The same values with other strides."""
    if kind == "transposed":
        return tensor.mT.contiguous().mT
    if kind == "sliced":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"), dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    return tensor[..., :1, :].expand(tensor.shape) if kind == "expanded" else tensor


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2), (0,)]),
    length=st.integers(0, 9),
    count=st.integers(0, 9),
    n=st.integers(1, 17),
    width=st.sampled_from([1, 1, 2, 3, 7, 16]),
    heads=st.sampled_from([None, 1, 3]),
    bases=st.permutations(BASES).flatmap(lambda names: st.integers(1, 3).map(lambda n: tuple(names[:n]))),
    strides=st.tuples(*[st.sampled_from(["contiguous", "transposed", "sliced", "expanded"])] * 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    backend=st.sampled_from(["auto", "chunked"]),
)
def test_values_and_gradients_equal_the_reference(
    batch, length, count, n, width, heads, bases, strides, dtype, backend
):
    query, key, weight = problem(*batch, length=length, count=count, d=n * width, n=n, heads=heads, bases=len(bases))
    query, key = restride(query, strides[0]) if length else query, restride(key, strides[1]) if count else key
    got, expected = [], []
    for result, kind, name in ((got, dtype, backend), (expected, torch.float64, "reference")):
        inputs = [tensor.detach().to(kind).requires_grad_() for tensor in (query, key, weight)]
        scores = ah.adaptive_similarity(*inputs, bases, n, backend=name)
        assert scores.dtype == kind
        # A tie of two blocks has several subgradients; continuous random values have none.
        result += [scores, *torch.autograd.grad(scores.sum(), inputs)]
    for ours, theirs in zip(got, expected, strict=True):
        scale = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
        tolerance = (1e-4 if dtype == torch.float32 else 1e-9) * scale
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(
    ("backend", "n"), [("reference", 3), ("chunked", 1), ("chunked", 3), ("chunked", 6), ("auto", 6)]
)
def test_gradcheck(backend, n):
    inputs = problem(2, length=2, count=3, d=6, n=n, heads=2, bases=3, grad=True)
    assert torch.autograd.gradcheck(lambda *args: ah.adaptive_similarity(*args, BASES, backend=backend), inputs)


def test_gradcheck_of_unequal_blocks():
    inputs = problem(2, length=3, count=4, d=9, n=4, bases=3, grad=True)
    assert torch.autograd.gradcheck(lambda *args: ah.adaptive_similarity(*args, BASES, UNEQUAL), inputs)
    query, key, weight = inputs
    footprints = [ah.footprint(query, key, base, UNEQUAL) @ weight[i] for i, base in enumerate(BASES)]
    torch.testing.assert_close(ah.adaptive_similarity(query, key, weight, BASES, UNEQUAL), sum(footprints))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "backend"), [(1, "auto"), (8, "auto"), (64, "auto"), (8, "chunked"), (64, "chunked")])
def test_half_precision_error_is_at_most_twice_pytorchs(dtype, n, backend):
    query, key, weight = (tensor.to(dtype) for tensor in problem(2, length=33, count=47, d=64, n=n))
    exact = ah.adaptive_similarity(query.double(), key.double(), weight.double(), backend="reference")
    theirs, ours = (
        (ah.adaptive_similarity(query, key, weight, backend=name).double() - exact).abs().max()
        for name in ("reference", backend)
    )
    assert ours <= 2 * theirs + torch.finfo(dtype).eps * exact.abs().max()


def test_every_element_is_written(poisoned_memory):
    query, key, weight = problem(2, 3, length=7, count=65, d=35, n=5, dtype=torch.float32)
    inputs = query, key, weight.expand(3, -1, -1)
    scores = chunked.score(*inputs, ("dis", "dot"))
    grads = chunked.score_backward(torch.ones(2, 3, 7, 65), *inputs, ("dis", "dot"), (True, True, True))
    assert all(each.isfinite().all() for each in (scores, *grads))


def test_a_forced_kernel_that_does_not_serve_raises(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "serves", lambda query, bases, blocks, missing: blocks == query.shape[-1])
    with pytest.raises(ah.AHopError, match=r"backend='cpu' does not support .* with d = 12, 4 blocks and bases"):
        ah.adaptive_similarity(*problem(), backend="cpu")
