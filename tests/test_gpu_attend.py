"""Fused attention on a GPU: its errors, masks, dropout, memory, and what torch does with it."""

import copy
import gc
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import ahop_layers as ah
from ahop_layers.association import Mask, Padded, associate, combine_masks
from ahop_layers.ops import chunked
from ahop_layers.ops.attend import attend
from ahop_layers.ops.backend import choose_attention
from ahop_layers.ops.dropout import kept, scale
from ahop_layers.ops.gpu import attend as fused
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.protocols import AttentionCall
from ahop_layers.ops.sliced import Sliced

HAS_GPU = torch.cuda.is_available() and gpu.unavailable() is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
BOTH = ("dis", "dot")
NAMES = ("out", "query", "key", "value", "weight")


def tensors(n, heads, length, count, d, width, blocks, dtype, bases=2, key_heads=None):
    key_heads = key_heads or heads
    shapes = (n, heads, length, d), (n, key_heads, count, d), (n, key_heads, count, width), (n, heads, length, width)
    query, key, value, grad = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return query, key, value, torch.randn(heads, bases, blocks, device="cuda") / d, grad


def results(query, key, value, weight, grad, bases, mask, causal, dtype, choose=None, dropout=0.0, seed=None):
    """The readout and all gradients, by separate operations in a dtype or by the kernel that is chosen for the call."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (query, key, value, weight)]
    if choose is not None:
        call = AttentionCall(query, key, value, weight, mask, seed, bases, causal, dropout)
        kernel = choose(call)
        with torch.no_grad():
            out, log_sum = kernel.forward(call)
            grads = kernel.backward(call, grad, out, log_sum, (True, True, True, True, False))
        return [out, *grads[:4]]
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in inputs[1:3])
    scores = ah.adaptive_similarity(inputs[0], keys, inputs[3], bases, backend="reference")
    blocked = mask if mask is not None and mask.dtype == torch.bool else None
    full = Mask(blocked, None if mask is None or blocked is not None else mask, causal)
    weights = ah.Separation()(full.apply(scores))
    if dropout:
        heads, rows, columns = (
            torch.arange(size, device="cuda") for size in (scores.shape[:2].numel(), *scores.shape[2:])
        )
        weights = weights * kept(seed, heads, rows, columns, dropout).view_as(scores) * scale(dropout)
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]


def near_ties(query, key, blocks, bases, margin):
    """Which pairs have blocks whose similarities differ by less than a margin: another order is right for them, too."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    q, k = (x.double().unflatten(-1, (blocks, -1)) for x in (query, keys))
    dot = torch.einsum("nhlbd,nhsbd->nhlsb", q, k)
    norms = q.square().sum(-1)[:, :, :, None] + k.square().sum(-1)[:, :, None]
    values = {"dot": dot, "dis": 2 * dot - norms}
    return sum((values[base].sort(-1).values.diff() < margin).any(-1) for base in bases).bool()


