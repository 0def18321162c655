"""Adaptive attention as one operator: score, mask, softmax, dropout and readout, without a tensor of all scores.

``ahop::attend`` takes an :class:`~ahop_layers.ops.protocols.AttentionCall`. Its result is the readout ``(N, H, L, e)``
in the dtype of ``value``. It is the differentiable composite of ``ahop::attend_forward``, which also returns
``log_sum (N, H, L)``, the natural logarithm of the sum of ``exp(score)`` of each query, and ``ahop::attend_backward``.
A query without any key reads zeros, and its ``log_sum`` is infinite.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, describe
from ahop_layers.ops import cpu, operators
from ahop_layers.ops.backend import choose_attention
from ahop_layers.ops.gpu import attend as fused
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.operators import call_backward, call_operator, is_plain_call, register, register_composite
from ahop_layers.ops.protocols import Attention, AttentionCall, allocate_grads
from ahop_layers.ops.reference import accumulation_dtype

# Where no fused kernel supports a call, scores of more memory than this are computed in slices, which compute them a
# second time in the backward pass.
SCORES_BYTES = 32 * 2**20
LARGEST_OFFSET = 1e3  # rows of an additive mask whose largest value is farther from zero are shifted to zero


def prefers_attend(call: AttentionCall) -> bool:
    """Returns whether :func:`attend` is preferable to separate operations that keep all scores and weights.

    That is so where a fused kernel supports the call, for full footprints that a kernel of a GPU sorts, which dominates
    the time, and for large scores.
    """
    query, n = call.query, call.weight.shape[-1]
    fast = query.is_cuda and (fused.serves(call) or (n == query.shape[-1] and gpu.serves(query, call.bases, n)))
    return fast or is_large(query, call.key)


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
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bases: Sequence[str], mask: Tensor | None = None,
    causal: bool = False, dropout: float = 0.0, backend: str = "auto", *, beta: Tensor | None = None,
    scaling: float | Tensor = 1.0, optional: bool = False,
) -> Tensor | None:  # fmt: skip
    """Computes the readout of ``ahop::attend``; see :class:`~ahop_layers.ops.protocols.AttentionCall`.

    N may be 1 for some of query, key and value. ``weight`` may also be ``(n_bases, n)``, the same for every head, and
    is multiplied by ``beta ([H,] n_bases)`` and ``scaling``, a number or a tensor ``()`` or ``(H, 1, 1)``. Under
    autocast, query, key and value are cast as in separate products. If it is ``optional``, the result is None where
    separate operations are preferable.
    """
    query, key, value = autocast(query, key, value)
    names = tuple(bases)
    if optional and not prefers_attend(AttentionCall(query, key, value, weight, mask, bases=names)):
        return None
    if mask is not None and mask.is_floating_point():
        mask, causal = _near_zero(mask, causal, query.shape[2], key.shape[2]), False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        n = _batch(query, key, value)
        query, key, value = (each if each.shape[0] == n else each.expand(n, -1, -1, -1) for each in (query, key, value))
    heads = query.shape[1]
    if beta is None or isinstance(scaling, Tensor) or not _are_factors(beta, weight, accumulation_dtype(query.dtype)):
        weight, beta, scaling = _combine(weight, beta, scaling, query.dtype), None, 1.0
    if weight.ndim == 2 or weight.shape[0] != heads:
        weight, beta = weight.expand(heads, -1, -1), None if beta is None else beta.expand(heads, -1)
    # A seed on the device, from torch's generator: CUDA graphs and checkpointing replay it.
    seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout else None
    args = query, key, value, weight, mask, seed, ",".join(names), causal, float(dropout), backend, beta, scaling
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return call_operator("attend", *args)
    return call_operator("attend_forward", *args)[0]


def _are_factors(beta: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether the operator can multiply the weights by ``beta``."""
    fits = beta.shape == weight.shape[:-1] and beta.device == weight.device
    return fits and beta.dtype == weight.dtype == dtype


