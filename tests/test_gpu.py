"""The GPU kernels on a GPU; test_cuda.py runs them on a CPU."""

import os
import subprocess
import sys

import pytest
import torch

import ahop_layers as ah
from ahop_layers.ops import chunked
from ahop_layers.ops.gpu import division, score
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.gpu.layout import choose_layout
from ahop_layers.ops.reference import fold, folded_similarity
from tests.gaps import separated_grad

HAS_GPU = torch.cuda.is_available() and gpu.unavailable() is None


def on_gpu(test):
    """Marks a test that needs a GPU."""
    reason = f"needs a CUDA device: {gpu.unavailable()}"
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason=reason)(test))


BOTH = ("dis", "dot")
ALL = (True, True, True)


def problem(n, h, length, count, d, bases=2, dtype=torch.float32, blocks=None):
    return (
        torch.randn(n, h, length, d, device="cuda").to(dtype),
        torch.randn(n, h, count, d, device="cuda").to(dtype),
        torch.randn(h, bases, blocks or d, device="cuda") / d,
    )


def gradients(query, key, weight, bases, grad):
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, weight)]
    scores = folded_similarity(*inputs[:2], fold(inputs[2]), bases)
    return scores.detach(), *torch.autograd.grad(scores, inputs, grad.to(scores.dtype))


def results(query, key, weight, grad, bases=BOTH):
    """Scores and gradients by the kernels."""
    return gpu.score(query, key, weight, bases), *gpu.score_backward(grad, query, key, weight, bases, ALL)


def check_against_reference(query, key, weight, bases=BOTH):
    """The error of each result against float64 is at most twice that of plain PyTorch in its dtype, plus rounding."""
    grad = separated_grad(query, key, bases, weight.shape[-1])
    ours = results(query, key, weight, grad, bases)
    theirs = gradients(query, key, weight.to(query.dtype), bases, grad)
    exact = gradients(*(tensor.double() for tensor in (query, key, weight)), bases, grad)
    for name, a, b, c in zip(("scores", "query", "key", "weight"), ours, theirs, exact, strict=True):
        assert a.isfinite().all(), name
        error = (a.double() - c).norm()
        allowed = 2 * (b.double() - c).norm() + 4 * torch.finfo(query.dtype).eps * c.norm()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


