"""The CUDA C++ kernels without a GPU: g++ runs them on the CPU, and NVRTC compiles them for all architectures."""

import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import ahop_layers as ah
from ahop_layers.association import Mask
from ahop_layers.errors import AHopError
from ahop_layers.ops import backend
from ahop_layers.ops.dropout import kept, scale
from ahop_layers.ops.gpu import attend, division, nvrtc, score
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.gpu.layout import choose_layout
from ahop_layers.ops.protocols import AttentionCall
from ahop_layers.ops.reference import fold, folded_similarity, missing_similarity
from tests.cuda_on_cpu import EmulatedKernel, compile_for_cpu
from tests.samples import refuses
from tests.test_gpu import check_against_reference, results

BOTH = ("dis", "dot")
NAMES = ("out", "query", "key", "value", "weight", "beta")
QUICK = {"both bases", "several rounds", "pairs of keys", "one dimension", "float32"}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
no_nvrtc = nvrtc.library_error()
needs_nvrtc = pytest.mark.skipif(no_nvrtc is not None, reason=f"{no_nvrtc}: make test-cuda installs it")


@pytest.fixture
def emulated(monkeypatch):
    """Runs the kernels on the CPU, with a number of bytes of shared memory."""

    def set_bytes(block):
        monkeypatch.setattr(attend, "_limits", lambda device: attend.Limits(0, block, 2 * block, 3))

    monkeypatch.setattr(nvrtc, "kernel", EmulatedKernel)
    monkeypatch.setattr(nvrtc, "compile_together", lambda programs, index: None)
    monkeypatch.setattr(nvrtc, "capability", lambda device: (9, 0))
    monkeypatch.setattr(attend, "_plans", {})
    score._plan.cache_clear()
    set_bytes(100_000)
    yield set_bytes
    score._plan.cache_clear()


CASES = {  # N, H, Hk, L, S, d, e and blocks; further options
    "both bases": ((1, 2, 2, 20, 70, 64, 64, 4), {"bytes": 50_000}),  # three groups of keys
    "one group": ((1, 2, 2, 20, 40, 64, 64, 4), {}),
    "several rounds": ((6, 1, 1, 150, 40, 16, 16, 2), {"causal": True, "dropout": 0.2}),
    "several heads of a block": ((5, 2, 2, 36, 150, 16, 16, 2), {"causal": True, "bytes": 60_000}),
    "warps without keys": ((5, 2, 2, 36, 20, 16, 16, 2), {"mask": torch.bool}),
    "sixteen warps": ((6, 1, 1, 250, 300, 8, 8, 1), {"bytes": 60_000}),
    "strips in turns": ((1, 2, 1, 40, 140, 32, 32, 4), {"causal": True, "mask": torch.bool, "bytes": 40_000}),
    "strips of a block": ((2, 2, 2, 20, 140, 16, 20, 1), {"mask": torch.float32}),
    "eight blocks": ((1, 1, 1, 20, 33, 64, 24, 8), {"dtype": torch.float16, "dropout": 0.3, "causal": True}),
    "dot alone": ((1, 1, 1, 17, 20, 40, 16, 2), {"bases": ("dot",), "mask": torch.bfloat16}),
    "dis alone": ((2, 1, 1, 33, 20, 24, 16, 3), {"bases": ("dis",), "dtype": torch.float16, "mask": torch.float16}),
    "float32": ((1, 2, 1, 20, 70, 64, 64, 4), {"dtype": torch.float32, "mask": torch.bool}),
    "float32, strips in turns": (
        (1, 1, 1, 40, 140, 32, 32, 4),
        {"dtype": torch.float32, "causal": True, "bytes": 60_000},
    ),
    "float32, many tiles before the keys": ((1, 1, 1, 100, 110, 16, 16, 4), {"dtype": torch.float32, "causal": True}),
    "float32, odd sizes": ((3, 2, 2, 1, 65, 7, 12, 1), {"dtype": torch.float32}),
    "float32, three blocks": ((1, 2, 2, 33, 65, 48, 20, 3), {"dtype": torch.float32, "dropout": 0.3}),
    "float32, eight blocks": ((1, 1, 1, 20, 33, 64, 24, 8), {"dtype": torch.float32, "mask": torch.float32}),
    "float32, dis alone": ((1, 1, 1, 20, 33, 12, 24, 2), {"dtype": torch.float32, "bases": ("dis",)}),
    "float32, dot alone": ((1, 1, 1, 20, 33, 40, 24, 5), {"dtype": torch.float32, "bases": ("dot",)}),
    "float32, blocks of four": ((2, 2, 1, 33, 40, 16, 16, 4), {"dtype": torch.float32}),
    "odd halves": ((1, 2, 1, 33, 40, 21, 15, 3), {"dtype": torch.float16}),
    "pairs of halves": ((1, 2, 1, 33, 40, 24, 18, 4), {}),
    "TF32": ((2, 1, 1, 33, 40, 64, 64, 4), {"dtype": torch.float32, "tf32": True}),
    "two orders": ((1, 1, 1, 1, 1, 64, 64, 2), {"bases": ("dot", "dis")}),
}


