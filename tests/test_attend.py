"""The operator ahop::attend: values, gradients, slices, dropout, checks, transforms of torch."""

from itertools import product

import pytest
import torch

import ahop_layers as ah
from ahop_layers.ops import sliced
from ahop_layers.ops.attend import attend
from ahop_layers.ops.dropout import kept, scale
from ahop_layers.separation import Separation
from tests.samples import refuses

N, H, L, S, D, E = 2, 4, 7, 9, 8, 5
BASES = ("dis", "dot")


def problem(*, heads=H, key_heads=None, length=L, count=S, d=D, width=E, blocks=4, dtype=torch.float64, grad=True):
    key_heads = key_heads or heads
    tensors = (
        torch.randn(N, heads, length, d, dtype=dtype),
        torch.randn(N, key_heads, count, d, dtype=dtype),
        torch.randn(N, key_heads, count, width, dtype=dtype),
        torch.randn(heads, 2, blocks, dtype=dtype) / blocks,
    )
    return tuple(tensor.requires_grad_(grad) for tensor in tensors)


def expected_readout(query, key, value, weight, mask=None, causal=False, remains=None):
    """Computes the readout from all scores at once, in plain PyTorch."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = ah.adaptive_similarity(query, key, weight, BASES, backend="reference")
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = Separation()(scores)
    return (weights if remains is None else weights * remains) @ value


def results_and_grads(function, inputs):
    """Returns the result of a function and the gradients of its inputs."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*inputs)
    grad = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
    return result, *torch.autograd.grad(result, inputs, grad, allow_unused=True)


def check(call, expected, inputs):
    """Compares readouts and gradients, to the last digits of float64."""
    limit = {"rtol": 1e-11, "atol": 1e-11} if inputs[0].dtype == torch.float64 else {}
    torch.testing.assert_close(results_and_grads(call, inputs), results_and_grads(expected, inputs), **limit)


def masks():
    """Returns masks of all shapes and dtypes by name."""
    blocked = torch.rand(N, H, L, S) < 0.3
    blocked[..., 2, :] = True
    added = torch.randn(N, H, L, S, dtype=torch.float64).masked_fill(blocked, -torch.inf)
    return {
        "none": None,
        "all": blocked,
        "pairs": blocked[:1, :1],
        "keys": blocked[:, :1, :1],
        "queries": blocked[:1, :, :, :1],
        "everything": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "float": added,
        "float keys": added[:, :1, :1],
        "half": added[:1].to(torch.float16),
    }


@pytest.mark.parametrize("scratch", [2**20, 2000, 1], ids=["one-slice", "some-slices", "rows"])
@pytest.mark.parametrize("name", masks())
def test_readout_and_gradients(name, scratch, monkeypatch):
    monkeypatch.setattr(sliced, "SCRATCH_BYTES", scratch)
    mask, inputs = masks()[name], problem()
    for causal in (False, True):
        check(
            lambda *tensors, causal=causal: attend(*tensors, BASES, mask, causal),
            lambda *tensors, causal=causal: expected_readout(*tensors, mask, causal),
            inputs,
        )


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("scratch", [2**20, 2500, 1])
def test_grouped_queries(scratch, backend, monkeypatch):
    monkeypatch.setattr(sliced, "SCRATCH_BYTES", scratch)
    for key_heads in (1, 3):
        inputs = problem(heads=6, key_heads=key_heads)
        check(lambda *tensors: attend(*tensors, BASES, None, False, 0.0, backend), expected_readout, inputs)


SIZES = [
    *({"length": length, "count": count} for length, count in ((0, 3), (3, 0), (0, 0), (1, 1), (1, 5), (5, 1))),
    *({"blocks": blocks, "width": width} for blocks, width in ((1, 1), (2, 8), (8, 5))),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_queries_keys_and_blocks(sizes):
    check(lambda *tensors: attend(*tensors, BASES), expected_readout, problem(**sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [-1e9, torch.finfo(torch.float32).min, 1e9])
def test_additive_masks_far_from_zero_lose_no_digits(offset, dtype):
    mask = torch.zeros(N, 1, L, S)
    mask[:, :, 3] = mask[0, :, 4, :5] = offset  # the second one: the keys that a causal query sees
    mask[1, :, 5] = -torch.inf
    inputs = problem(dtype=dtype)
    results = results_and_grads(lambda *tensors: attend(*tensors, BASES, mask, True), inputs)
    shifted = mask.double().masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), -torch.inf)
    shifted -= shifted.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    exact = [tensor.double() for tensor in inputs]
    expected = results_and_grads(lambda *tensors: expected_readout(*tensors, shifted), exact)
    for found, right in zip(results, expected, strict=True):
        limit = 1e-4 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(found.double(), right, rtol=limit, atol=limit)


def test_gradcheck():
    mask = torch.rand(N, 1, 3, 4) < 0.3
    inputs = problem(heads=2, key_heads=1, length=3, count=4, d=4, width=3, blocks=2)
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, BASES, mask), inputs, fast_mode=True)


