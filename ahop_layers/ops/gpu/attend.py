"""Host code of fused attention: blocks of half-precision queries and keys on tensor cores."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.ops.dropout import scale, threshold
from ahop_layers.ops.gpu import attend_kernels, mma
from ahop_layers.ops.gpu.attend_backward import ADD_FLOATS, ATTEND_BACKWARD_CONSTRAINTS, STORE_FLOATS, STORE_HALVES
from ahop_layers.ops.gpu.attend_backward import attend_backward as backward_body
from ahop_layers.ops.gpu.attend_pairs import Rules
from ahop_layers.ops.gpu.launch import aligned, attention_kernels, on_device
from ahop_layers.ops.gpu.mma import ROWS
from ahop_layers.ops.gpu.mma_gradients import TileExchange
from ahop_layers.ops.gpu.plan import PTX_NAMES, SHARED_BYTES, runs_ptx
from ahop_layers.ops.protocols import empty_results

MASK_NAMES = {torch.bool: "u8", **PTX_NAMES}

MOST_STRIPS = 2
"""Partial sums of query gradients, each as large as these, that one launch of the backward pass may write."""


class Shape(NamedTuple):
    """Blocks, their padded size, and the padded dimension of the values, which a kernel is compiled for."""

    n: int
    size: int
    width: int


def kernel_shape(n: int, size: int, width: int) -> Shape:
    """Returns the padded sizes: blocks of 8, 16, 32... dimensions, and values with a multiple of 8."""
    size = max(mma.CHUNK, 1 << (size - 1).bit_length())
    size = 2 * size if n * size == mma.CHUNK else size  # one chunk alone is not served
    return Shape(n, size, -(-width // mma.CHUNK) * mma.CHUNK)


def serves(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Tensor | None, bases: Sequence[str]
) -> bool:
    """Returns whether the kernels support these tensors."""
    if query.dtype not in (torch.float16, torch.bfloat16) or value.dtype != query.dtype or not runs_ptx(query.device):
        return False
    if 0 in (*query.shape, *value.shape):
        return False
    shape = kernel_shape(weight.shape[-1], query.shape[-1] // weight.shape[-1], value.shape[-1])
    known = mask is None or mask.dtype in MASK_NAMES
    return known and mma.serves(shape.n, shape.size, bases) and shape.width <= mma.MAX_DIMENSIONS


class Plan(NamedTuple):
    """A kernel and its compile-time constants."""

    kernel: Any
    warps: int
    constants: dict[str, Any]


@lru_cache(maxsize=None)
def forward_plan(shape: Shape, bases: tuple[str, ...], dtype: torch.dtype, rules: Rules, warps: int = 4) -> Plan:
    """Returns the plan of the forward pass."""
    n, size, width = shape
    tile, values = mma.tile_bytes(n, n * size), mma.tile_bytes(0, width)
    while (warps + 1) * tile + values > SHARED_BYTES:
        warps //= 2
    body = attend_kernels.attend(n, size, width, bases, PTX_NAMES[dtype], warps, rules)
    return Plan(attention_kernels().attend_mma, warps, _constants(body, attend_kernels.ATTEND_CONSTRAINTS, warps))


@lru_cache(maxsize=None)
def backward_plan(shape: Shape, bases: tuple[str, ...], dtype: torch.dtype, rules: Rules, warps: int = 4) -> Plan:
    """Returns the plan of the backward pass."""
    n, size, width = shape
    d = n * size
    tiles = mma.tile_bytes(n, d) + mma.tile_bytes(0, width)
    while (warps + 1) * tiles + TileExchange.bytes(d, warps) > SHARED_BYTES:
        warps //= 2
    body = backward_body(n, size, width, bases, PTX_NAMES[dtype], warps, rules)
    constants = _constants(body, ATTEND_BACKWARD_CONSTRAINTS, warps)
    constants |= {"DIM": d, "WIDTH": width, "WEIGHTS": len(bases) * n}
    return Plan(attention_kernels().attend_backward_mma, warps, constants)


def _constants(body: str, constraints: str, warps: int) -> dict[str, Any]:
    return {"BODY": body, "CONSTRAINTS": constraints, "ROWS": ROWS * warps, "WARPS": warps, "num_warps": warps}


class Call:
    """The arguments of a call as the kernels take them: rows padded to the shape of the kernel, and aligned."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bases: Sequence[str], mask: Tensor | None,
        causal: bool, dropout: float, seed: Tensor | None,
    ) -> None:  # fmt: skip
        n, d = weight.shape[-1], query.shape[-1]
        self.shape = kernel_shape(n, d // n, value.shape[-1])
        self.query, self.key = (_rows(x, self.shape.size, n) for x in (query, key))
        self.value = _rows(value, self.shape.width, 1)
        weight = weight.contiguous()
        self.weight = weight.clone() if weight.data_ptr() % 16 else weight
        self.rules = Rules(None if mask is None else MASK_NAMES[mask.dtype], causal, dropout > 0)
        self.bases, self.dtype = tuple(bases), query.dtype
        (self.batch, self.heads, self.length, _), self.count = query.shape, key.shape[-2]
        self.group = self.heads // key.shape[1]
        self.mask, self.mask_strides = self.query, [0] * 4
        if mask is not None:
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
            self.mask = mask.expand(self.batch, self.heads, self.length, self.count)
            self.mask_strides = [mask.element_size() * stride for stride in self.mask.stride()]
        self.seed = self.query if seed is None else seed
        self.threshold, self.factor = threshold(dropout), scale(dropout)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that both passes read."""
        return self.query, self.key, self.value, self.weight, self.mask, self.seed

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of query, key and value."""
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3])


