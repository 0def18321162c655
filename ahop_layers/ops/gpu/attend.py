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
from ahop_layers.ops.gpu.launch import aligned, attention_kernels, launches_compiled_kernels, on_device
from ahop_layers.ops.gpu.mma import ROWS
from ahop_layers.ops.gpu.mma_gradients import TileExchange
from ahop_layers.ops.gpu.plan import PTX_NAMES, SHARED_BYTES, runs_ptx
from ahop_layers.ops.protocols import AttentionCall

MASK_NAMES = {torch.bool: "u8", **PTX_NAMES}

STATISTICS_ROWS = 64
"""Queries of a program of the kernel that prepares the backward pass."""

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


def serves(call: AttentionCall) -> bool:
    """Returns whether the kernels support a call."""
    query, _, value, weight, mask, *_ = call
    if query.dtype not in (torch.float16, torch.bfloat16) or value.dtype != query.dtype or not runs_ptx(query.device):
        return False
    if 0 in (*query.shape, *value.shape):
        return False
    shape = kernel_shape(weight.shape[-1], query.shape[-1] // weight.shape[-1], value.shape[-1])
    known = mask is None or mask.dtype in MASK_NAMES
    return known and mma.serves(shape.n, shape.size, call.bases) and shape.width <= mma.MAX_DIMENSIONS


class Plan:
    """A kernel with its compile-time constants. Triton specializes it on nothing else, so a device compiles it once."""

    def __init__(self, kernel: Any, warps: int, constants: dict[str, Any]) -> None:
        self.kernel, self.warps, self.constants = kernel, warps, constants
        self._values = [constants[name] for name in kernel.arg_names if name in constants]
        self._compiled: dict[torch.device, Any] = {}

    def launch(self, programs: int, *args: Any) -> None:
        """Runs the kernel on the device of the first argument."""
        device = args[0].device
        with on_device(args[0]):
            if device in self._compiled:  # Triton's own search for the compiled kernel takes longer than the launch
                self._compiled[device][(programs, 1, 1)](*args, *self._values)
                return
            compiled = self.kernel[(programs,)](*args, **self.constants)
            if launches_compiled_kernels():
                self._compiled[device] = compiled


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


@lru_cache(maxsize=None)
def _statistics_plan(width: int, dtype: torch.dtype) -> Plan:  # a dtype has a compiled kernel of its own
    most = max(16, 1 << (width - 1).bit_length())
    constants = {"ROWS": STATISTICS_ROWS, "WIDTH": most, "FILLED": most == width}
    return Plan(attention_kernels().attend_statistics, 4, constants)


def _constants(body: str, constraints: str, warps: int) -> dict[str, Any]:
    return {"BODY": body, "CONSTRAINTS": constraints, "ROWS": ROWS * warps, "WARPS": warps, "num_warps": warps}


class Arguments:
    """The arguments of a call as the kernels take them: rows padded to the shape of the kernel, and aligned."""

    def __init__(self, call: AttentionCall) -> None:
        query, key, value, weight, mask, seed, bases, causal, dropout = call
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


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Computes the readout ``(N, H, L, e)`` and the log-sum-exp of the scores ``(N, H, L)``."""
    args = Arguments(call)
    plan = forward_plan(args.shape, args.bases, args.dtype, args.rules)
    out, log_sum = call._replace(query=args.query, value=args.value).empty_results()
    tiles = -(-args.length // (ROWS * plan.warps))
    plan.launch(
        args.batch * args.heads * tiles,
        *args.inputs, out, log_sum, *args.strides, *out.stride()[:3], *args.mask_strides, args.weight.stride(0),
        args.heads, args.group, args.length, args.count, tiles, args.threshold, args.factor,
    )  # fmt: skip
    if args.shape.width > call.value.shape[-1]:
        out = call.empty_results()[0].copy_(out[..., : call.value.shape[-1]])
    return out, log_sum


def backward(
    call: AttentionCall, grad: Tensor, out: Tensor, log_sum: Tensor, need: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key, value and weight; those that ``need`` excludes are empty tensors."""
    query, key, value, weight, *_ = call
    args = Arguments(call)
    shape, heads, count = args.shape, args.batch * args.heads, args.count
    grad = _rows(grad.to(query.dtype), shape.width, 1)
    padded = -(-args.length // ROWS) * ROWS
    statistics = _statistics(grad, out, log_sum.contiguous(), padded)
    plan = backward_plan(shape, args.bases, args.dtype, args.rules)
    tiles = -(-count // (ROWS * plan.warps))
    span = _even_span(tiles, heads, _programs(query.device, plan.warps))
    strips = -(-tiles // span)
    chunks = 1 if strips <= MOST_STRIPS else min(strips, padded // ROWS)
    step = -(-padded // (chunks * ROWS)) * ROWS
    kind = torch.float32 if chunks > 1 else query.dtype
    key_grad, value_grad = (
        torch.empty(args.batch, args.heads, count, each, dtype=kind, device=query.device)
        for each in (shape.n * shape.size, shape.width)
    )
    outputs = [each.view(torch.uint8) for each in (key_grad, value_grad)]
    query_grad = torch.empty(args.query.shape, dtype=query.dtype, device=query.device)
    weight_grads = []
    for start in range(0, args.length, step):
        rows = min(step, args.length - start)
        make = torch.zeros if call.causal else torch.empty
        part = make(strips, args.batch, args.heads, rows, args.query.shape[-1], device=query.device)
        weights = torch.empty(args.batch, args.heads, strips * plan.warps, *weight.shape[1:], device=query.device)
        mode = STORE_HALVES if chunks == 1 else ADD_FLOATS if start else STORE_FLOATS
        plan.launch(
            heads * strips,
            *args.inputs, grad, statistics, part, *outputs, weights, *args.strides, *grad.stride()[:3],
            *args.mask_strides, args.weight.stride(0), args.heads, args.group, count, start, rows, padded, strips,
            span, tiles, mode, kind.itemsize, args.threshold, args.factor,
        )  # fmt: skip
        query_grad[:, :, start : start + rows] = part[0] if strips == 1 else part.sum(0)
        weight_grads.append(weights.sum((0, 2)))
    if args.group > 1:
        key_grad, value_grad = (
            torch.unflatten(x, 1, (-1, args.group)).sum(2, dtype=torch.float32) for x in (key_grad, value_grad)
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
    _statistics_plan(width, out.dtype).launch(
        batch * heads * -(-padded // STATISTICS_ROWS),
        out, grad, log_sum, statistics, *out.stride()[:3], *grad.stride()[:3], heads, length, padded, width,
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
