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
from tests.ptx_emulator import WARP, Emulator, Memory

pytestmark = pytest.mark.slow

BOTH = ("dis", "dot")
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ROWS = 3


def bits(tensor):
    """A NumPy array with the bits of the tensor, which may be bfloat16."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy() if tensor.element_size() == 2 else tensor.numpy()


def problem(length, count, d, n, bases, dtype):
    query, key = torch.randn(length, d).to(dtype), torch.randn(count, d).to(dtype)
    return query, key, torch.randn(len(bases), n), separated_grad(query, key, bases, n)


def expected(query, key, weight, bases, grad):
    """Scores, and gradients of query, key and weight, in float64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (query, key, weight)]
    scores = folded_similarity(*inputs, bases)
    return scores.detach(), *torch.autograd.grad(scores, inputs, grad.double())


def error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


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


@pytest.mark.parametrize(("n", "size", "layout", "dtype"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("weights", ["random", "constant"])
def test_score(n, size, layout, dtype, weights):
    layout = layout or choose_layout(n, size, alone=96, shared=64)
    bases = (*BOTH, "l1") if n == 8 else BOTH
    query, key, weight, grad = problem(ROWS, layout.pairs, n * size, n, bases, dtype)
    if weights == "constant":
        weight[:] = torch.tensor([0.0, 0.5, 0.25])[: len(bases), None]
    exact = expected(query, key, weight, bases, grad)[0]
    _, query, key, weight = prepare(layout, query, key, weight, dtype)
    memory = Memory()
    row = query.element_size() * layout.dims
    q, k, w = memory.put(bits(query)), memory.put(bits(key)), memory.put(bits(weight))
    out = memory.put(np.zeros((ROWS, layout.pairs), np.float32))
    position, first, pair = places(layout)
    stores = np.arange(WARP) % layout.lanes == 0
    offset = query.element_size() * first
    emulator = Emulator(memory)
    emulator.run(
        ptx_kernels.score(layout, n, bases, NAMES[dtype]),
        [k + row * pair + offset, 0, q + offset, row, w + 4 * position, out + 4 * pair, 0, 4 * layout.pairs, ROWS,
         stores, 0],
    )  # fmt: skip
    scores = torch.from_numpy(memory.get(out, (ROWS, layout.pairs)))
    assert error(scores, exact) < 1e-6
    if weights == "constant" and n >= ptx_kernels.MIN_SKIPPED:  # far fewer instructions than a sort takes
        assert emulator.executed < ROWS * 20 * layout.per_lane + 400 + 30 * n


@pytest.mark.parametrize(("d", "dtype"), [(12, torch.float16), (12, torch.bfloat16), (100, torch.bfloat16)])
@pytest.mark.parametrize("weights", ["random", pytest.param("constant", marks=pytest.mark.full)])
def test_two_packed_keys(d, dtype, weights):
    layout = choose_layout(d, 1, alone=96, shared=64, step=2)
    count = 2 * layout.pairs
    query, key, weight, grad = problem(ROWS, count, d, d, BOTH, dtype)
    if weights == "constant":
        weight[:] = torch.tensor([0.0, 0.5])[:, None]
    exact = expected(query, key, weight, BOTH, grad)[0]
    _, query, key, weight = prepare(layout, query, key, weight, dtype)
    memory = Memory()
    row = 2 * layout.dims
    q, k, w = memory.put(bits(query)), memory.put(bits(key)), memory.put(bits(weight))
    out = memory.put(np.zeros((ROWS, count), np.float32))
    position, first, pair = places(layout)
    stores = np.arange(WARP) % layout.lanes == 0
    addresses = [k + row * (2 * pair + side) + 2 * first for side in (0, 1)]
    results = [out + 4 * (2 * pair + side) for side in (0, 1)]
    Emulator(memory).run(
        ptx_kernels.score(layout, d, BOTH, NAMES[dtype], packed=True),
        [*addresses, q + 2 * first, row, w + 4 * position, *results, 4 * count, ROWS, stores, stores],
    )
    assert error(torch.from_numpy(memory.get(out, (ROWS, count))), exact) < (1e-6 if weights == "constant" else 2e-2)


@pytest.mark.parametrize(
    ("d", "dtype", "packed"), [(1, torch.float32, 0), (12, torch.float32, 0), (97, torch.bfloat16, 1)], ids=str
)
def test_one_sort_for_all_bases_of_the_absolute_difference(d, dtype, packed):
    bases, widths = ("l1", "near", "dot", "near", "dis"), torch.tensor([0.0, 0.3, 0.0, 2.0, 0.0])
    layout = choose_layout(d, 1, alone=96, shared=64, step=1 + packed)
    count = (1 + packed) * layout.pairs
    query, key, weight = torch.randn(ROWS, d).to(dtype), torch.randn(count, d).to(dtype), torch.randn(len(bases), d)
    exact = folded_similarity(*(tensor.double() for tensor in (query, key, weight)), bases, widths.double())
    _, query, key, weight = prepare(layout, query, key, weight, dtype, widths)
    memory = Memory()
    item = query.element_size()
    row = item * layout.dims
    q, k, w = memory.put(bits(query)), memory.put(bits(key)), memory.put(bits(weight))
    out = memory.put(np.zeros((ROWS, count), np.float32))
    position, first, pair = places(layout)
    stores = np.arange(WARP) % layout.lanes == 0
    sides = [(1 + packed) * pair + side for side in (0, packed)]
    body = ptx_kernels.score(layout, d, bases, NAMES[dtype], bool(packed))
    Emulator(memory).run(
        body,
        [*(k + row * side + item * first for side in sides), q + item * first, row, w + 4 * position,
         *(out + 4 * side for side in sides), 4 * count, ROWS, stores, stores],
    )  # fmt: skip
    assert error(torch.from_numpy(memory.get(out, (ROWS, count))), exact) < (2e-2 if packed else 1e-6)
    two = ptx_kernels.score(layout, d, ("l1", "dot"), NAMES[dtype], bool(packed))
    assert body.count("min.NaN") == two.count("min.NaN")


@pytest.mark.parametrize(("n", "size", "layout", "dtype"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("warps", [pytest.param(1, marks=pytest.mark.full), 2])
def test_backward(n, size, layout, dtype, warps):
    layout = layout or choose_layout(n, size, alone=32, shared=32)
    d, keys = n * size, warps * layout.pairs
    count, tiles = 2 * keys - 1, 2  # the last lane has no key
    query, key, weight, grad = problem(ROWS, count, d, n, BOTH, dtype)
    exact = expected(query, key, weight, BOTH, grad)[1:]
    plan, query, key, weight = prepare(layout, query, key, weight, dtype)
    memory = Memory()
    row = query.element_size() * layout.dims
    inputs = [memory.put(bits(tensor)) for tensor in (key, query, weight, grad)]
    shapes = (count, layout.dims), (ROWS, layout.dims), (warps, 2, layout.blocks)
    key_grad, query_grad, weight_grad = (memory.put(np.full(shape, np.nan, np.float32)) for shape in shapes)
    position, first, _ = places(layout, warps)
    warp = np.arange(WARP * warps) // WARP
    offset = query.element_size() * first
    tagged = n == d and dtype != torch.float32
    Emulator(memory, warps).run(
        ptx_backward.score_backward(layout, n, BOTH, NAMES[dtype], warps, tagged),
        [inputs[0] + offset, row, inputs[1] + offset, row, inputs[2] + 4 * position, inputs[3], 4 * count, 4,
         key_grad, query_grad, weight_grad + 4 * warp * 2 * layout.blocks, 0, count, ROWS, tiles],
    )  # fmt: skip
    key_grad, query_grad, weight_grad = (
        torch.from_numpy(memory.get(place, shape))
        for place, shape in zip((key_grad, query_grad, weight_grad), shapes, strict=True)
    )
    ours = (gpu._in_order(query_grad, plan, n, size), gpu._in_order(key_grad, plan, n, size))
    for result, reference in zip((*ours, weight_grad.sum(0)[:, :n]), exact, strict=True):
        assert error(result, reference) < (1e-6 if not tagged else 1e-3)


@pytest.mark.parametrize(("n", "size"), [(64, 1), (16, 4), (64, 16)])
def test_backward_of_constant_weights_needs_no_sort(n, size):
    layout = choose_layout(n, size, alone=32, shared=32)
    query, key, weight, grad = problem(ROWS, layout.pairs, n * size, n, BOTH, torch.float32)
    weight[:] = torch.tensor([0.0, 0.5])[:, None]
    exact = expected(query, key, weight, BOTH, grad)[1:3]
    plan, query, key, weight = prepare(layout, query, key, weight, torch.float32)
    memory = Memory()
    row = 4 * layout.dims
    inputs = [memory.put(bits(tensor)) for tensor in (key, query, weight, grad)]
    shapes = (layout.pairs, layout.dims), (ROWS, layout.dims), (2, n)
    outputs = [memory.put(np.full(shape, np.nan, np.float32)) for shape in shapes]
    position, first, _ = places(layout)
    executed = {}
    for may_skip in (True, False):
        emulator = Emulator(memory)
        emulator.run(
            ptx_backward.score_backward(layout, n, BOTH, "f32", may_skip=may_skip),
            [inputs[0] + 4 * first, row, inputs[1] + 4 * first, row, inputs[2] + 4 * position, inputs[3],
             4 * layout.pairs, 4, *outputs, 0, layout.pairs, ROWS, 1],
        )  # fmt: skip
        executed[may_skip] = emulator.executed
        results = (torch.from_numpy(memory.get(outputs[i], shapes[i])) for i in (1, 0))
        for result, reference in zip(results, exact, strict=True):
            assert error(gpu._in_order(result, plan, n, size), reference) < 1e-6
    assert executed[True] < executed[False]


MMA_CASES = [
    (4, 16, torch.float16, BOTH), (3, 16, torch.bfloat16, ("dot",)), (2, 8, torch.float16, ("dis",)),
    (1, 32, torch.bfloat16, ("dot", "dis")), pytest.param(6, 8, torch.float16, BOTH, marks=pytest.mark.full),
    pytest.param(8, 8, torch.bfloat16, BOTH, marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("n", "size", "dtype", "bases"), MMA_CASES)
@pytest.mark.parametrize("warps", [pytest.param(1, marks=pytest.mark.full), 2])
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