SHAPES = ((2, 3, 65, 65, 64), (1, 1, 1, 1000, 64), (1, 1, 1000, 1, 64), (1, 2, 70, 3, 32), (3, 1, 17, 129, 48))
WIDTHS = (1, 2, 3, 6, 7, 31, 33, 63, 65, 96, 97, 100, 127, 128, 200, 256, 511, 784, 1000, 1024)
BLOCKS = (
    (64, 1), (64, 2), (64, 4), (64, 8), (64, 16), (64, 32), (48, 3), (35, 5), (35, 7), (100, 25), (12, 6),
    (1022, 7), (1023, 3), (1024, 1), (1024, 4), (1024, 64), (1024, 512), (1000, 125), (2048, 16), (1026, 513),
)  # fmt: skip
SOME_BASES = [("dis",), ("dot",), ("l1",), ("l1", "dot"), ("dot", "l1", "dis")]
CASES = [
    *((*shape, n, BOTH) for shape in (*SHAPES, (1, 1, 1, 1, 1)) for n in {shape[-1], max(1, shape[-1] // 8)}),
    *((1, 2, 9, 37, d, d, BOTH) for d in WIDTHS),
    *((2, 2, 9, 37, d, n, BOTH) for d, n in BLOCKS),
    *((2, 2, 33, 37, 64, n, bases) for n in (64, 8) for bases in SOME_BASES),
]


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
half_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@on_gpu
@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_plain_pytorch(case, dtype, poisoned_memory):
    *shape, n, bases = case
    query, key, weight = problem(*shape, len(bases), dtype, n)
    assert gpu.serves(query, bases, n)
    check_against_reference(query, key, weight, bases)


NEAR = {"near": ("near",), "l1-near-dot-near-dis": ("l1", "near", "dot", "near", "dis"), "eight": ("near",) * 8}


@on_gpu
@every_dtype
@pytest.mark.parametrize(("d", "n"), [*((d, d) for d in (1, 3, 31, 64, 100, 256, 1000)), (64, 8), (36, 12)])
@pytest.mark.parametrize("bases", NEAR.values(), ids=NEAR)
def test_near(d, n, bases, dtype, poisoned_memory):
    query, key, weight = problem(2, 3, 17, 37, d, len(bases), dtype, n)
    widths = torch.linspace(0.2, 2.0, len(bases), device="cuda")
    assert gpu.serves(query, bases, n)
    theirs = folded_similarity(query, key, fold(weight.to(dtype)), bases, widths.to(dtype))
    exact = folded_similarity(query.double(), key.double(), fold(weight.double()), bases, widths.double())
    error = (gpu.score(query, key, weight, bases, widths=widths).double() - exact).norm()
    assert error <= 2 * (theirs.double() - exact).norm() + 4 * torch.finfo(dtype).eps * exact.norm()


@on_gpu
@two_dtypes
@pytest.mark.parametrize(("d", "n"), [(7, 7), (100, 100), (1024, 1024), (3000, 3000), (96, 24)])
def test_unknown_values(d, n, dtype, poisoned_memory):
    bases, widths = ("l1", "near", "dot", "near"), torch.tensor([1.0, 0.3, 1.0, 2.0], device="cuda")
    query, key, weight = problem(2, 3, 17, 37, d, len(bases), dtype, n)
    query[torch.rand(query.shape, device="cuda") < 0.2] = key[0, 0, 3] = torch.nan
    assert gpu.serves(query, bases, n, missing=True)
    scores = gpu.score(query, key, weight, bases, widths=widths, missing=True)
    exact = chunked.score(query.double(), key.double(), weight.double(), bases, None, widths.double(), missing=True)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)


@on_gpu
def test_near_propagates_nan_and_saturates_at_infinity():
    query, key, weight = problem(1, 1, 3, 37, 100, 1)
    query[0, 0, 1, 5], query[0, 0, 2, 5] = float("nan"), float("inf")
    scores, exact = gpu.score(query, key, weight, ("near",)), folded_similarity(query, key, fold(weight), ("near",))
    torch.testing.assert_close(scores, exact, equal_nan=True)


@on_gpu
def test_gradients_of_near_through_the_public_function():
    inputs = [tensor.requires_grad_() for tensor in problem(1, 1, 9, 11, 16)]
    options = {"bases": ("l1", "near"), "widths": torch.tensor([1.0, 0.5], device="cuda")}
    ours, exact = (ah.adaptive_similarity(*inputs, **options, backend=name) for name in ("auto", "reference"))
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(*(torch.autograd.grad(scores.sum(), inputs) for scores in (ours, exact)))


@on_gpu
@half_dtypes
@pytest.mark.parametrize("n", [4, 8, 16])
def test_blocks_far_from_the_origin(n, dtype, poisoned_memory):
    """Squared distances by a matrix product lose digits there, though not more than half precision does anyway."""
    query, key, weight = problem(2, 2, 33, 37, 64, blocks=n)
    check_against_reference(*((tensor + 30).to(dtype) for tensor in (query, key)), weight)


@on_gpu
@pytest.mark.parametrize("n", [64, 8, 4])
@every_dtype
def test_several_tiles_per_program(n, dtype, monkeypatch, poisoned_memory):
    score._plan.cache_clear()
    monkeypatch.setattr(division, "slots", lambda device: 5)
    check_against_reference(*problem(1, 2, 37, 203, 64, dtype=dtype, blocks=n))


@on_gpu
@pytest.mark.parametrize(("d", "n"), [(64, 64), (64, 16), (200, 200), (1024, 64)])
@two_dtypes
@pytest.mark.parametrize("kind", ["dot product", "one flat base", "one flat head"])
def test_constant_weights(d, n, dtype, kind, poisoned_memory):
    """Weights for which the order does not matter skip the sort, also where other bases and heads need it."""
    query, key, weight = problem(2, 2, 9, 37, d, dtype=dtype, blocks=n)
    if kind == "one flat head":
        weight[0], weight[0, :, -1] = 0, 0.25
    else:
        weight[:, 0] = 0
    if kind == "dot product":
        weight[:, 1], weight[:, 1, -1] = 0, 0.5
    check_against_reference(query, key, weight)
    grad = separated_grad(query, key, BOTH, n)
    frozen = gpu.score_backward(grad, query, key, weight, BOTH, (True, True, False))
    torch.testing.assert_close(frozen[:2], results(query, key, weight, grad)[1:3])


@on_gpu
def test_any_division_gives_equal_gradients(monkeypatch):
    case = *problem(3, 2, 65, 70, 64), torch.randn(3, 2, 65, 70, device="cuda")
    whole = results(*case)
    for division_of_work in ((70, 1), (1, 65), (2, 7), (99, 65)):
        score._plan.cache_clear()
        monkeypatch.setattr(division, "divide", lambda *args, found=division_of_work: found)
        torch.testing.assert_close(results(*case), whole, rtol=1e-5, atol=1e-4)
    score._plan.cache_clear()


@on_gpu
def test_more_heads_than_a_grid_axis_takes():
    case = problem(70_000, 1, 2, 3, 4)
    grad = torch.randn(70_000, 1, 2, 3, device="cuda")
    torch.testing.assert_close(results(*case, grad), gradients(*case, BOTH, grad), rtol=1e-3, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("kind", ["transposed", "expanded", "misaligned", "odd address", "sliced"])
@two_dtypes
def test_strides(kind, dtype):
    query, key, weight = problem(2, 3, 33, 37, 64, dtype=dtype)
    if kind == "transposed":  # as (N, L, H, d) projections come
        query, key = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key))
    elif kind == "expanded":
        query, weight = query[:1, :1].expand(2, 3, 33, 64), weight[:1].expand(3, 2, 64)
    elif kind == "odd address":
        key = torch.empty(key.numel() + 1, device="cuda", dtype=dtype)[1:].view(key.shape).copy_(key)
    else:
        wide = torch.full((2, 3, 37, 131), float("nan"), device="cuda", dtype=dtype)
        key = (wide[..., 1:65] if kind == "misaligned" else wide[..., 1:129:2]).copy_(key)
    case = query, key, weight, torch.randn(33, 37, device="cuda").expand(2, 3, 33, 37)
    assert all(map(torch.equal, results(*case), results(*(tensor.contiguous() for tensor in case))))


@on_gpu
@two_dtypes
@pytest.mark.parametrize("n", [64, 8])
def test_two_runs_give_equal_bits(n, dtype):
    case = *problem(4, 3, 197, 197, 64, dtype=dtype, blocks=n), torch.randn(4, 3, 197, 197, device="cuda")
    assert all(map(torch.equal, results(*case), results(*case)))


@on_gpu
@pytest.mark.parametrize("d", [7, 64, 128])
@two_dtypes
def test_nan_and_inf_stay_in_their_rows(d, dtype):
    query, key, weight = problem(2, 1, 9, 37, d, dtype=dtype)
    query[0, 0, 1, d // 2] = key[1, 0, 2, 0] = float("nan")
    touched = torch.zeros(2, 1, 9, 37, dtype=torch.bool, device="cuda")
    touched[0, :, 1, :] = touched[1, :, :, 2] = True
    scores, query_grad, *_ = results(query, key, weight, torch.ones(2, 1, 9, 37, device="cuda"))
    assert torch.equal(scores.isnan(), touched)
    assert query_grad[~touched.any(-1)].isfinite().all()
    query[0, 0, 1, d // 2] = float("inf")
    assert gpu.score(query, key, weight, BOTH)[~touched].isfinite().all()


@on_gpu
def test_empty_problems():
    for length, count in ((0, 5), (5, 0)):
        scores, *grads = results(*problem(2, 3, length, count, 8), torch.ones(2, 3, length, count, device="cuda"))
        assert scores.shape == (2, 3, length, count)
        assert not any(grad.any() for grad in grads)


@on_gpu
def test_public_function_autocast_compile_and_float64():
    query, key, _ = problem(2, 3, 33, 37, 64)
    similarity = ah.AdaptiveSimilarity(64, 3, debias=True).cuda()
    with torch.no_grad():
        similarity.w.normal_(std=0.1)
    with torch.autocast("cuda", torch.bfloat16):
        scores = similarity(query, key)
    assert scores.dtype == torch.float32
    weight = (similarity.beta.unsqueeze(-1) * similarity.w).detach()
    halves = ah.adaptive_similarity(query.bfloat16(), key.bfloat16(), weight)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(scores.bfloat16(), halves)
    compiled = torch.compile(similarity, fullgraph=True)
    torch.testing.assert_close(compiled(query, key), similarity(query, key))
    compiled(query, key).sum().backward()
    assert ah.adaptive_similarity(query.double(), key.double(), weight.double()).dtype == torch.float64


@on_gpu
@pytest.mark.parametrize(("d", "n"), [(7, 7), (64, 64), (64, 8), (64, 16), (257, 257)])
@half_dtypes
def test_scores_and_gradients_in_half_precision(d, n, dtype):
    """Scores are rounded to the dtype of the query as they are stored, and gradients are read in it."""
    case = problem(2, 2, 33, 37, d, dtype=dtype, blocks=n)
    grad = torch.randn(2, 2, 33, 37, device="cuda").to(dtype)
    assert torch.equal(gpu.score(*case, BOTH, dtype), gpu.score(*case, BOTH).to(dtype))
    assert all(map(torch.equal, results(*case, grad), results(*case, grad.float())))


@on_gpu
def test_opcheck_on_the_gpu():
    inputs = problem(2, 3, 9, 11, 16)
    arguments = *(x.clone().requires_grad_() for x in inputs), "dis,dot", "cuda", True, None, False, None
    torch.library.opcheck(torch.ops.ahop.score, arguments)
    padded = problem(1, 1, 9, 11, 97)  # padded inside the kernel; the results must have the declared strides
    for tensors, need in ((inputs, [True, False, True]), (padded, [True] * 3)):
        grad = torch.randn(*tensors[0].shape[:2], 9, 11, device="cuda")
        arguments = grad, *tensors, "dis,dot", "cuda", None, False, None, need
        torch.library.opcheck(torch.ops.ahop.score_backward, arguments)


@on_gpu
def test_cuda_graph():
    query, key, weight = problem(2, 3, 65, 65, 64)
    query.requires_grad_()

    def step():
        return torch.autograd.grad(ah.adaptive_similarity(query, key, weight).square().sum(), query)[0]

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@on_gpu
def test_streams_side_by_side():
    inputs = [problem(1, 2, 300, 300, 64) for _ in range(4)]
    expected = [gpu.score(*each, BOTH) for each in inputs]
    torch.cuda.synchronize()
    found = []
    for each in inputs:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(gpu.score(*each, BOTH))
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    query, key, weight = problem(1, 2, 9, 11, 64)
    there = [tensor.to("cuda:1") for tensor in (query, key, weight)]
    assert torch.equal(gpu.score(*there, BOTH).to("cuda:0"), gpu.score(query, key, weight, BOTH))


@on_gpu
def test_few_kernels_are_compiled(tmp_path):
    """One forward and one backward kernel serve all shapes with the same d and dtype."""
    code = """
import torch
from ahop_layers.ops.gpu import launch as gpu
for n, h, length, count in ((1, 1, 5, 7), (2, 3, 65, 65), (1, 1, 1, 1000), (1, 1, 1000, 1), (16, 1, 16, 16)):
    query, key = torch.randn(n, h, length, 64, device="cuda"), torch.randn(n, h, count, 64, device="cuda")
    weight, grad = torch.randn(h, 2, 64, device="cuda"), torch.randn(n, h, length, count, device="cuda")
    gpu.score(query, key, weight, ("dis", "dot"))
    gpu.score_backward(grad, query, key, weight, ("dis", "dot"), (True, True, True))
    gpu.score_backward(grad.mT.contiguous().mT, query, key, weight, ("dis", "dot"), (True, False, True))
"""
    environment = {**os.environ, "AHOP_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["score", "score_backward"]


@pytest.mark.slow
def test_layouts_cover_every_d():
    sizes = (*range(1, 130, 3), 200, 256, 513, 784, 1023, 1024)
    for size, n in ((d // n, n) for d in sizes for n in range(1, d + 1) if d % n == 0):
        for layout in (choose_layout(n, size, alone=96, shared=64), choose_layout(n, size, alone=32, shared=32)):
            assert layout.lanes in (1, 2, 4, 8, 16, 32), (n, size)
            assert n <= layout.blocks < 2 * n + 32, (n, size)
            assert size <= layout.block_size < 2 * size, (n, size)
            assert layout.per_lane <= 128, (n, size)
    assert all(choose_layout(d, 1, alone=32, shared=32).chunk <= 32 for d in sizes)  # the limit of a tag
