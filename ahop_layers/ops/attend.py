"""Adaptive attention as one operator: score, mask, softmax, dropout and readout, without a tensor of all scores.

``ahop::attend`` and ``ahop::attend_backward`` take

- ``query (N, H, L, d)``, ``key (N, Hk, S, d)`` and ``value (N, Hk, S, e)``. Hk divides H, and query head h uses key
  head ``h // (H // Hk)``. ``value`` has the dtype of ``query``, or is half precision beside a float32 query.
- ``weight (H, n_bases, n)``: the weights of ``ahop::score``, multiplied by the scaling of the scores.
- ``mask``: None, or a tensor of 4 dimensions that broadcasts to ``(N, H, L, S)``: bool, where True blocks a pair, or
  floating point, which is added to the scores. It gets no gradient.
- ``causal``: whether to block every key j > i of query i.
- ``dropout`` and ``seed``: the probability of dropping a weight, and the int64 tensor ``(1,)`` that
  :mod:`ahop_layers.ops.dropout` derives the dropped weights from; None without dropout.

The results are the readout ``(N, H, L, e)`` in the dtype of ``value``, and ``log_sum (N, H, L)``, the natural logarithm
of the sum of ``exp(score)`` of each query, which has no gradient. A query without any key reads zeros, and its
``log_sum`` is infinite.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, check_choice, check_floating, check_probability, describe
from ahop_layers.ops.backend import KERNELS, choose_attention, has_fused_attention
from ahop_layers.ops.operators import check_kernel_weight, check_tensor, kernel_bases, merge_heads
from ahop_layers.ops.protocols import empty_results
from ahop_layers.ops.reference import accumulation_dtype

SCORES_BYTES = 32 * 2**20
"""Where no fused kernel supports a call, scores of more memory than this are computed in slices.

Slices compute the scores a second time in the backward pass, which takes longer than keeping them.
"""

_TRITON = find_spec("triton") is not None  # a constant, since torch.compile cannot trace find_spec

_OPTIONS = "Tensor? mask, Tensor? seed"
torch.library.define(
    "ahop::attend",
    f"(Tensor query, Tensor key, Tensor value, Tensor weight, {_OPTIONS}, str bases, bool causal, float dropout,"
    " str backend) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "ahop::attend_backward",
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor weight, {_OPTIONS}, Tensor out, Tensor log_sum,"
    " str bases, bool causal, float dropout, str backend, bool[] need) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


LOW_MASK = -1e3
"""Rows of an additive mask without a larger value are shifted to zero."""


def prefers_attend(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Tensor | None, bases: Sequence[str]
) -> bool:
    """Returns whether :func:`attend` is preferable to separate operations that keep all scores and weights.

    That is so where a fused kernel supports the call, for full footprints on a GPU, whose sort dominates the time, and
    for large scores.
    """
    if query.is_cuda:
        if not _TRITON:
            return False
        if weight.shape[-1] == query.shape[-1] or has_fused_attention(query, key, value, weight, mask, bases):
            return True
    return is_large(query, key)


def is_large(query: Tensor, key: Tensor) -> bool:
    """Returns whether the scores take more than ``SCORES_BYTES``."""
    # Sizes of an exported graph may be symbols, and a comparison would restrict them.
    if getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():
        return False
    pairs = _batch(query, key) * query.shape[1] * query.shape[2] * key.shape[2]
    return pairs * accumulation_dtype(query.dtype).itemsize > SCORES_BYTES


def _batch(*tensors: Tensor) -> int:
    """Returns the common first size of tensors, each of which may have 1 instead."""
    return next((tensor.shape[0] for tensor in tensors if tensor.shape[0] != 1), 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Computes the readout of ``ahop::attend`` for tensors as this module documents them.

    N may be 1 for some of query, key and value. ``weight`` may also be ``(n_bases, n)``, the same for every head.
    Under autocast, query, key and value are cast as in separate products.

    >>> query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    >>> weight = torch.eye(8)[-1:] * 8**-0.5  # the scaled dot product
    >>> output = attend(query, key, key, weight, ("dot",))
    >>> reference = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    >>> torch.allclose(output, reference, atol=1e-5)
    True
    """
    query, key, value = autocast(query, key, value)
    if mask is not None and mask.is_floating_point():
        mask, causal = _near_zero(mask, causal, query.shape[2], key.shape[2]), False
    n = _batch(query, key, value)
    query, key, value = (each if each.shape[0] == n else each.expand(n, -1, -1, -1) for each in (query, key, value))
    weight = weight.to(accumulation_dtype(query.dtype)).expand(query.shape[1], -1, -1)
    # A seed on the device, from torch's generator: CUDA graphs and checkpointing replay it.
    seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout else None
    options = ",".join(bases), causal, float(dropout), backend
    out: Tensor = torch.ops.ahop.attend.default(query, key, value, weight, mask, seed, *options)[0]
    return out


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as scores and a matrix product do under autocast, if it is enabled; float64 is kept."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast is undefined on meta tensors
        return query, key, value
    low = torch.get_autocast_dtype(device)
    dtype = low if device == "cuda" else torch.float32
    if torch.float64 in (query.dtype, key.dtype):
        dtype = torch.float64
    return query.to(dtype), key.to(dtype), value.to(torch.float64 if dtype == torch.float64 else low)


