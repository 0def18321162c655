"""The public scoring function and the registered operators behind it.

``adaptive_similarity`` checks its arguments and reshapes them to ``(N, H, L, d)``, ``(N, H, S, d)`` and
``(H, n_bases, n)``. The operators ``ahop::score_forward`` and ``ahop::score_backward`` take tensors of these shapes and
call a kernel; ``ahop::score`` is the differentiable composite of the two. The registration of operators is shared with
``ahop::attend``. All private PyTorch functions that the package uses are in this file, except for the current stream in
``ops/gpu/nvrtc.py``.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from typing import Any, cast

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
from ahop_layers.ops import chunked, onnx, reference
from ahop_layers.ops.backend import BACKENDS, choose_kernel
from ahop_layers.ops.protocols import allocate_grads
from ahop_layers.ops.reference import BASES, accumulation_dtype, check_bases, check_blocks, fold, folded_similarity


def adaptive_similarity(
    query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str] = ("dis", "dot"),
    blocks: int | Tensor | None = None, *, widths: Tensor | None = None, missing: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Scores every query against every key by a weighted sum of their similarity footprints.

    The last dimension of ``weight`` is the number n of blocks: the similarities of d dimensions are summed over n
    consecutive blocks of width d / n and then sorted. With n = d every dimension is sorted by itself. No tensor of size
    L x S x d or L x S x n is formed, forward or backward, except on the reference path. Scores are accumulated in
    float32, for float64 in float64, and have the dtype of the inputs: beyond its range, they are infinite or 0.

    Args:
        query: ``(..., L, d)``.
        key: ``(..., S, d)``; batch dimensions broadcast.
        weight: ``(n_bases, n)``, or ``(H, n_bases, n)`` for queries ``(..., H, L, d)``: the footprint weights of each
            base, multiplied by the factor of that base. n divides d.
        bases: names of the base similarities, in the order of ``weight``. ``"near"`` may appear several times.
        widths: ``(n_bases,)``, the width of each base that saturates, ``"near"``: its value is
            ``exp(-|query_i - key_i| / width)``. Other entries are ignored. None means 1. No gradient is computed.
        missing: NaN in ``query`` or ``key`` is an unknown value, and its dimension takes no part in the scores of its
            pairs; :func:`ahop_layers.ops.reference.missing_similarity` has the formula. A pair without a known
            dimension has the score -inf. False: NaN gives NaN.
        blocks: None, or the n of ``weight``. An integer tensor ``(d,)`` names the block of each dimension and takes the
            slow path ``"chunked"``; :class:`~ahop_layers.AdaptiveSimilarity` avoids that for built-in bases.
        backend: ``"auto"`` takes the fastest for the device; ``"reference"``, ``"chunked"``, ``"cpu"`` and ``"cuda"``
            force one. See :func:`ahop_layers.backends`.

    Returns:
        Scores ``(..., L, S)`` in the dtype of ``query``; under autocast they are float32. Forward-mode AD and
        ``torch.func`` take the reference path.

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
    batch = _check_weight(query, key, weight, names, uneven=isinstance(blocks, Tensor))
    numbers = _check_blocks(blocks, query, weight)
    check_choice("backend", backend, ("auto", *BACKENDS))
    widths = _check_widths(widths, names, query)
    tracked = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, weight))
    custom = [name for name in names if BASES[name].slopes is None]
    if custom and backend not in ("auto", "reference"):
        raise AHopError(f"the registered base {custom[0]!r} runs on the reference path only, got backend={backend!r}")
    if numbers is not None and backend not in ("auto", "reference", "chunked"):
        raise AHopError(f"a tensor of blocks needs backend='chunked' or 'reference', got backend={backend!r}")

    cast = autocast_dtype(query, key)
    if cast is not None:
        query, key = query.to(cast), key.to(cast)
    elif query.dtype != key.dtype:
        raise AHopError(f"query and key must have the same dtype, got {query.dtype} and {key.dtype}")
    dtype, wide, autocast = query.dtype, accumulation_dtype(query.dtype), cast is not None
    if (custom and (tracked or not missing)) or backend == "reference" or is_transformed():
        with torch.autocast(query.device.type, enabled=False) if autocast else nullcontext():
            query, key, weight = (each.to(wide) for each in (query, key, weight))
            if not missing:
                if onnx.is_onnx_export():  # whose exporters know matrix products and TopK
                    scores = folded_similarity(query, key, fold(weight), names, widths, numbers, ("dot", "dis"))
                else:
                    scores = reference.adaptive_similarity(query, key, weight, names, numbers, widths)
            else:
                scores = reference.missing_similarity(query, key, fold(weight), names, numbers, widths)
    else:
        weight = weight if weight.dtype == query.dtype else weight.to(wide)
        name, tensors = "score" if tracked else "score_forward", _canonical(query, key, weight, batch)
        scores = call_operator(name, *tensors, ",".join(names), backend, autocast, widths, missing, numbers)
        scores = scores if len(batch) == 2 else scores.reshape(*batch, *scores.shape[-2:])
    return scores.to(wide if autocast else dtype)


def autocast_dtype(query: Tensor, key: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast casts a pair to: float32 except on a GPU; float64 is kept. None if disabled."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast is undefined on meta tensors
        return None
    if torch.float64 in (query.dtype, key.dtype):
        return torch.float64
    return torch.get_autocast_dtype(device) if device == "cuda" else torch.float32


def is_transformed() -> bool:
    """Returns whether forward-mode AD or torch.func transforms this call, or an ONNX exporter traces it.

    Operators support reverse mode only. PyTorch has no public function for this.
    """
    if torch.compiler.is_compiling():
        return onnx.is_onnx_export()
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return transformed or onnx.is_onnx_export()


def is_compiled(module: nn.Module) -> bool:
    """Returns whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def assert_in_graph(condition: Tensor, message: str) -> None:
    """Checks a tensor of one bool while the compiled graph runs; reading it while tracing would break the graph."""
    torch._assert_async(condition, message)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a forward or backward hook observes calls of the module; hooks of all modules count."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    forward = modules._global_forward_hooks or modules._global_forward_pre_hooks
    return bool(own or forward or modules._global_backward_hooks or modules._global_backward_pre_hooks)


