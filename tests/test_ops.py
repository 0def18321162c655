"""The registered operators: values, gradients, checks, transforms of torch, memory."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import ahop_layers as ah
from ahop_layers.ops import chunked, cpu, reference
from ahop_layers.ops.backend import choose_kernel
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.gpu import nvrtc
from tests.new_tensors import peak_memory
from tests.samples import problem, refuses

BASES = ("dis", "dot", "l1")
OPTIONS = True, None, False, None  # wide scores, no widths, no missing values


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_only_the_needed_gradients(backend):
    for needed in range(3):
        inputs = problem(2, heads=3)
        wanted = inputs[needed].requires_grad_()
        got, expected = (
            torch.autograd.grad(ah.adaptive_similarity(*inputs, backend=name).sum(), wanted)
            for name in (backend, "reference")
        )
        torch.testing.assert_close(got, expected)


def test_batches_broadcast():
    query, key, weight = problem(4, heads=3)
    for inputs in ((query[:1, :1], key), (query, key[0]), (query[:1, :1], key[0])):
        expected = ah.adaptive_similarity(*inputs, weight, backend="reference")
        torch.testing.assert_close(ah.adaptive_similarity(*inputs, weight), expected)


@pytest.mark.slow
def test_opcheck():
    query, key, weight = problem(2, heads=3)
    torch.library.opcheck(torch.ops.ahop.score, (query.requires_grad_(), key, weight, "dis,dot", "auto", *OPTIONS))
    inputs = torch.randn(2, 3, 5, 7, dtype=torch.float64), query.detach(), key, weight[..., :4]
    for need in ([True, True, True], [False, True, False]):
        torch.library.opcheck(torch.ops.ahop.score_backward, (*inputs, "dis,dot", "auto", None, False, None, need))


x, y, u = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(3, 2, 8)
GRAD = torch.randn(2, 3, 5, 7)


def test_a_lazily_negated_tensor_is_negated():
    """The imaginary part of a conjugate shares memory with values of the opposite sign."""
    negated = torch.complex(y, y).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(ah.adaptive_similarity(x, negated, u), ah.adaptive_similarity(x, -y, u))


class Recorder(TorchDispatchMode):
    """Records the operators that are called, and their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] = args
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_the_operators_and_the_same_gradients():
    tensors, grads = problem(2, grad=True), []
    with torch.profiler.profile() as profile:
        ah.adaptive_similarity(*tensors).sum().backward()
    assert {"ahop::score", "ahop::score_backward"} <= {event.key for event in profile.key_averages()}
    recorder = Recorder()
    for mode in (recorder, nullcontext()):
        with mode:
            grads.append(torch.autograd.grad(ah.adaptive_similarity(*tensors).sum(), tensors))
    assert {torch.ops.ahop.score_forward.default, torch.ops.ahop.score_backward.default} <= recorder.seen.keys()
    assert all(map(torch.equal, *grads))
    scores = ah.adaptive_similarity(*tensors, backend="chunked")
    with recorder:
        scores.sum().backward()
    assert recorder.seen[torch.ops.ahop.score_backward.default][5] == "chunked"


@pytest.mark.full
@pytest.mark.slow
def test_compile_without_a_graph_break():
    similarity = ah.AdaptiveSimilarity(8, num_heads=3, debias=True)
    query, key, _ = problem(2, heads=3, dtype=torch.float32)
    compiled = torch.compile(similarity, fullgraph=True)
    torch.testing.assert_close(compiled(query, key), similarity(query, key))
    expected = torch.autograd.grad(similarity(query, key).square().sum(), list(similarity.parameters()))
    got = torch.autograd.grad(compiled(query, key).square().sum(), list(similarity.parameters()))
    torch.testing.assert_close(got, expected)


def test_autocast_computes_in_float32():
    query, key, weight = problem(2, length=33, count=47, d=64, dtype=torch.float32)
    halves = query.bfloat16(), key.bfloat16()
    exact = ah.adaptive_similarity(*(each.float() for each in halves), weight)
    with torch.autocast("cpu", torch.bfloat16):
        for backend in ("auto", "chunked", "reference"):
            scores = ah.adaptive_similarity(*halves, weight, backend=backend)
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, exact)
        assert ah.adaptive_similarity(query, halves[1], weight).dtype == torch.float32


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)])
def test_vmap(in_dims):
    stacks = [torch.randn(4, *tensor.shape, dtype=torch.float64) for tensor in problem()]
    inputs = [tensor if axis == 0 else tensor[0] for tensor, axis in zip(stacks, in_dims, strict=True)]
    each = [[t[i] if axis == 0 else t for t, axis in zip(inputs, in_dims, strict=True)] for i in range(4)]
    mapped = torch.func.vmap(ah.adaptive_similarity, in_dims=in_dims)
    torch.testing.assert_close(mapped(*inputs), torch.stack([ah.adaptive_similarity(*tensors) for tensors in each]))
    empty = [tensor[:0] if axis == 0 else tensor for tensor, axis in zip(inputs, in_dims, strict=True)]
    assert mapped(*empty).shape == (0, 5, 7)