def quick(cases):
    """Parameters of which only the QUICK ones are in ``make test``."""
    marks = {name: () if name in QUICK else pytest.mark.full for name in cases}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in cases.items()]


def make_mask(dtype, n, length, count):
    if dtype != torch.bool:
        return None if dtype is None else torch.randn(n, 1, length, count).to(dtype)
    mask = torch.rand(n, 1, length, count) < 0.3
    mask[..., 3, :] = True
    return mask


def by_pytorch(call, grad, dtype):
    """The readout and all gradients by separate operations in a dtype."""
    inputs = [x.to(dtype).requires_grad_() for x in (*call[:4], call.beta)]
    group = call.query.shape[1] // call.key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in inputs[1:3])
    weight = call.scaling * inputs[4].unsqueeze(-1) * inputs[3]
    scores = ah.adaptive_similarity(inputs[0], keys, weight, call.bases, backend="reference")
    blocked = call.mask if call.mask is not None and call.mask.dtype == torch.bool else None
    weights = ah.Separation()(Mask(blocked, None if blocked is not None else call.mask, call.causal).apply(scores))
    if call.dropout:
        heads, rows, columns = (torch.arange(size) for size in (scores.shape[:2].numel(), *scores.shape[2:]))
        weights = weights * kept(call.seed, heads, rows, columns, call.dropout).view_as(scores) * scale(call.dropout)
    out = weights @ values
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), quick(CASES))
def test_fused_attention_on_the_cpu(shape, options, emulated, monkeypatch):
    """The error against float64 is at most twice that of plain PyTorch in the same dtype, plus rounding.

    TF32 has three more bits than bfloat16.
    """
    (n, heads, key_heads, length, count, d, width, blocks), dtype = shape, options.get("dtype", torch.bfloat16)
    bases, dropout = options.get("bases", BOTH), options.get("dropout", 0.0)
    tf32 = options.get("tf32", False)
    monkeypatch.setattr(attend, "uses_tf32", lambda: tf32)
    emulated(options.get("bytes", 100_000))
    sizes = (n, heads, length, d), (n, key_heads, count, d), (n, key_heads, count, width), (n, heads, length, width)
    *inputs, grad = (torch.randn(size).to(dtype) for size in sizes)
    weight, beta = torch.randn(heads, len(bases), blocks) / d, torch.randn(len(bases)).expand(heads, -1)
    mask, seed = make_mask(options.get("mask"), n, length, count), torch.tensor([-(2**62) - 5]) if dropout else None
    call = AttentionCall(*inputs, weight, mask, seed, bases, options.get("causal", False), dropout, beta, 1.5)

    def by_kernel():
        plan = attend.plan(call)
        out, log_sum = plan.forward(call)
        return out, *plan.backward(call, grad, out, log_sum, (True,) * 5)

    ours, again = by_kernel(), by_kernel()
    low, factor = (torch.bfloat16, 1 / 8) if tf32 else (dtype, 1)
    theirs, exact = (by_pytorch(call, grad, kind) for kind in (low, torch.float64))
    for name, a, b, c, d in zip(NAMES, ours, theirs, exact, again, strict=True):
        allowed = factor * (2 * (b.double() - c).norm() + 4 * torch.finfo(low).eps * c.norm())
        error = (a.double() - c).norm()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
        assert torch.equal(a, d), f"{name} is not deterministic"


