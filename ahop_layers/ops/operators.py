"""The public scoring function and the registered operators behind it.

``adaptive_similarity`` checks its arguments and reshapes them to ``(N, H, L, d)``, ``(N, H, S, d)`` and
``(H, n_bases, d)``. The operators ``ahop::score`` and ``ahop::score_backward`` take tensors of these shapes, fold the
weights and call a kernel. All private PyTorch functions that the package uses are in this file.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from ahop_layers.errors import (
    AHopError,
    broadcast_batch,
    check_choice,
    check_floating,
    check_pair,
    check_same_device,
    describe,
    divisors,
)
from ahop_layers.ops import reference
from ahop_layers.ops.backend import BACKENDS, KERNELS, choose_kernel
from ahop_layers.ops.reference import BASES, accumulation_dtype, check_bases, check_blocks, fold


def adaptive_similarity(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str] = ("dis", "dot"),
    blocks: int | Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Scores every query against every key by a weighted sum of their similarity footprints.

    The last dimension of ``weight`` is the number n of blocks: the similarities of d dimensions are summed over n
    consecutive blocks of width d / n and then sorted. With n = d every dimension is sorted by itself.

    No tensor of size L x S x d or L x S x n is formed, forward or backward, except on the reference path.

    Args:
        query: ``(..., L, d)``.
        key: ``(..., S, d)``; batch dimensions broadcast.
        weight: ``(n_bases, n)``, or ``(H, n_bases, n)`` for queries ``(..., H, L, d)``: the footprint weights of each
            base, multiplied by the factor of that base. n divides d.
        bases: names of the base similarities, in the order of ``weight``.
        blocks: None, or n, which must be that of ``weight``. An integer tensor ``(d,)`` names the block of each
            dimension and takes the reference path; :class:`~ahop_layers.AdaptiveSimilarity` avoids that for built-in
            bases.
        backend: ``"auto"`` takes the fastest for the device; ``"reference"``, ``"chunked"``, ``"cpu"`` and ``"triton"``
            force one. See :func:`ahop_layers.backends`.

    Returns:
        Scores ``(..., L, S)`` in the dtype of ``query``. Half-precision inputs are accumulated in float32. Under
        autocast the scores are float32.

    Raises:
        AHopError: an argument has an unsupported shape, dtype or device, a base is not registered, or the backend is
            not available.

    Forward-mode AD and ``torch.func.grad`` run on the reference path, which is selected automatically.

    With weight 1 on the last footprint entry and 0 elsewhere, the score is the base similarity itself:

    >>> import torch, ahop_layers as ah
    >>> query, key = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    >>> weight = torch.zeros(2, 8)
    >>> weight[1, -1] = 1  # of ("dis", "dot"): the dot product
    >>> scores = ah.adaptive_similarity(query, key, weight)
    >>> torch.allclose(scores, query @ key.mT, atol=1e-5)
    True
    """
    names = check_bases(bases)
    check_pair(query, key)
    batch = _check_weight(query, key, weight, names, any_width=isinstance(blocks, Tensor))
    numbers = _check_blocks(blocks, query, weight)
    check_choice("backend", backend, ("auto", *BACKENDS))
    custom = [f"the registered base {name!r}" for name in names if BASES[name].slopes is None]
    custom += [] if numbers is None else ["a tensor of blocks"]
    if custom and backend not in ("auto", "reference"):
        raise AHopError(f"{custom[0]} runs on the reference path only, got backend={backend!r}")

    device = query.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # autocast is undefined on meta tensors
    if autocast:
        query, key = _autocast_pair(query, key, device)
    elif query.dtype != key.dtype:
        raise AHopError(f"query and key must have the same dtype, got {query.dtype} and {key.dtype}")
    wide = accumulation_dtype(query.dtype)
    if custom or backend == "reference" or is_transformed():
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            scores = reference.adaptive_similarity(query.to(wide), key.to(wide), weight.to(wide), names, numbers)
    else:
        weight = weight if weight.dtype == query.dtype else weight.to(wide)
        scores = _canonical_score(query, key, weight, batch, names, backend, wide=autocast)
    return scores.to(wide if autocast else query.dtype)


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Raises a RuntimeError when a compiled graph runs with a false condition; reading it would break the graph."""
    torch._assert_async(condition, message)


def is_transformed() -> bool:
    """Returns whether forward-mode AD or torch.func differentiates this call; operators support reverse mode and vmap.

    PyTorch has no public function for this. ``forward_ad.unpack_dual`` finds a tangent, but raises under vmap.
    """
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def is_mapped() -> bool:
    """Returns whether a transform of torch.func, such as vmap, is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