def without_ties(found, ties, key_heads):
    """Results with zeros as the gradients of queries and keys of such pairs, where they jump."""
    n, heads, length, count = ties.shape
    of_keys = ties.view(n, key_heads, heads // key_heads, length, count).any(3).any(2)
    query, key = (x.masked_fill(rows[..., None], 0) for x, rows in zip(found[1:3], (ties.any(3), of_keys), strict=True))
    return [found[0], query, key, *found[3:]]


def check_errors(ours, theirs, exact, rounding):
    """The error of each result against float64 is at most twice that of plain PyTorch in its dtype, plus rounding."""
    for name, a, b, c in zip(NAMES, ours, theirs, exact, strict=True):
        error, allowed = (a.double() - c).norm(), 2 * (b.double() - c).norm() + rounding * c.norm()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


VIT = (2, 3, 65, 80, 64, 64)
CASES = {  # N, H, L, S, d and e; blocks; further options
    "vit": ((2, 3, 197, 197, 64, 64), 4, {}),
    "8 blocks": ((2, 3, 65, 130, 64, 64), 8, {"dtype": torch.float16}),
    "one block": ((1, 2, 40, 33, 64, 64), 1, {}),
    "wide": ((1, 2, 100, 300, 128, 128), 4, {}),
    "padded blocks": ((2, 4, 65, 70, 80, 80), 4, {}),
    "narrow values": ((2, 2, 33, 47, 32, 20), 8, {"dtype": torch.float16}),
    "dot alone": ((2, 2, 65, 65, 64, 64), 4, {"bases": ("dot",)}),
    "dis alone": ((2, 2, 65, 65, 64, 64), 2, {"bases": ("dis",), "dtype": torch.float16}),
    "few long heads": ((1, 1, 1000, 3000, 64, 64), 4, {}),
    "one pair": ((1, 1, 1, 1, 16, 8), 2, {}),
    "one query": ((3, 2, 1, 500, 64, 64), 4, {}),
    "grouped queries": ((2, 6, 65, 80, 64, 64), 4, {"key_heads": 2}),
    "key padding": (VIT, 4, {"mask": "padding"}),
    "blocked": (VIT, 4, {"mask": "blocked"}),
    "added": (VIT, 4, {"mask": "added"}),
    "added halves": (VIT, 8, {"mask": "added halves", "dtype": torch.float16}),
    "causal": ((2, 3, 300, 300, 64, 64), 4, {"causal": True}),
    "causal and long": ((1, 1, 2000, 2000, 64, 64), 4, {"causal": True}),
    "causal and padded": (VIT, 4, {"mask": "padding", "causal": True}),
    **{
        f"float32, {name}": (shape, blocks, {"dtype": torch.float32, **options})
        for name, (shape, blocks, options) in {
            "vit": ((2, 3, 197, 197, 64, 64), 4, {}),
            "8 blocks": ((2, 3, 65, 130, 64, 64), 8, {}),
            "wide": ((1, 2, 100, 300, 128, 128), 4, {}),
            "odd sizes": ((2, 3, 1, 65, 7, 12), 1, {}),
            "three blocks": ((2, 2, 33, 65, 48, 20), 3, {"bases": ("dot",)}),
            "narrow heads": ((4, 4, 128, 128, 16, 16), 4, {}),
            "few long heads": ((1, 1, 1000, 3000, 64, 64), 4, {}),
            "grouped queries": ((2, 6, 65, 80, 64, 64), 4, {"key_heads": 2, "mask": "padding"}),
            "dis alone": (VIT, 4, {"mask": "added", "bases": ("dis",)}),
            "causal and long": ((1, 1, 2000, 2000, 64, 64), 4, {"causal": True}),
        }.items()
    },
}


def make_mask(kind, n, heads, length, count):
    if kind == "padding":
        ends = torch.tensor([count - 7, 0], device="cuda")[:n]  # the second sample has no keys at all
        return (torch.arange(count, device="cuda") >= ends[:, None])[:, None, None]
    if kind == "blocked":
        return torch.rand(n, heads, length, count, device="cuda") < 0.4
    if kind == "added":
        return torch.randn(length, count, device="cuda")[None, None]
    return None if kind is None else torch.randn(n, heads, length, count, device="cuda").half()


@pytest.mark.parametrize(("shape", "blocks", "options"), CASES.values(), ids=CASES)
def test_error_is_at_most_twice_that_of_plain_pytorch(shape, blocks, options):
    bases, dtype, causal = (
        options.get(name, default) for name, default in (("bases", BOTH), ("dtype", torch.bfloat16), ("causal", False))
    )
    given = tensors(*shape, blocks, dtype, len(bases), options.get("key_heads"))
    mask = make_mask(options.get("mask"), *shape[:4])
    assert isinstance(choose_attention("cuda", AttentionCall(*given[:4], mask, bases=bases)), fused.AttentionPlan)
    ours, again = (results(*given, bases, mask, causal, dtype, fused.plan) for _ in range(2))
    theirs, exact = (results(*given, bases, mask, causal, kind) for kind in (dtype, torch.float64))
    for name, a, b in zip(NAMES, ours, again, strict=True):
        assert torch.equal(a, b), f"{name} is not deterministic"
    if dtype == torch.float32:
        ties = near_ties(*given[:2], blocks, bases, 1e-4)
        ours, theirs, exact = (without_ties(found, ties, given[1].shape[1]) for found in (ours, theirs, exact))
        assert exact[1].count_nonzero() > exact[1].numel() / 3
    check_errors(ours, theirs, exact, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("blocks", [4, 8])
def test_tf32_where_pytorch_allows_it(blocks, monkeypatch):
    """TF32 has three more bits than bfloat16, where it does not change the order of two blocks."""
    given = tensors(2, 3, 197, 150, 64, 64, blocks, torch.float32)
    ties = near_ties(*given[:2], blocks, BOTH, 0.03)
    precise = results(*given, BOTH, ties, False, torch.float32, fused.plan)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    ours = results(*given, BOTH, ties, False, torch.float32, fused.plan)
    theirs, exact = (results(*given, BOTH, ties, False, kind) for kind in (torch.bfloat16, torch.float64))
    for name, a, b, c, d in zip(NAMES, ours, theirs, exact, precise, strict=True):
        assert not torch.equal(a, d), f"{name} is the same without TF32"
        assert (a.double() - c).norm() <= (b.double() - c).norm() / 4, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_all_kernels_drop_the_same_weights(causal, dtype):
    given = tensors(2, 3, 70, 90, 64, 64, 4, dtype)
    seed = torch.tensor([-(2**62) - 12345], device="cuda")
    theirs, exact = (results(*given, BOTH, None, causal, kind, None, 0.3, seed) for kind in (dtype, torch.float64))
    for choose in (fused.plan, lambda _: Sliced(chunked), lambda _: Sliced(gpu)):
        ours = results(*given, BOTH, None, causal, dtype, choose, 0.3, seed)
        check_errors(ours, theirs, exact, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_slices_of_full_footprints(dtype):
    """The backward kernel computes the weights from what it sorts."""
    given = tensors(2, 3, 65, 80, 64, 64, 64, dtype)
    kernel = choose_attention("cuda", AttentionCall(*given[:4], bases=BOTH))
    assert isinstance(kernel, Sliced)
    ours = results(*given, BOTH, None, False, dtype, lambda _: kernel)
    theirs, exact = (results(*given, BOTH, None, False, kind) for kind in (dtype, torch.float64))
    # The weights are exp(score - log_sum), which rounds relative to the size of the scores.
    check_errors(ours, theirs, exact, torch.finfo(dtype).eps * (2 if dtype != torch.float32 else 16))


@pytest.mark.parametrize(("d", "width", "blocks"), [(64, 64, 4), (64, 20, 4), (12, 12, 1), (64, 64, 64)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_opcheck(d, width, blocks, dropout):
    given = tensors(2, 4, 20, 30, d, width, blocks, torch.bfloat16, key_heads=2)
    seed = torch.tensor([3], device="cuda") if dropout else None
    args = (*(x.requires_grad_() for x in given[:4]), None, seed, ",".join(BOTH), False, dropout, "auto", None, 1.0)
    torch.library.opcheck(torch.ops.ahop.attend.default, args)


def test_rows_of_very_low_additive_masks():
    query, key, value, weight, grad = tensors(1, 2, 20, 30, 64, 64, 4, torch.bfloat16)
    for low in (-1e9, torch.finfo(torch.bfloat16).min):
        mask = torch.zeros(1, 1, 20, 30, device="cuda", dtype=torch.bfloat16)
        mask[..., 3, :] = low
        inputs = [x.detach().requires_grad_() for x in (query, key, value, weight)]
        found, right = (torch.autograd.grad(attend(*inputs, BOTH, each), inputs, grad) for each in (mask, None))
        assert_near([x.float() for x in found], [x.float() for x in right])


def test_nan_reaches_the_output():
    query, key, value, weight, _ = tensors(1, 1, 40, 40, 64, 64, 4, torch.bfloat16)
    query[0, 0, 5, 7] = torch.nan
    out = attend(query, key, value, weight, BOTH)
    assert out[0, 0, 5].isnan().all()
    assert out[0, 0, [0, 4, 6, 39]].isfinite().all()


def adapted(dropout=0.0, blocks=4, **options):
    torch.manual_seed(0)
    layer = ah.AdaptiveAttention(128, 2, dropout, batch_first=True, blocks=blocks, **options).cuda()
    with torch.no_grad():
        for parameter in (layer.similarity.w, layer.similarity.beta):
            parameter.add_(torch.randn_like(parameter) / 8)
    return layer


def step(layer, x, **options):
    layer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x, x, x, **options)[0]
    out.float().square().sum().backward()
    return [out.detach().float(), *(p.grad.clone().float() for p in layer.parameters())]


def assert_near(ours, theirs, bound=0.03):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= bound * b.norm() + 1e-6


def test_layers_give_the_same_with_and_without_weights():
    layer, x = adapted(), torch.randn(2, 70, 128, device="cuda")
    for options in ({}, {"key_padding_mask": torch.arange(70, device="cuda").expand(2, 70) > 50}, {"is_causal": True}):
        assert_near(step(layer, x, need_weights=False, **options), step(layer, x, need_weights=True, **options))


def test_scaling_gets_a_gradient():
    query, key, value, _, _ = tensors(2, 3, 20, 30, 64, 64, 4, torch.bfloat16)
    similarity = ah.AdaptiveSimilarity(64, 3, blocks=4).cuda()
    grads = []
    for need_weights in (False, True):
        scaling = torch.full((3, 1, 1), 0.125, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out, weights = associate(
            query, Padded(key, value), score=similarity, separation=ah.Separation(), scaling=scaling,
            need_weights=need_weights,
        )  # fmt: skip
        assert (weights is None) == (not need_weights)
        grads.append(torch.autograd.grad(out.float().square().sum(), scaling)[0])
    assert_near(grads[:1], grads[1:])


def test_a_learned_mask_gets_a_gradient():
    query, key, value, _, _ = tensors(2, 3, 20, 30, 64, 64, 4, torch.bfloat16)
    similarity = ah.AdaptiveSimilarity(64, 3, blocks=4).cuda()
    bias = torch.randn(20, 30, device="cuda", requires_grad=True)
    padded = Padded(key, value, combine_masks(None, bias, (2, 3, 20, 30)))
    out, _ = associate(query, padded, score=similarity, separation=ah.Separation(), need_weights=False)
    assert torch.autograd.grad(out.float().square().sum(), bias)[0].norm() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiles_as_one_graph(dropout):
    layer, x = adapted(dropout), torch.randn(2, 70, 128, device="cuda")
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    found = step(compiled, x, need_weights=False)
    assert all(each.isfinite().all() for each in found)
    if not dropout:
        assert_near(found, step(layer, x, need_weights=False))
    assert step(compiled, torch.randn(2, 90, 128, device="cuda"), need_weights=False)[0].shape == (2, 90, 128)


def test_checkpointing_replays_dropout():
    layer, x = adapted(0.3), torch.randn(2, 70, 128, device="cuda", requires_grad=True)

    def forward(x):
        return layer(x, x, x, need_weights=False)[0]

    def run(forward):
        torch.manual_seed(1)
        layer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = forward(x)
        out.float().square().sum().backward()
        return [out.detach().float(), *(p.grad.clone() for p in layer.parameters())]

    plain = run(forward)
    for again in (True, False):
        checkpointed = partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=again)
        assert all(map(torch.equal, run(checkpointed), plain))


def test_cuda_graphs_replay_dropout_with_new_numbers():
    inputs = tensors(2, 2, 64, 64, 64, 64, 4, torch.bfloat16)[:4]
    attend(*inputs, BOTH, dropout=0.5)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*inputs, BOTH, dropout=0.5)
    outs = []
    for _ in range(2):
        graph.replay()
        outs.append(out.clone())
    assert not torch.equal(*outs)
    assert (sum(outs) / 2 - attend(*inputs, BOTH)).norm() < 2 * out.norm()


def test_memory_does_not_grow_with_the_length():
    def peak(n, length, blocks):
        query, key, value, weight, grad = tensors(n, 2, length, length, 64, 64, blocks, torch.bfloat16)
        inputs = [x.requires_grad_() for x in (query, key, value, weight)]
        gc.collect()  # tensors of an earlier test that a cycle keeps would be freed while the peak is measured
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(attend(*inputs, BOTH), inputs, grad)
        return torch.cuda.max_memory_allocated() - before

    pairs = 2 * 16384 * 16384 * 2
    for blocks in (4, 64):
        assert peak(1, 16384, blocks) < pairs / 2
    few, many = peak(64, 128, 4), peak(1, 8192, 4)
    assert many < 3 * few


def test_few_kernels_serve_all_lengths(tmp_path):
    code = """
import torch
from ahop_layers.ops.attend import attend
for n, length, count in ((2, 65, 65), (1, 1, 70), (3, 200, 17), (1, 128, 256), (1, 20, 400), (1, 50, 50), (2, 70, 128)):
    query, key = (torch.randn(n, 2, size, 64, device="cuda", dtype=torch.bfloat16) for size in (length, count))
    weight = torch.randn(2, 2, 4, device="cuda")
    inputs = [x.requires_grad_() for x in (query, key, weight)]
    attend(query, key, key, weight, ("dis", "dot")).sum().backward()
"""
    environment = {**os.environ, "AHOP_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]  # both compile at once
    assert [run.wait() for run in runs] == [0, 0]
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == ["attend"] * 3 + ["attend_backward", "attend_sums"]  # 2 or 4 tiles of keys, or three groups of them


def test_what_is_not_fused_is_sliced():
    query, key, value, weight, _ = tensors(2, 2, 20, 30, 64, 64, 4, torch.bfloat16)
    full = torch.randn(2, 2, 64, device="cuda") / 64
    call = AttentionCall(query, key, value, weight, bases=BOTH)
    assert fused.serves(call)
    assert not fused.serves(call._replace(weight=full))
    assert fused.serves(call._replace(query=query.float(), key=key.float(), value=value.float()))
    assert not fused.serves(call._replace(query=query.float(), key=key.float()))
    assert not fused.serves(call._replace(bases=("l1", "dot")))
    sliced = attend(query, key, value, full, BOTH)
    separate = results(query, key, value, full, sliced, BOTH, None, False, torch.float64)[0]
    assert (sliced.double() - separate).norm() < 0.02 * separate.norm()