def test_a_batch_of_gradients():
    inputs = problem(2, grad=True)
    scores, grads = ah.adaptive_similarity(*inputs), torch.randn(3, 2, 5, 7, dtype=torch.float64)
    each = [torch.autograd.grad(scores, inputs, grad, retain_graph=True) for grad in grads]
    got = torch.autograd.grad(scores, inputs, grads, is_grads_batched=True)
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*each, strict=True))))


def test_forward_mode_and_torch_func():
    """Transforms that the operators do not support use the reference path instead of silently dropping a tangent."""
    score, inputs = ah.adaptive_similarity, problem(3)
    tangents = tuple(map(torch.randn_like, inputs))
    ahead, behind = (score(*(x + h * t for x, t in zip(inputs, tangents, strict=True))) for h in (1e-6, -1e-6))
    slope = torch.func.jvp(score, inputs, tangents)[1]
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-5)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, tangents)
        scores = torch.func.vmap(score, in_dims=(0, 0, None))(*duals)
        torch.testing.assert_close(forward_ad.unpack_dual(scores).tangent, slope)

    def total(query, key, weight):
        return score(query, key, weight).square().sum()

    learned = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(total(*learned), learned)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1, 2))(*inputs), expected)
    each = torch.func.vmap(torch.func.grad(total, argnums=2), in_dims=(0, 0, None))(*inputs)
    torch.testing.assert_close(each.sum(0), expected[2])
    torch.testing.assert_close(torch.func.jacfwd(score)(*inputs), torch.func.jacrev(score)(*inputs))


def test_double_backward_is_refused_and_the_reference_does_it():
    query, key, weight = problem(grad=True)
    (grad,) = torch.autograd.grad(ah.adaptive_similarity(query, key, weight).sum(), query, create_graph=True)
    refuses("backend='reference'", grad.sum().backward)
    inputs = problem(length=2, count=3, d=4, grad=True)
    assert torch.autograd.gradgradcheck(lambda *a: ah.adaptive_similarity(*a, backend="reference"), inputs)


def test_tensors_of_inference_mode_are_refused_under_autograd():
    query, key, weight = problem()
    with torch.inference_mode():
        inference = key.clone()
    with pytest.raises(RuntimeError, match="make a clone"):
        ah.adaptive_similarity(query, inference, weight.requires_grad_())
    assert ah.adaptive_similarity(query, inference, weight.detach()).shape == (5, 7)
    assert ah.adaptive_similarity(query, inference.clone(), weight).requires_grad


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_nan_and_inf_stay_in_their_rows(backend):
    query, key, weight = problem(2, dtype=torch.float32)
    query[0, 1, 3] = key[1, 2, 0] = float("nan")
    expected = torch.zeros(2, 5, 7, dtype=torch.bool)
    expected[0, 1, :] = expected[1, :, 2] = True
    assert torch.equal(ah.adaptive_similarity(query, key, weight, backend=backend).isnan(), expected)
    query, key, weight = problem(dtype=torch.float32)
    query[1, 2] = float("inf")
    scores = ah.adaptive_similarity(query.requires_grad_(), key, weight, backend=backend)
    assert torch.equal(scores.isfinite(), (torch.arange(5) != 1)[:, None].expand(5, 7))
    scores.sum().backward()


LARGE = [(1, 1, 300, 700, 64), (1, 1, 2, 9000, 300), (1, 1, 3, 5, 4000)]


@pytest.mark.parametrize(("shape", "n"), [
    ((4, 8, 65, 65, 64), 64),
    ((1, 1, 300, 700, 64), 8),
    *(pytest.param(x, x[-1], marks=pytest.mark.full) for x in LARGE),
])  # fmt: skip
@pytest.mark.slow
def test_chunked_memory_is_bounded(shape, n):
    """Peak memory of forward and backward stays below 64 MB besides inputs and results."""
    *batch, length, count, d = shape
    query, key = torch.randn(*batch, length, d), torch.randn(*batch, count, d)
    weight, grad = torch.randn(batch[1], 2, n), torch.randn(*batch, length, count)
    for call in (
        lambda: (chunked.score(query, key, weight, ("dis", "dot")),),
        lambda: chunked.score_backward(grad, query, key, weight, ("dis", "dot"), (True, True, True)),
    ):
        results, peak = peak_memory(call)
        assert 0 < peak - sum(result.nbytes for result in results) <= 64e6


def test_user_base_runs_on_the_reference_path():
    name = "agreement_for_this_test"
    ah.register_base(name, lambda query, key: torch.exp(-((query - key) ** 2)))
    query, key, weight = problem(2, grad=True)
    assert torch.autograd.gradcheck(
        lambda *args: ah.adaptive_similarity(*args, bases=("dot", name)), (query, key, weight)
    )
    refuses("reference path only", ah.adaptive_similarity, query, key, weight, ("dot", name), backend="chunked")
    # The sum of eight (200 - 1)^2 overflows float16; the weighted sum does not.
    half = [torch.full((rows, 8), value, dtype=torch.float16) for rows, value in ((2, 200.0), (3, 1.0))]
    weight = torch.tensor([[0.0] * 7 + [0.01]] * 3)
    assert ah.adaptive_similarity(*half, weight, (name, "dis", "dot")).isfinite().all()