def _combine(weight: Tensor, beta: Tensor | None, scaling: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies weights by ``beta`` and ``scaling``, for queries of a dtype."""
    weight = weight if beta is None else beta.unsqueeze(-1) * weight
    weight = weight.to(accumulation_dtype(weight.dtype))
    weight = weight if not isinstance(scaling, Tensor) and scaling == 1 else weight * scaling
    return weight.to(accumulation_dtype(dtype))


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as scores and a matrix product do under autocast, if it is enabled; float64 is kept."""
    dtype = operators.autocast_dtype(query, key)
    if dtype is None:
        return query, key, value
    low = dtype if dtype == torch.float64 else torch.get_autocast_dtype(query.device.type)
    pairs = (query, dtype), (key, dtype), (value, low)
    query, key, value = (tensor if tensor.dtype == kind else tensor.to(kind) for tensor, kind in pairs)
    return query, key, value


class _SoftmaxScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
        """Computes the softmax of scores."""
        weights = cpu.score(query, key, weight, bases, softmax=True)
        ctx.save_for_backward(query, key, weight, weights)
        ctx.bases = bases
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of query, key and weight."""
        query, key, weight, weights = ctx.saved_tensors
        need, bases = ctx.needs_input_grad[:3], ctx.bases
        if not torch.is_grad_enabled() and is_plain_call((grad,)):
            grads = cpu.score_backward(grad, query, key, weight, bases, need, softmax=weights)
            return *(each if wanted else None for each, wanted in zip(grads, need, strict=True)), None
        slopes = grad * weights
        slopes = slopes - weights * slopes.sum(-1, keepdim=True)
        args = slopes, query, key, weight, ",".join(bases), "auto", None, False, None
        return *call_backward("score_backward", need, *args), None


def softmax_scores(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor | None:
    """Computes the softmax of ``ahop::score`` while the scores are in a cache, or None if separate operations must.

    N may be 1 for query or key. ``weight`` may also be ``(n_bases, n)``.
    """
    dtype, n = query.dtype, _batch(query, key)
    if torch.compiler.is_compiling() or query.device.type != "cpu" or cpu.unavailable():
        return None
    plain = query.ndim == key.ndim == 4 and is_plain_call((query, key, weight))
    if not plain or not cpu.serves(query, bases, weight.shape[-1]):
        return None
    shapes = query.shape[1] == key.shape[1] and 0 < query.shape[2] <= key.shape[2]
    shapes = shapes and {query.shape[0], key.shape[0]} <= {1, n} and weight.shape[:-2] in ((), query.shape[1:2])
    dtypes = dtype == key.dtype == accumulation_dtype(dtype) and not operators.autocast_dtype(query, key)
    if not shapes or not dtypes or "near" in bases:
        return None
    query, key = (each if each.shape[0] == n else each.expand(n, -1, -1, -1) for each in (query, key))
    apply: Any = _SoftmaxScores.apply
    return apply(query, key, weight.to(dtype).expand(query.shape[1], -1, -1), tuple(bases))


def _near_zero(mask: Tensor, causal: bool, length: int, count: int) -> Tensor:
    """Shifts rows of an additive mask whose values are all very low or very high, which changes no weight.

    Beside 1e9, the scores and their log-sum-exp would lose digits. Which keys a query sees matters, so the causal mask
    is added.
    """
    if causal:
        later = torch.ones(length, count, dtype=torch.bool, device=mask.device).triu(1)
        mask = mask.masked_fill(later, -torch.inf)
    if mask.shape[-1] == 0:
        return mask
    largest = mask.amax(-1, keepdim=True)
    far = (largest.abs() > LARGEST_OFFSET) & largest.isfinite()
    return mask - largest.where(far, 0.0)


def _parse(args: Sequence[Any]) -> tuple[AttentionCall, str]:
    """Returns the arguments of ``ahop::attend`` as a call and a backend."""
    fields: list[Any] = [*args[:6], operators.kernel_bases(args[6]), *args[7:9], *args[10:]]
    return AttentionCall(*fields), args[9]


def _checked(call: AttentionCall) -> AttentionCall:
    """Validates what a layer was called with, and returns the call with weights in the accumulation dtype."""
    query, key, value, weight, mask, *_ = call
    (n, heads, length, d), (_, key_heads, count, _) = query.shape, key.shape
    if key_heads != heads and (key_heads == 0 or heads % key_heads):
        raise AHopError(f"the number of key heads must divide the {heads} query heads, got key {describe(key)}")
    low = query.dtype == torch.float32 and value.dtype in (torch.float16, torch.bfloat16)
    _check_tensor("key", key, (n, key_heads, count, d), query.dtype, query)
    _check_tensor("value", value, (n, key_heads, count, value.shape[-1]), value.dtype if low else query.dtype, query)
    if mask is not None:
        _check_mask(mask, (n, heads, length, count), query)
    dtype = accumulation_dtype(weight.dtype)
    return call._replace(weight=weight.to(dtype), beta=None if call.beta is None else call.beta.to(dtype))


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, query: Tensor) -> None:
    """Raises unless the tensor has this shape and dtype and is on the device of the query."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != query.device:
        got = f"{describe(tensor)} of {tensor.dtype} on {tensor.device}"
        raise AHopError(f"{name} must be {tuple(shape)} of {dtype} on {query.device} for this query, got {got}")


def _check_mask(mask: Tensor, shape: tuple[int, ...], query: Tensor) -> None:
    kind = mask.dtype == torch.bool or mask.is_floating_point()
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if not kind or not fits or mask.device != query.device:
        got = f"{describe(mask)} of {mask.dtype} on {mask.device}"
        rule = f"bool or floating point, on {query.device}, and broadcast to (N, H, L, S) = {tuple(shape)}"
        raise AHopError(f"mask must have 4 dimensions, be {rule}, got {got}")


def _prepare(args: Sequence[Any]) -> tuple[AttentionCall, Attention]:
    """Returns the arguments of ``ahop::attend`` as a call, and its implementation."""
    call, backend = _parse(args)
    plan = fused.planned(call) if backend == "auto" and call.query.is_cuda else None
    if plan is not None:  # of an earlier call with the same shapes and dtypes, which was validated
        return call, plan
    call = _checked(call)
    return call, choose_attention(backend, call)


def _attend_forward(*args: Any) -> tuple[Tensor, Tensor]:
    call, implementation = _prepare(args)
    return implementation.forward(call)


def _attend_backward(*args: Any) -> tuple[Tensor, ...]:
    grad, out, log_sum, *inputs, need = args
    call, implementation = _prepare(inputs)
    *grads, weight, beta = implementation.backward(call, grad, out, log_sum, need)
    if weight.dtype != inputs[3].dtype:
        weight, beta = weight.to(inputs[3].dtype), beta.to(inputs[3].dtype)
    return *grads, weight, beta


def _fake_attend_forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _checked(_parse(args)[0]).empty_results()


def _fake_attend_backward(*args: Any) -> tuple[Tensor, ...]:
    _, _, _, *inputs, need = args
    call, _ = _parse(inputs)
    beta = call.query.new_empty(0) if call.beta is None else call.beta
    return tuple(allocate_grads((*call[:4], beta), need))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return _save(ctx, args, call_operator("attend_forward", *args), plain=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*tensors, beta), needed = ctx.saved_tensors, ctx.needs_input_grad
        need = (*needed[:4], needed[10])
        args = grad, *tensors, *ctx.options, beta, ctx.scaling
        *grads, slope = call_backward("attend_backward", need, *args, plain=ctx.plain)
        return *grads, *[None] * 6, slope, None


class _PlainAttend(_Attend):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return _save(ctx, args, _attend_forward(*args), plain=True)


def _save(ctx: Any, args: Sequence[Any], results: tuple[Tensor, Tensor], plain: bool) -> Tensor:
    """Saves what the backward pass needs, and returns the readout."""
    if ctx.needs_input_grad[4]:
        raise AHopError("mask must not require a gradient: ahop::attend computes none, got one that does")
    *tensors, bases, causal, dropout, backend, beta, scaling = args
    ctx.save_for_backward(*results, *tensors, beta)
    ctx.options, ctx.scaling, ctx.plain = (bases, causal, dropout, backend), scaling, plain
    return results[0]


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? mask, Tensor? seed"
_INPUTS += ", str bases, bool causal, float dropout, str backend, Tensor? beta, float scaling"
register("attend_forward", f"({_INPUTS}) -> (Tensor, Tensor)", _attend_forward, _fake_attend_forward)
register_composite("attend", f"({_INPUTS}) -> Tensor", _Attend, _PlainAttend)
_SCHEMA = f"(Tensor grad, Tensor out, Tensor log_sum, {_INPUTS}, bool[] need)"
_SCHEMA += " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
register("attend_backward", _SCHEMA, _attend_backward, _fake_attend_backward)