def attend(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bases: Sequence[str], mask: Tensor | None,
    causal: bool, dropout: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes the readout ``(N, H, L, e)`` and the log-sum-exp of the scores ``(N, H, L)``."""
    call = Call(query, key, value, weight, bases, mask, causal, dropout, seed)
    plan = forward_plan(call.shape, call.bases, call.dtype, call.rules)
    out, log_sum = empty_results(call.query, call.value)
    tiles = -(-call.length // (ROWS * plan.warps))
    with on_device(query):
        plan.kernel[(call.batch * call.heads * tiles,)](
            *call.inputs, out, log_sum, *call.strides, *out.stride()[:3], *call.mask_strides, call.weight.stride(0),
            call.heads, call.group, call.length, call.count, tiles, call.threshold, call.factor, **plan.constants,
        )  # fmt: skip
    if call.shape.width > value.shape[-1]:
        out = empty_results(query, value)[0].copy_(out[..., : value.shape[-1]])
    return out, log_sum


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bases: Sequence[str],
    mask: Tensor | None, causal: bool, dropout: float, seed: Tensor | None, out: Tensor, log_sum: Tensor,
    need: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of query, key, value and weight; those that ``need`` excludes are empty tensors."""
    call = Call(query, key, value, weight, bases, mask, causal, dropout, seed)
    shape, heads, count = call.shape, call.batch * call.heads, call.count
    grad = _rows(grad.to(query.dtype), shape.width, 1)
    padded = -(-call.length // ROWS) * ROWS
    statistics = _statistics(grad, out, log_sum.contiguous(), padded)
    plan = backward_plan(shape, call.bases, call.dtype, call.rules)
    tiles = -(-count // (ROWS * plan.warps))
    span = _even_span(tiles, heads, _programs(query.device, plan.warps))
    strips = -(-tiles // span)
    chunks = 1 if strips <= MOST_STRIPS else min(strips, padded // ROWS)
    step = -(-padded // (chunks * ROWS)) * ROWS
    kind = torch.float32 if chunks > 1 else query.dtype
    key_grad, value_grad = (
        torch.empty(call.batch, call.heads, count, each, dtype=kind, device=query.device)
        for each in (shape.n * shape.size, shape.width)
    )
    outputs = [each.view(torch.uint8) for each in (key_grad, value_grad)]
    query_grad = torch.empty(call.query.shape, dtype=query.dtype, device=query.device)
    weight_grads = []
    for start in range(0, call.length, step):
        rows = min(step, call.length - start)
        make = torch.zeros if causal else torch.empty
        part = make(strips, call.batch, call.heads, rows, call.query.shape[-1], device=query.device)
        weights = torch.empty(call.batch, call.heads, strips * plan.warps, *weight.shape[1:], device=query.device)
        mode = STORE_HALVES if chunks == 1 else ADD_FLOATS if start else STORE_FLOATS
        with on_device(query):
            plan.kernel[(heads * strips,)](
                *call.inputs, grad, statistics, part, *outputs, weights, *call.strides, *grad.stride()[:3],
                *call.mask_strides, call.weight.stride(0), call.heads, call.group, count, start, rows, padded, strips,
                span, tiles, mode, kind.itemsize, call.threshold, call.factor, **plan.constants,
            )  # fmt: skip
        query_grad[:, :, start : start + rows] = part[0] if strips == 1 else part.sum(0)
        weight_grads.append(weights.sum((0, 2)))
    if call.group > 1:
        key_grad, value_grad = (
            torch.unflatten(x, 1, (-1, call.group)).sum(2, dtype=torch.float32) for x in (key_grad, value_grad)
        )
    n = weight.shape[-1]
    return (
        _unpadded(query_grad, n, query.shape[-1]) if need[0] else query.new_empty(0),
        _unpadded(key_grad.to(key.dtype), n, key.shape[-1]) if need[1] else key.new_empty(0),
        _unpadded(value_grad.to(value.dtype), 1, value.shape[-1]) if need[2] else value.new_empty(0),
        # The kernel computes the gradient of folded weights; the cumulative sum is the transpose of fold.
        sum(weight_grads[1:], weight_grads[0]).cumsum(-1) if need[3] else weight.new_empty(0),
    )


def _statistics(grad: Tensor, out: Tensor, log_sum: Tensor, padded: int) -> Tensor:
    """Returns the two numbers per query that the backward body reads, ``(N, H, padded, 2)``."""
    batch, heads, length, width = out.shape
    out = aligned(out, 16)
    statistics = torch.empty(batch, heads, padded, 2, device=out.device)
    rows, most = 64, max(16, 1 << (width - 1).bit_length())
    with on_device(out):
        attention_kernels().attend_statistics[(batch * heads * -(-padded // rows),)](
            out, grad, log_sum, statistics, *out.stride()[:3], *grad.stride()[:3], heads, length, padded, width,
            ROWS=rows, WIDTH=most, FILLED=most == width,
        )  # fmt: skip
    return statistics


def _rows(tensor: Tensor, size: int, n: int) -> Tensor:
    """Returns rows whose n blocks are padded with zeros to ``size`` dimensions, aligned to 16 bytes."""
    given = tensor.shape[-1] // n
    if given < size:
        tensor = functional.pad(torch.unflatten(tensor, -1, (n, given)), (0, size - given)).flatten(-2)
    return aligned(tensor, 16)


def _unpadded(grad: Tensor, n: int, d: int) -> Tensor:
    """Removes the padding of :func:`_rows`; the result is contiguous."""
    return grad if grad.shape[-1] == d else torch.unflatten(grad, -1, (n, -1))[..., : d // n].flatten(-2).contiguous()


@lru_cache(maxsize=None)
def _programs(device: torch.device, warps: int) -> int:
    """Returns how many programs of the backward pass run at a time: their registers allow eight warps."""
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 8 // warps)


@lru_cache(maxsize=4096)
def _even_span(tiles: int, heads: int, programs: int) -> int:
    """Returns the number of tiles of keys per program that fills the last wave of programs best.

    A span of all tiles needs no partial sums, so others must save a tenth of the time.
    """

    def time(span: int) -> float:
        return -(-(heads * -(-tiles // span)) // programs) * span

    best = min(range(1, tiles + 1), key=lambda span: (time(span), -span))
    return best if time(best) < 0.9 * time(tiles) else tiles