def test_only_needed_gradients_are_computed():
    inputs = problem()
    expected = results_and_grads(expected_readout, inputs)[1:]
    for needed in ((0,), (1,), (2,), (3,), (0, 3), (1, 2)):
        tensors = [tensor.detach().clone().requires_grad_(index in needed) for index, tensor in enumerate(inputs)]
        result = attend(*tensors, BASES)
        result.backward(torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape))
        for index in needed:
            torch.testing.assert_close(tensors[index].grad, expected[index])
        assert sum(tensor.grad is not None for tensor in tensors) == len(needed)


def test_non_contiguous_inputs():
    query, key, value, weight = problem(grad=False)
    packed = torch.randn(N, L, 3 * H * D, dtype=torch.float64).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    for tensors in (packed, (query.mT.contiguous().mT, key.flip(-1), value[:1].expand(N, -1, -1, -1))):
        inputs = (*tensors, weight)
        assert not any(tensor.is_contiguous() for tensor in tensors[:1])
        torch.testing.assert_close(attend(*inputs, BASES), expected_readout(*inputs))


def test_shared_batch_entries():
    query, key, value, weight = problem()
    expected = expected_readout(query[:1].expand_as(query), key, value, weight)
    torch.testing.assert_close(attend(query[:1], key, value, weight, BASES), expected)
    expected = expected_readout(query, key[1:].expand_as(key), value, weight)
    torch.testing.assert_close(attend(query, key[1:], value, weight, BASES), expected)
    assert attend(query[:0], key[:1], value[:1], weight, BASES).shape == (0, H, L, E)


def test_log_sum_and_layout_of_the_output():
    query, key, value, weight = problem(grad=False)
    mask = masks()["keys"]
    mask[1] = True
    arguments = query, key, value, weight, mask, None, "dis,dot", False, 0.0, "auto", None, 1.0
    out, log_sum = torch.ops.ahop.attend_forward(*arguments)
    scores = ah.adaptive_similarity(query, key, weight, BASES).masked_fill(mask, -torch.inf)
    torch.testing.assert_close(log_sum[0], scores[0].logsumexp(-1))
    assert (log_sum[1] == torch.inf).all()
    assert not out[1].any()
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_is_at_most_that_of_separate_operations(dtype):
    inputs = [tensor.detach().to(dtype) for tensor in problem(length=33, count=40, d=16, blocks=16)]

    def separate(query, key, value, weight):
        return Separation()(ah.adaptive_similarity(query, key, weight, BASES)) @ value

    exact = results_and_grads(expected_readout, [tensor.double() for tensor in inputs])
    found = results_and_grads(lambda *tensors: attend(*tensors, BASES), inputs)
    for true, ours, theirs in zip(exact, found, results_and_grads(separate, inputs), strict=True):
        assert ours.dtype == dtype
        bound = 2 * (theirs.double() - true).norm() + 2 * torch.finfo(dtype).eps * true.norm()
        assert (ours.double() - true).norm() <= bound


def test_dropout_hash():
    def mix(x, key=0):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15 ^ key) * 0x846CA68B % 2**32
        return x ^ x >> 16

    seed, heads, rows, columns = 0x7123456789ABCDEF, [0, 3, 2**20], [0, 1, 70000], [0, 5, 2**17 + 1]
    low, high, expected = seed % 2**32, seed >> 32, []
    for head, i in product(heads, rows):
        row = mix((mix(low ^ mix(head)) + i * 0x9E3779B9) % 2**32)
        expected += [mix((row + j * 0x85EBCA6B) % 2**32, mix(row ^ high)) for j in columns]
    for dropout in (0.1, 0.5, 0.9):
        found = kept(torch.tensor([seed]), *(torch.tensor(each) for each in (heads, rows, columns)), dropout)
        assert found.flatten().tolist() == [y >= round(dropout * 2**32) for y in expected]


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropped_weights_are_uniform_and_independent(dropout):
    indices = torch.arange(12), torch.arange(120), torch.arange(130)
    bits, other, far = (kept(torch.tensor([seed]), *indices, dropout).double() for seed in (1, 2, 1 + 2**32))
    deviation = (dropout * (1 - dropout)) ** 0.5
    assert abs(bits.mean().item() - (1 - dropout)) < 4 * deviation / bits.numel() ** 0.5
    for axes, count in (((1, 2), 120 * 130), ((0, 2), 12 * 130), ((0, 1), 12 * 120)):
        means = (bits.mean(axes) - (1 - dropout)) / (deviation / count**0.5)
        assert means.abs().max() < 5
    rolled = [bits.roll(shift, axis) for axis in range(3) for shift in (1, 2, 7)]
    for each in (other, far, *rolled):
        correlation = torch.corrcoef(torch.stack([bits.flatten(), each.flatten()]))[0, 1]
        assert correlation.abs() < 5 / bits.numel() ** 0.5