def _check_weight(query: Tensor, key: Tensor, weight: Tensor, names: tuple[str, ...], uneven: bool) -> tuple[int, ...]:
    """Validates the weight for the pair and returns the batch shape of the scores."""
    check_floating(weight=weight)
    check_same_device(query=query, weight=weight)
    fits, n = weight.ndim in (2, 3) and weight.shape[-2] == len(names), weight.shape[-1]
    if not fits or not (uneven or n == query.shape[-1] or (n > 0 and query.shape[-1] % n == 0)):
        shapes = f"(n_bases, n) = ({len(names)}, n) or (H, n_bases, n) = (H, {len(names)}, n) for bases {names}"
        rule = f"n one of {divisors(query.shape[-1])}, the divisors of d"
        raise AHopError(f"weight must be {shapes} with {rule}, got {describe(weight)}")
    return broadcast_batch(query.shape[:-2], key.shape[:-2], weight.shape[:-2])


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


def _check_widths(widths: Tensor | None, names: Sequence[str], query: Tensor) -> Tensor | None:
    """Returns the widths in the accumulation dtype, or None if no base has one."""
    if widths is None or not any(BASES[name].saturates for name in names):
        return None
    check_floating(widths=widths)
    check_same_device(query=query, widths=widths)
    if widths.shape != (len(names),):
        raise AHopError(f"widths must be (n_bases,) = ({len(names)},), got {describe(widths)}")
    return widths.detach().to(accumulation_dtype(query.dtype))