def _near_zero(mask: Tensor, causal: bool, length: int, count: int) -> Tensor:
    """Shifts rows of an additive mask whose values are all very low, which changes no weight.

    The backward pass subtracts the log-sum-exp from the scores: beside -1e9, it would lose the logarithm of the sum.
    Which keys a query sees matters, so the causal mask is added.
    """
    if causal:
        later = torch.ones(length, count, dtype=torch.bool, device=mask.device).triu(1)
        mask = mask.masked_fill(later, -torch.inf)
    if mask.shape[-1] == 0:
        return mask
    largest = mask.amax(-1, keepdim=True)
    low = (largest < LOW_MASK) & (largest > -torch.inf)
    return mask - largest.where(low, 0.0)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    bases: str,
    causal: bool,
    dropout: float,
    backend: str,
) -> tuple[str, ...]:
    """Validates the arguments of an operator and returns the names of its bases.

    The implementations and the fakes share this check. Kernels compute addresses from these shapes and dtypes, so a
    call that does not pass must never reach them.
    """
    names = kernel_bases(bases)
    check_choice("backend", backend, ("auto", *KERNELS))
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or query.shape[-1] == 0:
        got = f"{describe(query)}, {describe(key)} and {describe(value)}"
        rule = "(N, H, L, d), (N, Hk, S, d) and (N, Hk, S, e) with d >= 1"
        raise AHopError(f"query, key and value must be {rule}, got {got}")
    check_floating(query=query, value=value)
    (n, heads, length, d), (_, key_heads, count, _) = query.shape, key.shape
    if key_heads != heads and (key_heads == 0 or heads % key_heads):
        raise AHopError(f"the number of key heads must divide the {heads} query heads, got key {describe(key)}")
    low = query.dtype == torch.float32 and value.dtype in (torch.float16, torch.bfloat16)
    check_tensor("key", key, (n, key_heads, count, d), query.dtype, query)
    check_tensor("value", value, (n, key_heads, count, value.shape[-1]), value.dtype if low else query.dtype, query)
    check_kernel_weight(query, weight, len(names))
    if mask is not None:
        _check_mask(mask, (n, heads, length, count), query)
    check_probability(dropout=dropout)
    if (seed is None) != (dropout == 0):
        raise AHopError(f"seed must be given if and only if dropout > 0, got {seed} with dropout={dropout}")
    if seed is not None:
        check_tensor("seed", seed, (1,), torch.int64, query)
    return names


def _check_mask(mask: Tensor, shape: tuple[int, ...], query: Tensor) -> None:
    kind = mask.dtype == torch.bool or mask.is_floating_point()
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if not kind or not fits or mask.device != query.device:
        got = f"{describe(mask)} of {mask.dtype} on {mask.device}"
        rule = f"bool or floating point, on {query.device}, and broadcast to (N, H, L, S) = {tuple(shape)}"
        raise AHopError(f"mask must have 4 dimensions, be {rule}, got {got}")


def _check_backward(args: Sequence[Any]) -> tuple[str, ...]:
    """Validates the arguments of ``ahop::attend_backward`` and returns the names of its bases."""
    grad, query, _, value, _, _, _, out, log_sum, *_, need = args
    names = _check(*args[1:7], *args[9:-1])
    shape = (*query.shape[:-1], value.shape[-1])
    check_tensor("grad", grad, shape, value.dtype, query)
    check_tensor("out", out, shape, value.dtype, query)
    check_tensor("log_sum", log_sum, tuple(query.shape[:-1]), accumulation_dtype(query.dtype), query)
    if len(need) != 4:
        raise AHopError(f"need must have 4 entries, for query, key, value and weight, got {need!r}")
    return names


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    """Implements ``ahop::attend``."""
    names = _check(*args)
    query, key, value, weight, mask, seed, _, causal, dropout, backend = args
    kernel = choose_attention(backend, query, key, value, weight, mask, names)
    weight = weight.to(accumulation_dtype(weight.dtype))
    return kernel.attend(query, key, value, weight, names, mask, causal, dropout, seed)