@pytest.mark.parametrize("scratch", [2**20, 3000, 1])
@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_dropout(dropout, scratch, monkeypatch):
    monkeypatch.setattr(sliced, "SCRATCH_BYTES", scratch)
    mask = masks()["pairs"]
    seed = torch.randint(2**63 - 1, (1,), generator=torch.Generator().manual_seed(5))
    bits = kept(seed, torch.arange(N * H), torch.arange(L), torch.arange(S), dropout).unflatten(0, (N, H))
    remains = bits.double() * scale(dropout)

    def dropped(*tensors):
        torch.manual_seed(5)
        return attend(*tensors, BASES, mask, True, dropout)

    check(dropped, lambda *tensors: expected_readout(*tensors, mask, True, remains), problem(key_heads=2))


def test_dropout_draws_from_the_generator_of_torch():
    inputs = problem(grad=False)
    torch.manual_seed(1)
    first, second = (attend(*inputs, BASES, None, False, 0.5) for _ in range(2))
    torch.manual_seed(1)
    torch.testing.assert_close(attend(*inputs, BASES, None, False, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dropout", "need"), [
    ("pairs", 0.3, [False, True, True, False, True]),
    pytest.param("none", 0.0, [True] * 4 + [False], marks=pytest.mark.full),
])  # fmt: skip
def test_opcheck(name, dropout, need):
    mask, seed, inputs = masks()[name], torch.tensor([7]) if dropout else None, problem(key_heads=2)
    options = ("dis,dot", True, dropout, "auto")
    beta = torch.rand(inputs[3].shape[:2], dtype=inputs[3].dtype, requires_grad=True) if need[4] else None
    torch.library.opcheck(torch.ops.ahop.attend, (*inputs, mask, seed, *options, beta, 1.5))
    inputs, beta = [x.detach() for x in inputs], None if beta is None else beta.detach()
    out, log_sum = torch.ops.ahop.attend_forward(*inputs, mask, seed, *options, beta, 1.5)
    arguments = (torch.randn_like(out), out, log_sum, *inputs, mask, seed, *options, beta, 1.5, need)
    torch.library.opcheck(torch.ops.ahop.attend_backward, arguments)


def test_beta_and_scaling_multiply_the_weights():
    *inputs, weight = problem()
    beta = torch.rand(weight.shape[:2], dtype=weight.dtype, requires_grad=True)
    options = (None, None, "dis,dot", False, 0.0, "auto")
    ours = torch.ops.ahop.attend(*inputs, weight, *options, beta, 1.5)
    theirs = torch.ops.ahop.attend(*inputs, beta[..., None] * weight * 1.5, *options, None, 1.0)
    torch.testing.assert_close(ours, theirs)
    leaves, grad = [*inputs, weight, beta], torch.randn_like(ours)
    right = torch.autograd.grad(theirs, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, grad), right)
    ours = torch.ops.ahop.attend(*inputs, weight.detach(), *options, beta, 1.5)
    torch.testing.assert_close(torch.autograd.grad(ours, beta, grad)[0], right[4])


def test_double_backward_is_refused():
    inputs = problem()
    (grad,) = torch.autograd.grad(attend(*inputs, BASES).sum(), inputs[:1], create_graph=True)
    refuses(r"attention .* differentiable once", grad.sum().backward)


q, k, v, w = (tensor.detach() for tensor in problem(dtype=torch.float32))
BAD_CALLS = {  # changed arguments and the error message
    "width": ({"key": k[..., :4]}, r"key must be \(2, 4, 9, 8\) .* got \(2, 4, 9, 4\)"),
    "value": ({"value": v[:, :, :3]}, r"value must be \(2, 4, 9, 5\) .* got \(2, 4, 3, 5\)"),
    "value dtype": ({"value": v.double()}, "value must be .* of torch.float32 .* got .* of torch.float64"),
    "key heads": ({"key": k[:, :3], "value": v[:, :3]}, "key heads must divide the 4 query heads"),
    "mask shape": ({"mask": torch.ones(2, 4, 7, 3).bool()}, r"mask must .* \(2, 4, 7, 9\), got \(2, 4, 7, 3\)"),
    "mask dimensions": ({"mask": torch.ones(7, 9).bool()}, r"mask must have 4 dimensions, .* got \(7, 9\)"),
    "mask dtype": ({"mask": torch.ones(2, 4, 7, 9).int()}, "mask must .* bool or floating point"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    changed, message = BAD_CALLS[name]
    arguments = {"query": q, "key": k, "value": v, "weight": w, "mask": None, "seed": None, "bases": "dis,dot"}
    arguments |= {"causal": False, "dropout": 0.0, "backend": "auto", "beta": None, "scaling": 1.0} | changed
    refuses(message, torch.ops.ahop.attend, **arguments)


def test_tensors_of_inference_mode_are_refused_under_autograd():
    with torch.inference_mode():
        key = k.clone()
    with pytest.raises(RuntimeError, match="make a clone"):
        attend(q.clone().requires_grad_(), key, v, w, BASES)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, key, v, w, BASES), attend(q, k, v, w, BASES))


def test_a_mask_with_a_gradient_is_refused():
    mask = torch.zeros(1, 1, L, S, requires_grad=True)
    refuses("mask must not require a gradient", attend, q, k, v, w, BASES, mask)