_PLAIN_KEYS = torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr()


def is_plain_call(*tensors: Tensor) -> bool:
    """Returns whether the dispatcher would only pass a call on: eager CPU tensors, and no mode, tracer or profiler.

    The dispatcher takes longer than a small call itself. A tensor subclass, a transform of torch.func or a lazy
    negation shows in the dispatch keys of a tensor.

    >>> is_plain_call(torch.ones(2)), is_plain_call(torch.ones(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled():
        return False
    return all(torch._C._dispatch_keys(tensor).raw_repr() == _PLAIN_KEYS for tensor in tensors)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a forward or backward hook observes calls of the module; hooks of all modules count.

    >>> layer = nn.Identity()
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks(layer), has_hooks(nn.Identity())
    (True, False)
    """
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    shared = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    return any(len(hooks) > 0 for hooks in (*own, *shared))


def _check_weight(
    query: Tensor, key: Tensor, weight: Tensor, names: tuple[str, ...], any_width: bool
) -> tuple[int, ...]:
    """Validates the weight for the pair and returns the batch shape of the scores."""
    check_floating(weight=weight)
    check_same_device(query=query, weight=weight)
    fits = weight.ndim in (2, 3) and weight.shape[-2] == len(names)
    if not fits or not (any_width or _divides(weight.shape[-1], query.shape[-1])):
        shapes = f"(n_bases, n) = ({len(names)}, n) or (H, n_bases, n) = (H, {len(names)}, n) for bases {names}"
        rule = f"n one of {divisors(query.shape[-1])}, the divisors of d"
        raise AHopError(f"weight must be {shapes} with {rule}, got {describe(weight)}")
    return broadcast_batch(query.shape[:-2], key.shape[:-2], weight.shape[:-2])


def _divides(n: int, d: int) -> bool:
    """Returns whether ``d`` dimensions can be cut into ``n`` blocks of equal width."""
    return n == d or (n > 0 and d % n == 0)


def _check_blocks(blocks: int | Tensor | None, query: Tensor, weight: Tensor) -> Tensor | None:
    """Validates ``blocks`` against the n of ``weight``; returns it if it is a tensor of block numbers."""
    if blocks is None:
        return None
    if isinstance(blocks, Tensor) and torch.compiler.is_compiling():  # block numbers cannot be read while compiling
        return blocks
    n, numbers = check_blocks(blocks, query)
    if n != weight.shape[-1]:
        raise AHopError(f"blocks must be the n of weight (..., n_bases, n), got {n} blocks and {describe(weight)}")
    return numbers