def _attend_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements ``ahop::attend_backward``: gradients of query, key, value and weight, empty where not needed."""
    names = _check_backward(args)
    grad, query, key, value, weight, mask, seed, out, log_sum, _, causal, dropout, backend, need = args
    kernel = choose_attention(backend, query, key, value, weight, mask, names)
    inputs, options = (grad, query, key, value, weight.to(accumulation_dtype(weight.dtype))), (mask, causal, dropout)
    grads = kernel.attend_backward(*inputs, names, *options, seed, out, log_sum, tuple(need))
    return *grads[:3], grads[3].to(weight.dtype)


torch.library.impl("ahop::attend", "default", _attend)
torch.library.impl("ahop::attend_backward", "default", _attend_backward)


@torch.library.register_fake("ahop::attend")  # type: ignore[untyped-decorator]
def _(*args: Any) -> tuple[Tensor, Tensor]:
    _check(*args)
    return empty_results(args[0], args[2])


@torch.library.register_fake("ahop::attend_backward")  # type: ignore[untyped-decorator]
def _(*args: Any) -> tuple[Tensor, ...]:
    _check_backward(args)
    return tuple(
        tensor.new_empty(tensor.shape if wanted else 0) for tensor, wanted in zip(args[1:5], args[-1], strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[4]:
        raise AHopError("mask must not require a gradient: ahop::attend computes none, got one that does")
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need = list(ctx.needs_input_grad[:4])
    grads = torch.ops.ahop.attend_backward.default(grad, *ctx.saved_tensors, *ctx.options, need)
    return (*(each if wanted else None for each, wanted in zip(grads, need, strict=True)), *[None] * 6)


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise AHopError(
        "ahop::attend is differentiable once; scores of adaptive_similarity with backend='reference' can be"
        " differentiated any number of times"
    )


torch.library.register_autograd("ahop::attend", _differentiate, setup_context=_save)
torch.library.register_autograd("ahop::attend_backward", _refuse_double_backward)


def _merge_mask(batch: int, mask: Tensor | None, mapped: int | None, heads: int) -> Tensor | None:
    """Merges the mapped axis of a mask into its head axis; a mask for all of them stays as it is."""
    if mask is None or (mapped is None and mask.shape[1] == 1):
        return mask
    mask = mask.unsqueeze(1) if mapped is None else mask.movedim(mapped, 1)
    return mask.expand(-1, batch, heads, -1, -1).flatten(1, 2)


def _for_each(info: Any, in_dims: Sequence[int | None], operator: Any, args: Sequence[Any]) -> list[Tensor]:
    """Calls the operator for each entry of the mapped axis: dropout depends on the index of a head."""
    results = [
        operator(*(arg if axis is None else arg.select(axis, index) for arg, axis in zip(args, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


@torch.library.register_vmap("ahop::attend")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if args[8]:
        return tuple(_for_each(info, in_dims, torch.ops.ahop.attend, args)), (0, 0)
    merged = merge_heads(info.batch_size, *zip(args[:4], in_dims[:4], (1, 1, 1, 0), strict=True))
    heads = merged[3].shape[0] // info.batch_size
    mask = _merge_mask(info.batch_size, args[4], in_dims[4], heads)
    results = torch.ops.ahop.attend(*merged, mask, *args[5:])
    return tuple(torch.unflatten(each, 1, (info.batch_size, heads)) for each in results), (1, 1)


@torch.library.register_vmap("ahop::attend_backward")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    need, in_dims = args[-1], (*in_dims[:13], None)
    if args[11]:
        results = _for_each(info, in_dims, torch.ops.ahop.attend_backward, args)
        return tuple(results), (0,) * 4
    axes = (1, 1, 1, 1, 0)
    merged = merge_heads(info.batch_size, *zip(args[:5], in_dims[:5], axes, strict=True))
    saved = merge_heads(info.batch_size, *zip(args[7:9], in_dims[7:9], (1, 1), strict=True))
    mask = _merge_mask(info.batch_size, args[5], in_dims[5], merged[4].shape[0] // info.batch_size)
    grads = torch.ops.ahop.attend_backward(*merged, mask, args[6], *saved, *args[9:])
    split = [
        torch.unflatten(grad, axis, (info.batch_size, -1)) if wanted else grad
        for grad, axis, wanted in zip(grads, axes[1:], need, strict=True)
    ]
    return tuple(split), tuple(axis if wanted else None for axis, wanted in zip(axes[1:], need, strict=True))
