"""The PTX bodies of the GPU kernels, executed by an emulator on the CPU."""

import numpy as np
import pytest
import torch

from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.gpu import mma, mma_kernels, ptx_backward, ptx_kernels
from ahop_layers.ops.gpu.plan import Plan
from ahop_layers.ops.gpu.ptx import Layout, choose_layout
from ahop_layers.ops.reference import folded_similarity
from tests.gaps import separated_grad
from tests.ptx_emulator import NAMES, WARP, Emulator, Memory, bits, error

pytestmark = pytest.mark.slow

BOTH = ("dis", "dot")
ROWS = 3


def problem(length, count, d, n, bases, dtype):
    query, key = torch.randn(length, d).to(dtype), torch.randn(count, d).to(dtype)
    return query, key, torch.randn(len(bases), n), separated_grad(query, key, bases, n)


def expected(query, key, weight, bases, grad):
    """Scores, and gradients of query, key and weight, in float64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (query, key, weight)]
    scores = folded_similarity(*inputs, bases)
    return scores.detach(), *torch.autograd.grad(scores, inputs, grad.double())


def places(layout, warps=1):
    """Sorted position, first dimension and pair of each thread, as the Triton kernels compute them."""
    thread = np.arange(WARP * warps)
    lane = thread % layout.lanes
    member = lane % layout.group
    part = lane // layout.group * layout.split + member % layout.split
    first = member // layout.split * layout.run * layout.block_size + part * layout.stretch
    return member * layout.chunk, first, thread // layout.lanes


def prepare(layout, query, key, weight, dtype, widths=None):
    """Pads the inputs as a launch does."""
    n = weight.shape[-1]
    plan = Plan(None, dtype, layout, 16, 0, {})
    query, key = (
        gpu._rows(tensor, plan, n, fill)[0, 0]
        for tensor, fill in ((query[None, None], gpu.PAD_QUERY), (key[None, None], gpu.PAD_KEY))
    )
    return plan, query, key, gpu._weights(weight[None], plan, widths)[0]


LAYOUTS = {
    "one lane": (8, 8, None, torch.float32),
    "every dimension": (12, 1, None, torch.float32),
    "lanes with padding": (97, 1, None, torch.float32),
    "split blocks": (64, 16, Layout(16, 4, 4, 4), torch.float32),
    "split and copied": (8, 64, Layout(4, 2, 16, 2, 2), torch.float32),
    "copies": (4, 64, Layout(2, 2, 4, 1, 16), torch.float32),
    "padded blocks": (3, 20, Layout(4, 1, 3, 1, 8), torch.float32),
    "one block": (1, 64, Layout(1, 1, 4, 1, 16), torch.float32),
    "half precision": (8, 7, None, torch.float16),
    "bfloat16": (16, 4, None, torch.bfloat16),
}
full = pytest.mark.full


def layouts(*quick):
    """All layouts, of which those that are not named run in make test-all only."""
    cases = [pytest.param(*case, id=name, marks=() if name in quick else full) for name, case in LAYOUTS.items()]
    return pytest.mark.parametrize(("n", "size", "layout", "dtype"), cases)


def scores(body, layout, query, key, weight, packed=False, widths=None):
    """Runs the body of scores; returns them and the number of executed instructions."""
    length, count, dtype = len(query), len(key), query.dtype
    _, query, key, weight = prepare(layout, query, key, weight, dtype, widths)
    memory, item = Memory(), query.element_size()
    row = item * layout.dims
    q, k, w = memory.put(bits(query)), memory.put(bits(key)), memory.put(bits(weight))
    out = memory.put(np.zeros((length, count), np.float32))
    position, first, pair = places(layout)
    stores = np.arange(WARP) % layout.lanes == 0
    sides = [(1 + packed) * pair + side for side in (0, packed)]
    emulator = Emulator(memory)
    emulator.run(
        body,
        [*(k + row * side + item * first for side in sides), q + item * first, row, w + 4 * position,
         *(out + 4 * side for side in sides), 4 * count, length, stores, stores],
    )  # fmt: skip
    return torch.from_numpy(memory.get(out, (length, count))), emulator.executed


@layouts("every dimension", "lanes with padding", "split and copied", "half precision")
@pytest.mark.parametrize("weights", ["random", "constant"])
def test_score(n, size, layout, dtype, weights):
    layout = layout or choose_layout(n, size, alone=96, shared=64)
    bases = (*BOTH, "l1") if n == 8 else BOTH
    query, key, weight, grad = problem(ROWS, layout.pairs, n * size, n, bases, dtype)
    if weights == "constant":
        weight[:] = torch.tensor([0.0, 0.5, 0.25])[: len(bases), None]
    found, executed = scores(ptx_kernels.score(layout, n, bases, NAMES[dtype]), layout, query, key, weight)
    assert error(found, expected(query, key, weight, bases, grad)[0]) < 1e-6
    if weights == "constant" and n >= ptx_kernels.MIN_SKIPPED:  # far fewer instructions than a sort takes
        assert executed < ROWS * 20 * layout.per_lane + 400 + 30 * n


@pytest.mark.parametrize(
    ("d", "dtype", "weights"),
    [
        (12, torch.float16, "random"),
        (12, torch.bfloat16, "constant"),
        pytest.param(100, torch.bfloat16, "random", marks=full),
    ],
)
def test_two_packed_keys(d, dtype, weights):
    layout = choose_layout(d, 1, alone=96, shared=64, step=2)
    query, key, weight, grad = problem(ROWS, 2 * layout.pairs, d, d, BOTH, dtype)
    if weights == "constant":
        weight[:] = torch.tensor([0.0, 0.5])[:, None]
    body = ptx_kernels.score(layout, d, BOTH, NAMES[dtype], packed=True)
    found, _ = scores(body, layout, query, key, weight, packed=True)
    exact = expected(query, key, weight, BOTH, grad)[0]
    assert error(found, exact) < (1e-6 if weights == "constant" else 2e-2)


@pytest.mark.parametrize(
    ("d", "dtype", "packed"),
    [(12, torch.float32, False), (12, torch.bfloat16, True), pytest.param(97, torch.bfloat16, True, marks=full)],
    ids=str,
)
def test_one_sort_for_all_bases_of_the_absolute_difference(d, dtype, packed):
    bases, widths = ("l1", "near", "dot", "near", "dis"), torch.tensor([0.0, 0.3, 0.0, 2.0, 0.0])
    layout = choose_layout(d, 1, alone=96, shared=64, step=1 + packed)
    count = (1 + packed) * layout.pairs
    query, key, weight = torch.randn(ROWS, d).to(dtype), torch.randn(count, d).to(dtype), torch.randn(len(bases), d)
    exact = folded_similarity(*(tensor.double() for tensor in (query, key, weight)), bases, widths.double())
    body, two = (ptx_kernels.score(layout, d, names, NAMES[dtype], packed) for names in (bases, ("l1", "dot")))
    found, _ = scores(body, layout, query, key, weight, packed, widths)
    assert error(found, exact) < (2e-2 if packed else 1e-6)
    assert body.count("min.NaN") == two.count("min.NaN")


def gradients(body, layout, query, key, weight, grad, warps, tiles):
    """Runs the body of gradients; returns those of query, key and weight, and the executed instructions."""
    n, count, dtype = weight.shape[-1], len(key), query.dtype
    size = query.shape[-1] // n
    plan, query, key, weight = prepare(layout, query, key, weight, dtype)
    memory, item = Memory(), query.element_size()
    row = item * layout.dims
    inputs = [memory.put(bits(tensor)) for tensor in (key, query, weight, grad)]
    shapes = (count, layout.dims), (ROWS, layout.dims), (warps, 2, layout.blocks)
    outputs = [memory.put(np.full(shape, np.nan, np.float32)) for shape in shapes]
    position, first, _ = places(layout, warps)
    warp = np.arange(WARP * warps) // WARP
    emulator = Emulator(memory, warps)
    emulator.run(
        body,
        [inputs[0] + item * first, row, inputs[1] + item * first, row, inputs[2] + 4 * position, inputs[3], 4 * count,
         4, *outputs[:2], outputs[2] + 4 * warp * 2 * layout.blocks, 0, count, ROWS, tiles],
    )  # fmt: skip
    found = [torch.from_numpy(memory.get(*each)) for each in zip(outputs, shapes, strict=True)]
    ordered = [gpu._in_order(found[index], plan, n, size) for index in (1, 0)]
    return [*ordered, found[2].sum(0)[:, :n]], emulator.executed


@layouts("every dimension", "split and copied", "padded blocks", "half precision")
@pytest.mark.parametrize("warps", [pytest.param(1, marks=full), 2])
def test_backward(n, size, layout, dtype, warps):
    layout = layout or choose_layout(n, size, alone=32, shared=32)
    count, tiles = 2 * warps * layout.pairs - 1, 2  # the last lane has no key
    query, key, weight, grad = problem(ROWS, count, n * size, n, BOTH, dtype)
    tagged = size == 1 and dtype != torch.float32
    body = ptx_backward.score_backward(layout, n, BOTH, NAMES[dtype], warps, tagged)
    found, _ = gradients(body, layout, query, key, weight, grad, warps, tiles)
    for result, exact in zip(found, expected(query, key, weight, BOTH, grad)[1:], strict=True):
        assert error(result, exact) < (1e-6 if not tagged else 1e-3)


@pytest.mark.parametrize(("n", "size"), [(16, 4), *(pytest.param(64, size, marks=full) for size in (1, 16))])
def test_backward_of_constant_weights_needs_no_sort(n, size):
    layout = choose_layout(n, size, alone=32, shared=32)
    query, key, weight, grad = problem(ROWS, layout.pairs, n * size, n, BOTH, torch.float32)
    weight[:] = torch.tensor([0.0, 0.5])[:, None]
    executed = []
    for may_skip in (True, False):
        body = ptx_backward.score_backward(layout, n, BOTH, "f32", may_skip=may_skip)
        found, count = gradients(body, layout, query, key, weight, grad, 1, 1)
        executed.append(count)
        for result, exact in zip(found[:2], expected(query, key, weight, BOTH, grad)[1:3], strict=True):
            assert error(result, exact) < 1e-6
    assert executed[0] < executed[1]


MMA_CASES = [
    (4, 16, torch.float16, BOTH),
    (3, 16, torch.bfloat16, ("dot",)),
    pytest.param(2, 8, torch.float16, ("dis",), marks=full),
    pytest.param(1, 32, torch.bfloat16, ("dot", "dis"), marks=full),
    pytest.param(6, 8, torch.float16, BOTH, marks=full),
    pytest.param(8, 8, torch.bfloat16, BOTH, marks=full),
]


@pytest.mark.parametrize(("n", "size", "dtype", "bases"), MMA_CASES)
@pytest.mark.parametrize("warps", [pytest.param(1, marks=full), 2])
def test_tensor_cores(n, size, dtype, bases, warps):
    assert mma.serves(n, size, bases)
    length, count, d = 19, 16 * warps + 5, n * size
    query, key, weight, grad = problem(length, count, d, n, bases, dtype)
    grad = grad.to(dtype) if warps == 2 else grad
    exact = expected(query, key, weight, bases, grad)
    memory = Memory()
    q, k, w, g = (memory.put(bits(tensor)) for tensor in (query, key, weight, grad))
    out = memory.put(np.full((length, count), np.nan, np.float32))
    for kind, item, rounding in ((torch.float32, 4, 1e-6), (dtype, 2, torch.finfo(dtype).eps)):
        for first in range(0, count, 16 * warps):
            Emulator(memory, warps).run(
                mma_kernels.score(n, size, bases, NAMES[dtype], warps, NAMES[kind]),
                [k, 2 * d, q, 2 * d, w, out, item, item * count, count, first, length],
            )
        scores = torch.from_numpy(memory.get(out, (length, count), f"i{item}")).view(kind)
        assert error(scores, exact[0]) < rounding
    shapes = (count, d), (length, d), (warps, len(bases), n)
    key_grad, query_grad, weight_grad = (memory.put(np.full(shape, np.nan, np.float32)) for shape in shapes)
    warp = np.arange(WARP * warps) // WARP
    Emulator(memory, warps).run(
        mma_kernels.score_backward(n, size, bases, NAMES[dtype], warps, NAMES[grad.dtype]),
        [k, 2 * d, q, 2 * d, w, g, grad.element_size() * count, grad.element_size(), key_grad, query_grad,
         weight_grad + 4 * warp * len(bases) * n, 0, count, length, 2],
    )  # fmt: skip
    total = memory.get(weight_grad, shapes[2]).sum(0)
    results = memory.get(query_grad, shapes[1]), memory.get(key_grad, shapes[0]), total
    for result, reference in zip(results, exact[1:], strict=True):
        assert error(torch.from_numpy(result), reference) < torch.finfo(dtype).eps