@needs_compiler
@pytest.mark.slow
def test_autograd_of_fused_attention_on_the_cpu(emulated, monkeypatch):
    """All inputs get their gradients, those of a recorded graph too, which is not differentiable again."""
    query, key, value, grad = (torch.randn(1, 2, size, 64, dtype=torch.bfloat16) for size in (20, 40, 40, 20))
    weight, beta = torch.randn(2, 2, 4) / 64, torch.randn(2, 2)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, weight, beta)]
    call = AttentionCall(*inputs[:4], bases=BOTH, beta=beta, scaling=1.5)
    monkeypatch.setattr(backend, "choose_kernel", lambda *_: gpu)
    options = None, None, ",".join(BOTH), False, 0.0, "auto", beta, 1.5
    out = torch.ops.ahop.attend(*call[:4], *options)
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    recorded = torch.autograd.grad(out, inputs, grad, create_graph=True)
    exact = by_pytorch(call, grad, torch.float64)
    for name, right, *ours in zip(NAMES, exact, (out, *found), (out, *recorded), strict=True):
        assert all((each.double() - right).norm() < 0.02 * right.norm() for each in ours), name
    refuses("attention .* differentiable once", recorded[4].sum().backward)
    out = torch.ops.ahop.attend(query.detach(), key, value, weight.detach(), *options)
    torch.testing.assert_close(torch.autograd.grad(out, [key, beta], grad), (found[1], found[4]))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "n", "bases"),
    [(40, 40, ("l1", "near", "dot", "near", "dis")), pytest.param(96, 24, ("near", "dis"), marks=pytest.mark.full)],
)
def test_scores_of_unknown_values_on_the_cpu(d, n, bases, emulated):
    query, key = torch.randn(1, 2, 3, d), torch.randn(1, 2, 5, d)
    query[0, 0, 1, : d // 2] = key[0, 1, 2, ::3] = key[0, 0, 3] = torch.nan
    weight, widths = torch.randn(2, len(bases), n) / n, torch.linspace(0.3, 2, len(bases))
    found = gpu.score(query, key, weight, bases, None, widths, missing=True)
    exact = missing_similarity(*(x.double() for x in (query, key, fold(weight))), bases, None, widths.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    low = gpu.score(query, key, weight.half(), bases, None, widths, missing=True)
    torch.testing.assert_close(low, gpu.score(query, key, weight.half().float(), bases, None, widths, missing=True))
    assert (found == -torch.inf).sum() == 3


SCORES = {  # d and blocks, dtype, bases
    "one dimension": (1, 1, torch.bfloat16, BOTH),
    "a lane per pair": (7, 7, torch.float32, ("dot", "l1", "dis")),
    "pairs of keys": (64, 64, torch.bfloat16, BOTH),
    "two lanes": (100, 100, torch.float32, BOTH),
    "padding that float16 cannot hold": (101, 101, torch.float16, BOTH),
    "merges in a loop": (300, 300, torch.bfloat16, BOTH),
    "blocks in a lane": (48, 12, torch.float16, ("l1", "dot")),
    "shared blocks": (256, 16, torch.float32, BOTH),
    "four warps": (1024, 64, torch.bfloat16, BOTH),
    "copies": (1024, 4, torch.float32, BOTH),
    "padded copies": (1026, 513, torch.float32, ("dis",)),
    "few wide blocks": (64, 4, torch.bfloat16, BOTH),
    "eight blocks": (64, 8, torch.float16, ("dot", "dis")),
    "one block": (32, 1, torch.bfloat16, ("dot",)),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("d", "n", "dtype", "bases"), quick(SCORES))
def test_scores_and_gradients_on_the_cpu(d, n, dtype, bases, emulated, monkeypatch):
    monkeypatch.setattr(division, "slots", lambda device: 3)  # several tiles of keys per program
    query, key = torch.randn(1, 2, 5, d).to(dtype), torch.randn(1, 2, 19, d).to(dtype)
    check_against_reference(query, key, torch.randn(2, len(bases), n) / d, bases)


@needs_compiler
@pytest.mark.slow
def test_scores_of_nan_constant_weights_and_strides_on_the_cpu(emulated, monkeypatch):
    """Few keys of many queries change places, half precision is rounded once, and NaN stays in its row."""
    query, key = torch.randn(2, 9, 1, 24).transpose(1, 2), torch.randn(2, 1, 3, 48)[..., ::2]
    weight = torch.nn.functional.pad(torch.randn(1, 2, 1), (23, 0))
    grad = torch.randn(2, 1, 9, 3)
    scores, *grads = results(query, key, weight, grad)
    frozen = gpu.score_backward(grad, query, key, weight, BOTH, (True, True, False))
    torch.testing.assert_close(frozen[:2], tuple(grads[:2]))  # the sort is skipped
    assert torch.equal(gpu.score(query, key, weight, BOTH, torch.bfloat16), scores.bfloat16())
    monkeypatch.setattr(score, "GPU_SCRATCH_BYTES", 0)  # each batch entry by itself
    torch.testing.assert_close(gpu.score_backward(grad, query, key, weight, BOTH, (True,) * 3), tuple(grads))
    query[0, 0, 1, 5] = torch.nan
    assert torch.equal(gpu.score(query, key, weight, BOTH).isnan().any(-1), query.isnan().any(-1))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("d", "n"), [(40, 40), pytest.param(246, 41, marks=pytest.mark.full)])
def test_scores_of_near_on_the_cpu(d, n, emulated):
    query, key, bases = torch.randn(1, 1, 3, d), torch.randn(1, 1, 35, d), ("l1", "near", "dot", "near", "dis")
    weight, widths = torch.randn(1, 5, n) / 40, torch.linspace(0.3, 2, 5)
    exact = folded_similarity(query.double(), key.double(), fold(weight.double()), bases, widths.double())
    torch.testing.assert_close(
        gpu.score(query, key, weight, bases, widths=widths).double(), exact, rtol=1e-5, atol=1e-6
    )


SORT = """
#include "sort.cuh"
extern "C" void run(int n, float* x, const float* u, unsigned* weights, float* sums) {
    emulator::launch(1, 1, 0, [=] { SIZES });
}
"""
OF_SIZE = """
    if (n == N) {
        float values[N], reversed[N], factors[N];
        RankedWeights<N, BFloat16> ranked;
        unsigned words[N];
        for (int i = 0; i < N; ++i) values[i] = x[i], factors[i] = u[i];
        Sorter<N>::halve(factors);
        sums[0] = Sorter<N>::weighted_sum(values, factors, 0);
        for (int i = 0; i < N; ++i) values[i] = x[i], reversed[i] = x[N - 1 - i], factors[i] = u[i];
        ranked.set(factors);
        ranked.look_up(ranked.sort(values), ranked.sort(reversed), words);
        sums[1] = 0;
        for (int i = 0; i < N; ++i) sums[1] += factors[i] * values[i];
        ranked.undo(values);
        for (int i = 0; i < N; ++i) weights[i] = words[i] & 0xffff, weights[2 * N - 1 - i] = words[i] >> 16;
        for (int i = 0; i < N; ++i) x[i] = values[i];
    }
"""


@needs_compiler
def test_sorting_networks_and_weights_by_rank():
    """By the 0-1 principle, a network that sorts all sequences of zeros and ones sorts every input."""
    sizes = range(1, 9)
    library = compile_for_cpu(SORT.replace("SIZES", "".join(OF_SIZE.replace("N", str(n)) for n in sizes)), {})
    for n in sizes:
        cases = [*product((0.0, 1.0), repeat=n), *torch.randn(20, n).tolist()]
        for case in cases:
            x, u = torch.tensor(case), torch.arange(1.0, n + 1)
            values, weights, totals = x.clone(), torch.zeros(2, n, dtype=torch.int32), torch.zeros(2)
            library.run(n, *(nvrtc.c_void_p(each.data_ptr()) for each in (values, u, weights, totals)))
            ordered = x.sort(descending=True).values
            torch.testing.assert_close(totals[0], ordered @ u)
            if n in (2, 4):  # from sums and differences of all values
                assert ((values - ordered).abs() <= 2**-22 * x.abs().max()).all()
            else:  # which carried an index
                torch.testing.assert_close(values, ordered, rtol=1e-5, atol=1e-30)
            assert (totals[1] - ordered @ u).abs() <= 1e-5 * (ordered.abs() @ u) + 1e-30
            for found in (weights << 16).view(torch.float32):  # of the values, and of them in the other direction
                assert sorted(found.tolist()) == u.tolist()  # a permutation, which orders the values
                torch.testing.assert_close(x[found.argsort()], ordered)


def constants(n, size, width, bases=3, mask=0, causal=0, dropout=0, dtype=2, precise=0, part=None, value=None):
    return {
        "part": part or size, "value": value or width,
        "blocks": n, "size": size, "width": width, "dot": bases & 1, "dis": bases >> 1, "dis_at": 0, "dtype": dtype,
        "precise": precise, "mask": mask, "causal": causal, "dropout": dropout, "threads": 128,
        "thread_blocks_per_sm": 1, "tiles": 2, "areas": 3,
    }  # fmt: skip


def lane_constants(d, n, bases, dtype, **further):
    layout = choose_layout(n, d // n, alone=32, shared=32)
    problem = score.ScoreProblem(None, dtype, (1, 1, 1, d), (1, 1, 1, d), n, bases, torch.float32)
    return score._constants(problem, layout, dtype, True) | further


COMPILED = {
    "missing.cu": [{"values": 1}, {"values": 32}],
    "score.cu": [
        lane_constants(64, 64, ("l1", "near", "near"), torch.float16, packed=1),
        lane_constants(1024, 64, BOTH, torch.bfloat16, packed=0),
    ],
    "score_backward.cu": [
        lane_constants(64, 64, BOTH, torch.float16, warps=1, tagged=1),
        lane_constants(1024, 64, BOTH, torch.float32, warps=4, tagged=0),
    ],
    "attend.cu": [
        constants(4, 16, 64),
        constants(8, 8, 24, 3, 1, 1, 1, 1),
        constants(1, 128, 128, 2, 3),
        constants(4, 16, 64, dtype=0, precise=1),
        constants(5, 8, 24, 3, 2, 1, 1, 0, part=5),
        constants(2, 8, 24, part=5, value=18),
        constants(2, 8, 24, part=4, value=20),
    ],
}
COMPILED["attend_backward.cu"] = COMPILED["attend_sums.cu"] = COMPILED["attend.cu"]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("source", COMPILED)
def test_kernels_compile(source, architecture):
    """Before compute capability 8.0, scores have neither pairs of keys nor bfloat16."""
    older = architecture == "sm_75"
    if older and source.startswith("attend"):
        pytest.skip("attention is not fused")
    for kind in COMPILED[source]:
        if not older or (kind.get("dtype") != 2 and not kind.get("packed")):
            assert len(nvrtc.compile_source(source, kind, architecture)) > 1000


@needs_nvrtc
def test_compile_errors_show_the_log():
    with pytest.raises(AHopError, match=r"attend.cu does not compile for sm_90a with .*\n.*AHOP_BLOCKS"):
        nvrtc.compile_source("attend.cu", {}, "sm_90a")


def test_the_cache_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("AHOP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    compiled = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: compiled.append(args) or b"binary")
    key = "attend.cu", {"size": 16}, "sm_90a"
    assert [nvrtc.compiled(*key) for _ in range(2)] == [b"binary"] * 2
    assert len(compiled) == 1
    (file,) = nvrtc.cache_directory().iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert nvrtc.compiled(*key) == b"binary"
    assert len(compiled) == 2
    assert nvrtc.compiled("attend.cu", {"size": 8}, "sm_90a") == b"binary"
    assert len(list(nvrtc.cache_directory().iterdir())) == 2


@pytest.mark.full
def test_processes_may_write_to_the_cache_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("AHOP_CACHE_DIR", str(tmp_path / "cache"))
    code = (
        "from ahop_layers.ops.gpu import nvrtc\n"
        "nvrtc.version, nvrtc.compile_source = lambda: (12, 9), lambda *args: bytes(10**6)\n"
        "assert all(nvrtc.compiled('attend.cu', {'size': size}, 'sm_80') == bytes(10**6) for size in range(30))\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [run.wait() for run in runs] == [0] * 2


def test_sources_are_compiled_at_the_same_time(monkeypatch):
    """Two threads meet inside the compiler, and its errors are raised."""
    both, loaded = threading.Barrier(2, timeout=10), []

    def compiled(source, constants, architecture):
        both.wait()
        if constants.get("wrong"):
            raise AHopError(f"{source} does not compile")
        return source.encode()

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    monkeypatch.setattr(nvrtc, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(nvrtc, "_enter_context", lambda index: None)
    driver = SimpleNamespace(cuModuleLoadData=lambda module, image: loaded.append(image) or 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    nvrtc.compile_together([("score.cu", (("n", -1),)), ("score_backward.cu", (("n", -1),))], 0)
    assert sorted(loaded) == [b"score.cu", b"score_backward.cu"]
    with pytest.raises(AHopError, match=r"missing.cu does not compile"):
        nvrtc.compile_together([("missing.cu", (("wrong", 1),)), ("score.cu", (("n", -2),))], 0)
    nvrtc._module.cache_clear()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AHOP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"binary")
    assert nvrtc.compiled("attend.cu", {}, "sm_90a") == b"binary"


def test_the_compiler_does_not_trace_the_search_for_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "_capability", lambda device: (8, 0) if find_spec("torch") else (0, 0))
    compiled = torch.compile(lambda x: x + nvrtc.capability(x.device)[0], fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)) == 8