def _canonical(query: Tensor, key: Tensor, weight: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Reshapes the batch dimensions to (N, H), without a copy where possible."""
    # With shared weights, a single batch dimension becomes N: as H it would need a weight gradient per entry.
    heads = batch[-1] if weight.ndim == 3 or len(batch) > 1 else 1
    outer = prod(batch[:-1]) if len(batch) and heads == batch[-1] else prod(batch)
    if len(batch) != 2 or query.shape[:-2] != batch or key.shape[:-2] != batch:  # skip no-op views
        query, key = (
            each.expand(*batch, *each.shape[-2:]).reshape(outer, heads, *each.shape[-2:]) for each in (query, key)
        )
    return query, key, weight.expand(heads, *weight.shape[-2:])


@lru_cache(maxsize=None)
def kernel_bases(bases: str) -> tuple[str, ...]:
    """Returns the names in a list separated by commas."""
    return tuple(bases.split(","))


class _Once(torch.autograd.Function):
    """The results of a backward operator, which have no derivative.

    ``once_differentiable`` of torch would take them as constants where the gradient of the scores is one.
    """

    @staticmethod
    def forward(ctx: Any, name: str, *args: Any) -> tuple[Tensor, ...]:
        return call_operator(name, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AHopError(
            "scores and attention of kernels are differentiable once; adaptive_similarity with backend='reference' can"
            " be differentiated any number of times"
        )


def call_backward(name: str, need: Sequence[bool], *args: Any, plain: bool = False) -> list[Tensor | None]:
    """Calls a backward operator, whose last argument is ``need``; returns None for gradients that are not needed.

    ``plain`` says that the forward pass was a plain call, which leaves the first argument, a gradient, to check.
    """
    args, once = (*args, list(need)), cast(Any, _Once.apply)
    if torch.is_grad_enabled():
        grads = once(name, *args)
    else:
        implementation, operator = _OPERATORS[name]
        grads = (implementation if is_plain_call(args[:1] if plain else args) else operator)(*args)
    return [grad if wanted else None for grad, wanted in zip(grads, need, strict=True)]


_LIBRARY = torch.library.Library("ahop", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS: dict[str, tuple[Any, Any]] = {}  # the implementation of each operator, and the operator itself


def call_operator(name: str, *args: Any) -> Any:
    """Calls ``ahop::name``, past the dispatcher where it would only pass the call on, to save host time."""
    implementation, operator = _OPERATORS[name]
    return implementation(*args) if is_plain_call(args) else operator(*args)


def is_plain_call(args: Sequence[Any]) -> bool:
    """Returns whether no compiler, tracer, profiler or mode observes a call of eager CPU or CUDA tensors.

    A tensor subclass, a transform of torch.func or a lazy negation shows in the dispatch keys of a tensor.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled():
        return False
    tensors, keys = [each for each in args if isinstance(each, Tensor)], torch._C._dispatch_keys
    return {keys(each).raw_repr() for each in tensors} <= _plain_keys(tensors[0].device.type)


@lru_cache(maxsize=None)
def _plain_keys(device: str) -> frozenset[int]:
    """Returns the dispatch keys of ordinary tensors and of inference tensors on a device."""
    if device not in ("cpu", "cuda"):
        return frozenset()
    with torch.inference_mode(False):
        tensors = [torch.empty(0, device=device)]
    with torch.inference_mode():
        tensors.append(torch.empty(0, device=device))
    return frozenset(torch._C._dispatch_keys(tensor).raw_repr() for tensor in tensors)


def register(name: str, schema: str, kernel: Any, fake: Any) -> None:
    """Registers the operator ``ahop::name``, which has no gradient: its implementation and fake.

    The decorator ``torch.library.custom_op`` would import the compiler at the first call, which takes seconds, and
    check the results of every call. PyTorch keeps compiled graphs on disk by the names of operators, not by their
    schemas: after a release, another schema needs another name.
    """
    torch.library.define(f"ahop::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"ahop::{name}", "default", kernel)
    torch.library.register_fake(f"ahop::{name}", fake)
    _OPERATORS[name] = kernel, getattr(torch.ops.ahop, name).default


def register_composite(
    name: str, schema: str, function: type[torch.autograd.Function], plain: type[torch.autograd.Function] | None = None
) -> None:
    """Registers the differentiable operator ``ahop::name``, which applies a function of other operators.

    Plain calls apply ``plain``, which need not check again what observes them.
    A compiler records it as one operator and differentiates it later. ``torch.library.register_autograd`` reads the
    schema in every call, which takes longer than all else that the host does for it.
    """
    torch.library.define(f"ahop::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function.apply, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    _OPERATORS[name] = (plain or function).apply, getattr(torch.ops.ahop, name).default


def _score_forward(query: Tensor, key: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Computes (N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S), if ``wide`` in at least float32.

    Kernels compute addresses from shapes and dtypes: :func:`adaptive_similarity` checks these.
    """
    bases, backend, wide, widths, missing, numbers = options
    names, dtype = kernel_bases(bases), accumulation_dtype(query.dtype) if wide else query.dtype
    if numbers is not None:
        return chunked.score(query, key, weight, names, dtype, widths, missing, numbers)
    kernel = choose_kernel(backend, query, names, weight.shape[-1], missing)
    if weight.requires_grad and hasattr(kernel, "compile_ahead"):
        kernel.compile_ahead(query, weight, names, dtype)
    return kernel.score(query, key, weight, names, dtype, widths, missing)


def _fake_score_forward(query: Tensor, key: Tensor, weight: Tensor, *options: Any) -> Tensor:
    dtype = accumulation_dtype(query.dtype) if options[2] else query.dtype
    return query.new_empty(*query.shape[:-1], key.shape[-2], dtype=dtype)


def _score_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and weight, empty where ``need`` is False."""
    grad, query, key, weight, bases, backend, widths, missing, numbers, need = args
    names, given = kernel_bases(bases), (grad, query, key, weight)
    if numbers is not None:
        *grads, slope = chunked.score_backward(*given, names, tuple(need), widths, missing, numbers)
    else:
        kernel = choose_kernel(backend, query, names, weight.shape[-1], missing)
        *grads, slope = kernel.score_backward(*given, names, tuple(need), widths, missing)
    return grads[0], grads[1], slope.to(weight.dtype)


def _fake_score_backward(*args: Any) -> tuple[Tensor, ...]:
    return tuple(allocate_grads(args[1:4], args[-1]))


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, bases, backend, _, widths, missing, numbers = args
        ctx.save_for_backward(*tensors, widths, numbers)
        ctx.options = bases, backend, missing
        return call_operator("score_forward", *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, widths, numbers = ctx.saved_tensors
        need, (bases, backend, missing) = ctx.needs_input_grad[:3], ctx.options
        args = grad, *tensors, bases, backend, widths, missing, numbers
        return *call_backward("score_backward", need, *args), *[None] * 6


_INPUTS = "Tensor query, Tensor key, Tensor weight, str bases, str backend"
_OPTIONS = "Tensor? widths, bool missing, Tensor? blocks"
_SCHEMA = f"({_INPUTS}, bool wide, {_OPTIONS}) -> Tensor"
register("score_forward", _SCHEMA, _score_forward, _fake_score_forward)
register_composite("score", _SCHEMA, _Score)
_SCHEMA = f"(Tensor grad, {_INPUTS}, {_OPTIONS}, bool[] need) -> (Tensor, Tensor, Tensor)"
register("score_backward", _SCHEMA, _score_backward, _fake_score_backward)
