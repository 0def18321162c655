"""Footprints of blocks: the mathematics, the operators, and the kernels for CPU tensors."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ahop_layers as ah
from ahop_layers.ops import chunked, cpu
from ahop_layers.ops.reference import BASES as FORMULAS
from tests import samples

BASES = ("dis", "dot", "l1")
UNEQUAL = torch.tensor([2, 0, 1, 0, 2, 2, 1, 3, 0])
problem = partial(samples.problem, d=12, n=4)


@pytest.mark.parametrize("base", BASES)
def test_as_many_blocks_as_dimensions_is_the_plain_footprint_bit_by_bit(base):
    query, key = torch.randn(2, 3, 12), torch.randn(2, 4, 12)
    plain = FORMULAS[base].value(query[:, :, None], key[:, None]).sort(-1, descending=True).values.cumsum(-1)
    assert torch.equal(ah.footprint(query, key, base, 12), plain)
    assert torch.equal(ah.footprint(query, key, base, torch.arange(12)), plain)
    assert torch.equal(ah.footprint(query, key, base), plain)


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
    inputs = problem(2, length=2, count=3, d=6, n=n, heads=2, bases=5, grad=True)
    widths = torch.tensor([1.0, 1.0, 1.0, 0.7, 2.0], dtype=torch.float64)
    options = {"bases": (*BASES, "near", "near"), "widths": widths, "backend": backend}
    assert torch.autograd.gradcheck(lambda *args: ah.adaptive_similarity(*args, **options), inputs)


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