@pytest.fixture
def quartic(monkeypatch):
    """A base with slopes that no compiled kernel implements."""

    def slopes(query, key):
        cube = 4 * (query - key) ** 3
        return -cube, cube

    monkeypatch.setitem(reference.BASES, "quartic", reference.Base(lambda query, key: -((query - key) ** 4), slopes))
    return "quartic"


def test_a_kernel_serves_only_the_bases_it_implements(quartic, monkeypatch):
    monkeypatch.setattr(nvrtc, "capability", lambda device: (8, 0))  # the GPU kernels then serve CPU tensors
    query = torch.randn(1, 1, 5, 8)
    for kernel in (cpu, gpu):
        assert kernel.serves(query, BASES, 8)
        assert not kernel.serves(query, (*BASES, quartic), 8)
    assert chunked.serves(query, (*BASES, quartic), 8)


def test_a_new_base_is_scored_as_itself(quartic):
    query, key, weight = problem(2, bases=3, grad=True)
    bases = ("dis", quartic, "l1")
    assert choose_kernel("auto", query, bases, 8) is chunked
    assert torch.autograd.gradcheck(lambda *args: ah.adaptive_similarity(*args, bases), (query, key, weight))
    expected = ah.adaptive_similarity(query, key, weight, bases, backend="reference")
    torch.testing.assert_close(ah.adaptive_similarity(query, key, weight, bases), expected)
    if cpu.unavailable() is None:
        with pytest.raises(ah.AHopError, match=r"backend='cpu' does not support .* bases dis, quartic, l1"):
            ah.adaptive_similarity(query, key, weight, bases, backend="cpu")


@pytest.mark.slow
@pytest.mark.recorded  # shifted seeds would import torch first
def test_import_and_a_training_step_load_no_large_library():
    """Importing the package takes at most a fifth of torch's CPU time. A training step imports no compiler.

    The garbage collector is off: whether it visits all objects of torch during the import is chance.
    """
    code = (
        "import gc, sys, time; gc.disable(); start = time.process_time(); import torch;"
        "loaded = time.process_time(); before = set(sys.modules); import ahop_layers as ah;"
        "print((time.process_time() - loaded) / (loaded - start));"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before});"
        "inputs = [torch.randn(4, 8, requires_grad=True), torch.randn(5, 8), torch.randn(2, 8, requires_grad=True)];"
        "ah.adaptive_similarity(*inputs).sum().backward();"
        "print(*{'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    large = {"triton", "lightning", "sklearn", "matplotlib", "timm", "torchvision", "transformers", "entmax"}
    assert float(out[0]) < 0.2
    assert "ahop_layers" in out[1].split()
    assert not set(out[1].split()) & large
    assert not out[2].split()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_in_the_dtype_of_the_query(backend, dtype):
    """The operator rounds scores of half precision once, and its backward takes gradients in that dtype."""
    query, key, weight = x.to(dtype), y.to(dtype), u
    inputs = query, key, weight, "dis,dot", backend
    wide, narrow = (torch.ops.ahop.score(*inputs, each, None, False, None) for each in (True, False))
    assert (wide.dtype, narrow.dtype) == (torch.float32, dtype)
    assert torch.equal(narrow, wide.to(dtype))
    need = [True, True, True]
    results = (
        torch.ops.ahop.score_backward(each, *inputs, None, False, None, need)
        for each in (GRAD.to(dtype), GRAD.to(dtype).float())
    )
    assert all(map(torch.equal, *results))
    if backend == "auto":
        torch.library.opcheck(torch.ops.ahop.score, (query.requires_grad_(), *inputs[1:], False, None, False, None))


class _Seen(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def test_what_observes_a_call_sees_its_operators_and_the_results_are_equal():
    query, key, weight = (torch.randn(size, requires_grad=True) for size in ((2, 5, 8), (2, 7, 8), (2, 4)))

    def gradients():
        scores = ah.adaptive_similarity(query, key, weight)
        return scores.detach(), *torch.autograd.grad(scores.square().sum(), (query, key, weight))

    with _Seen() as seen:
        observed = gradients()
    assert {"ahop::score_forward", "ahop::score_backward"} <= seen.names
    assert all(map(torch.equal, observed, gradients()))
    pairs = torch.complex(torch.randn(5, 8), torch.randn(5, 8))
    negated = pairs.conj().imag  # a lazy negation: the memory holds the values with the other sign
    assert negated.is_neg()
    expected = ah.adaptive_similarity(negated.clone().resolve_neg(), key[0], weight)
    torch.testing.assert_close(ah.adaptive_similarity(negated, key[0], weight), expected)