def _autocast_pair(query: Tensor, key: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Casts like a matrix product on a GPU and to float32 on other devices; float64 is kept."""
    dtype = torch.get_autocast_dtype(device) if device == "cuda" else torch.float32
    if torch.float64 in (query.dtype, key.dtype):
        dtype = torch.float64
    return query.to(dtype), key.to(dtype)


def _canonical_score(
    query: Tensor, key: Tensor, weight: Tensor, batch: tuple[int, ...], names: tuple[str, ...], backend: str, wide: bool
) -> Tensor:
    """Reshapes the batch dimensions to (N, H), without a copy where possible, and calls the operator."""
    # With shared weights, a single batch dimension becomes N: as H it would need a weight gradient per entry.
    heads = batch[-1] if weight.ndim == 3 or len(batch) > 1 else 1
    outer = prod(batch[:-1]) if len(batch) and heads == batch[-1] else prod(batch)
    if len(batch) != 2 or query.shape[:-2] != batch or key.shape[:-2] != batch:  # skip no-op views
        query, key = (
            each.expand(*batch, *each.shape[-2:]).reshape(outer, heads, *each.shape[-2:]) for each in (query, key)
        )
    weight = weight.expand(heads, *weight.shape[-2:])
    score: Any = _Score.apply if is_plain_call(query, key, weight) else torch.ops.ahop.score.default
    scores: Tensor = score(query, key, weight, ",".join(names), backend, wide)
    return scores if len(batch) == 2 else scores.reshape(*batch, *scores.shape[-2:])


# torch.library.define instead of the decorator custom_op, which imports the compiler at the first call (seconds) and
# checks the results of every call.
torch.library.define(
    "ahop::score",
    "(Tensor query, Tensor key, Tensor weight, str bases, str backend, bool wide=True) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "ahop::score_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor weight, str bases, str backend, bool[] need)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _check(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: str,
    backend: str,
    grad: Tensor | None = None,
    need: Sequence[bool] | None = None,
) -> tuple[str, ...]:
    """Validates the arguments of an operator and returns the names of its bases.

    The implementations and the fakes share this check. Kernels compute addresses from these shapes and dtypes, so a
    call that does not pass must never reach them.
    """
    names = kernel_bases(bases)
    check_choice("backend", backend, ("auto", *KERNELS))
    if query.ndim != 4 or key.ndim != 4 or query.shape[-1] == 0:
        got = f"query {describe(query)} and key {describe(key)}"
        raise AHopError(f"query and key must be (N, H, L, d) and (N, H, S, d) with d >= 1, got {got}")
    check_floating(query=query)
    check_kernel_weight(query, weight, len(names))
    (n, heads, length, d), count, wide = query.shape, key.shape[-2], accumulation_dtype(query.dtype)
    check_tensor("key", key, (n, heads, count, d), query.dtype, query)
    if grad is not None:
        check_tensor("grad", grad, (n, heads, length, count), query.dtype if grad.dtype == query.dtype else wide, query)
    if need is not None and len(need) != 3:
        raise AHopError(f"need must have 3 entries, for query, key and weight, got {need!r}")
    return names


def check_kernel_weight(query: Tensor, weight: Tensor, bases: int) -> None:
    """Raises unless ``weight`` is ``(H, bases, n)`` for ``query (N, H, L, d)``, in its dtype or at least float32."""
    heads, d, blocks = query.shape[1], query.shape[-1], weight.shape[-1] if weight.ndim else 0
    if not _divides(blocks, d):
        rule = f"({heads}, {bases}, n) with n one of {divisors(d)}, the divisors of d"
        raise AHopError(f"weight must be {rule}, got {describe(weight)}")
    dtype = query.dtype if weight.dtype == query.dtype else accumulation_dtype(query.dtype)
    check_tensor("weight", weight, (heads, bases, blocks), dtype, query)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, query: Tensor) -> None:
    """Raises unless the tensor has this shape and dtype and is on the device of the query."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != query.device:
        got = f"{describe(tensor)} of {tensor.dtype} on {tensor.device}"
        raise AHopError(f"{name} must be {tuple(shape)} of {dtype} on {query.device} for this query, got {got}")


@lru_cache(maxsize=None)
def kernel_bases(bases: str) -> tuple[str, ...]:
    """Returns the names in a list separated by commas; raises unless they are built-in bases."""
    names = check_bases(bases.split(","))
    custom = [name for name in names if BASES[name].slopes is None]
    if custom:
        raise AHopError(f"the registered base {custom[0]!r} runs on the reference path only, got bases={bases!r}")
    return names


def _score(query: Tensor, key: Tensor, weight: Tensor, bases: str, backend: str, wide: bool = True) -> Tensor:
    """Computes (N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S), in at least float32 if ``wide``."""
    names = _check(query, key, weight, bases, backend)
    kernel = choose_kernel(backend, query, names, weight.shape[-1])
    return kernel.score(query, key, fold(weight, accumulation_dtype(weight.dtype)), names, _score_dtype(query, wide))


def _score_dtype(query: Tensor, wide: bool) -> torch.dtype:
    return accumulation_dtype(query.dtype) if wide else query.dtype


def _score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: str, backend: str, need: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements ``ahop::score_backward``: gradients of query, key and weight, empty where ``need`` is False."""
    names, wanted = _check(query, key, weight, bases, backend, grad, need), (need[0], need[1], need[2])
    kernel = choose_kernel(backend, query, names, weight.shape[-1])
    grads = kernel.score_backward(grad, query, key, fold(weight, accumulation_dtype(weight.dtype)), names, wanted)
    return grads[0], grads[1], grads[2].cumsum(-1).to(weight.dtype)  # the transpose of fold


torch.library.impl("ahop::score", "default", _score)
torch.library.impl("ahop::score_backward", "default", _score_backward)


@torch.library.register_fake("ahop::score")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, weight: Tensor, bases: str, backend: str, wide: bool = True) -> Tensor:
    _check(query, key, weight, bases, backend)
    return query.new_empty(*query.shape[:-1], key.shape[-2], dtype=_score_dtype(query, wide))


@torch.library.register_fake("ahop::score_backward")  # type: ignore[untyped-decorator]
def _(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: str, backend: str, need: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    _check(query, key, weight, bases, backend, grad, need)
    grads = [
        tensor.new_empty(tensor.shape if wanted else 0)
        for tensor, wanted in zip((query, key, weight), need, strict=True)
    ]
    return grads[0], grads[1], grads[2]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:5]


def _differentiate_score(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need, saved = list(ctx.needs_input_grad[:3]), ctx.saved_tensors
    plain = not torch.is_grad_enabled() and is_plain_call(grad, *saved)
    backward: Any = _score_backward if plain else torch.ops.ahop.score_backward.default
    grads = backward(grad, *saved, *ctx.options, need)
    return (*(grad if wanted else None for grad, wanted in zip(grads, need, strict=True)), None, None, None)


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise AHopError(
        "adaptive_similarity is differentiable once on this backend;"
        " backend='reference' can be differentiated any number of times"
    )


torch.library.register_autograd("ahop::score", _differentiate_score, setup_context=_save_inputs)
torch.library.register_autograd("ahop::score_backward", _refuse_double_backward)


class _Score(torch.autograd.Function):
    """``ahop::score`` and its gradient without the dispatcher, see :func:`is_plain_call`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Computes the scores."""
        _save_inputs(ctx, inputs, inputs[0])
        return _score(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Computes the gradients."""
        return _differentiate_score(ctx, grad)


def merge_heads(batch: int, *tensors: tuple[Tensor, int | None, int]) -> list[Tensor]:
    """Merges the mapped axis of each ``(tensor, mapped axis, head axis)`` into its head axis."""
    merged = []
    for tensor, mapped, heads in tensors:
        tensor = tensor.movedim(mapped, heads) if mapped is not None else tensor.unsqueeze(heads)
        shape = (*tensor.shape[:heads], batch, *tensor.shape[heads + 1 :])
        merged.append(tensor.expand(shape).flatten(heads, heads + 1))
    return merged


def _heads(weight: Tensor, mapped: int | None) -> int:
    """Returns the number of heads of a weight ``(H, n_bases, n)``, one of whose axes may be mapped."""
    return weight.shape[1 if mapped == 0 else 0]


@torch.library.register_vmap("ahop::score")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    merged = merge_heads(info.batch_size, *zip(args[:3], in_dims[:3], (1, 1, 0), strict=True))
    heads = _heads(args[2], in_dims[2])
    return torch.ops.ahop.score(*merged, *args[3:]).unflatten(1, (info.batch_size, heads)), 1


@torch.library.register_vmap("ahop::score_backward")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    merged = merge_heads(info.batch_size, *zip(args[:4], in_dims[:4], (1, 1, 1, 0), strict=True))
    grads = torch.ops.ahop.score_backward(*merged, *args[4:])
    need, heads = args[-1], _heads(args[3], in_dims[3])
    split = (
        grad.unflatten(axis, (info.batch_size, heads)) if wanted else grad
        for grad, axis, wanted in zip(grads, (1, 1, 0), need, strict=True)
    )
    axes = (axis if wanted else None for axis, wanted in zip((1, 1, 0), need, strict=True))
    return tuple(split), tuple(axes)
