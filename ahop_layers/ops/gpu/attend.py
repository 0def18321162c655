"""Host code of fused attention: blocks of queries and keys on tensor cores, in CUDA C++."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.dropout import scale, threshold
from ahop_layers.ops.gpu import nvrtc
from ahop_layers.ops.gpu.division import even_split
from ahop_layers.ops.protocols import AttentionCall

ROWS, CHUNK = 16, 8  # rows of a tile, and dimensions of a matrix
MAX_BLOCKS, MAX_DIMENSIONS = 8, 128
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MASKS = {None: 0, torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
KEYS = 32  # of a tile of the forward kernel
SMALL_BYTES = 896  # of a key and a value, of which 99 KiB of shared memory hold enough
RESERVED = 1024  # bytes of shared memory that the driver keeps for each thread block
BACKWARD_WARPS, MORE_BACKWARD_WARPS = 8, 12  # of a thread block, at most
LEAST_SLOTS = 4  # of the ring of the backward kernel
MOST_PLANS = 4096

FORWARD = Struct("<27q5iI2f")
BACKWARD = Struct("<49q9iI2f")


class Shape(NamedTuple):
    """Blocks, their padded size, and the padded dimension of the values, which a kernel is compiled for."""

    n: int
    size: int
    width: int


class Limits(NamedTuple):
    """A device: its index, bytes of shared memory of a thread block and a multiprocessor, and multiprocessors."""

    device: int
    thread_block: int
    multiprocessor: int
    multiprocessors: int


Place = tuple[int, int, int, int]
"""The address of a tensor ``(N, H, L, d)`` and its strides in bytes, except for adjacent numbers."""

AlignedRows = tuple[Tensor, Place]


class Weights:
    """The weights ``(H, n_bases, n)`` and ``beta (H, n_bases)`` of a call as the kernels take them."""

    def __init__(self, call: AttentionCall) -> None:
        weight, beta = call.weight, call.beta
        self.weight = weight if weight.stride()[1:] == (weight.shape[-1], 1) else weight.contiguous()
        self.beta = beta if beta is None or beta.stride(-1) == 1 else beta.contiguous()
        head = 0 if self.beta is None else self.beta.stride(0)
        self.place = self.weight.data_ptr(), _address(self.beta), self.weight.stride(0), head


def kernel_shape(n: int, size: int, width: int) -> Shape:
    """Returns the padded sizes: blocks of 8, 16, 32... dimensions, and values with a multiple of 8."""
    size = max(CHUNK, 1 << (size - 1).bit_length())
    size = 2 * size if n * size == CHUNK else size  # one matrix alone is not supported
    return Shape(n, size, -(-width // CHUNK) * CHUNK)


def serves(call: AttentionCall) -> bool:
    """Returns whether the kernels support a call."""
    query, _, value, weight, mask, *_ = call
    capability = nvrtc.capability(query.device)
    if query.dtype not in DTYPES or value.dtype != query.dtype or capability < (8, 0):
        return False
    if 0 in (*query.shape, *value.shape) or not set(call.bases) <= {"dis", "dot"}:
        return False
    n, size, width = kernel_shape(weight.shape[-1], query.shape[-1] // weight.shape[-1], value.shape[-1])
    if query.element_size() * (n * size + width) > SMALL_BYTES and capability not in ((8, 0), (9, 0), (10, 0)):
        return False
    known = mask is None or mask.dtype in MASKS
    return known and n <= MAX_BLOCKS and n * size <= MAX_DIMENSIONS and width <= MAX_DIMENSIONS


def uses_tf32() -> bool:
    """Returns whether PyTorch's products of float32 matrices on a GPU may be TF32, of 11 significant bits."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # since PyTorch 2.9
    return bool(matmul.allow_tf32 if precision is None else precision == "tf32")


def occupancy(shape: Shape, itemsize: int = 2) -> tuple[int, int]:
    """Returns the most warps of a thread block, and thread blocks on a multiprocessor, that registers allow."""
    if itemsize * shape.n * shape.size > 128 or itemsize * shape.width > 128:
        return 8, 1
    return (8, 2) if shape.n <= 4 and itemsize == 2 else (4, 3)


class AttentionPlan:
    """All that depends on shapes, dtypes and options of a call alone: kernels, their launches, and scratch memory."""

    def __init__(self, call: AttentionCall) -> None:
        query, key, value, weight, mask, _, bases, causal, dropout, *_ = call
        n, d, width = weight.shape[-1], query.shape[-1], value.shape[-1]
        self.shape = shape = kernel_shape(n, d // n, width)
        self.units = _unit(query.element_size() * (d // n)), _unit(query.element_size() * width)
        self.device, self.limits, self.itemsize = query.device, _limits(query.device), query.element_size()
        self.kernels: dict[str, nvrtc.Kernel] = {}
        (self.batch, self.heads, self.length, _), (_, key_heads, self.count, _) = query.shape, key.shape
        self.group, self.dropout = self.heads // key_heads, (threshold(dropout), scale(dropout))
        has_dis = "dis" in bases
        self.constants = {
            "blocks": n,
            "size": shape.size,
            "width": shape.width,
            "part": d // n,
            "value": width,
            "dot": "dot" in bases,
            "dis": has_dis,
            "dis_at": bases.index("dis") if has_dis else 0,
            "dtype": DTYPES[query.dtype],
            "precise": query.dtype == torch.float32 and not uses_tf32(),
            "mask": MASKS[None if mask is None else mask.dtype],
            "causal": causal,
            "dropout": dropout > 0,
        }
        dim_bytes, width_bytes = (_row_bytes(self.itemsize * d) for d in (n * shape.size, shape.width))
        norm_bytes = (4 if query.dtype == torch.float32 else 16) * n if has_dis else 0
        self.row = dim_bytes + width_bytes + norm_bytes  # bytes of shared memory
        self.tiles = -(-self.length // ROWS)
        self._plan_forward(ROWS * (max(dim_bytes, width_bytes) + norm_bytes), causal)
        self._plan_backward(len(bases), has_dis)

    def _plan_forward(self, own: int, causal: bool) -> None:
        most, resident = occupancy(self.shape, self.itemsize)
        heads, wide = self.batch * self.heads, -(-self.tiles // 16)
        fills = 16 * wide <= 1.1 * self.tiles and heads * wide >= 2 * self.limits.multiprocessors
        if resident == 2 and fills and not causal:
            most, resident = 16, 1  # twice as many queries for each copy of the keys
        room = min(self.limits.thread_block, self.limits.multiprocessor // resident - RESERVED)
        fitting = (room - most * own) // (KEYS * self.row)
        # An area for all keys has one of few sizes, each of which is a kernel.
        enough = [tiles for tiles in (2, 4, fitting) if -(-self.count // KEYS) <= tiles <= fitting]
        tiles, areas = (enough[0], 1) if enough else (max(1, min(4, fitting // 3)), 3)
        if areas * tiles > fitting:  # fewer thread blocks where shared memory is too small
            room = min(self.limits.thread_block, self.limits.multiprocessor - RESERVED)
        groups = areas * tiles * KEYS * self.row
        warps = max(1, min(most, (room - groups) // own, self.tiles))
        warps = _even_warps(self.tiles, warps, heads, self.limits.multiprocessors)
        self.thread_blocks = -(-self.tiles // warps)  # of a head
        if areas == 1:  # a thread block that has all keys may as well have several rounds of queries
            rounds = even_split(self.thread_blocks, heads, resident * self.limits.multiprocessors)
            self.thread_blocks = -(-self.thread_blocks // rounds)
        self.forward_launch = heads * self.thread_blocks, 32 * warps, groups + warps * own
        sizes = {"tiles": tiles, "areas": areas, "threads": 32 * most, "thread_blocks_per_sm": resident}
        self.forward_constants = {**self.constants, **sizes}

    def _plan_backward(self, bases: int, has_dis: bool) -> None:
        n, dims, heads = self.shape.n, self.shape.n * self.shape.size, self.batch * self.heads
        tile = ROWS * (self.row + 8) + 16 + 512 * (dims // CHUNK + has_dis)
        room = min(self.limits.thread_block, self.limits.multiprocessor - RESERVED) - 16
        own, key_tiles = ROWS * self.row, -(-self.count // ROWS)
        # Float32 waits longer for sums and loads, which more warps hide; for few keys or queries they have no work.
        many = self.itemsize == 4 and n <= 4 and min(self.tiles, key_tiles) > 2 * MORE_BACKWARD_WARPS
        choices = (MORE_BACKWARD_WARPS,) * many + (BACKWARD_WARPS, 4, 2)
        warps = next((w for w in choices if w * own + LEAST_SLOTS * (tile + 16 * w) <= room), 1)
        tile += 16 * warps  # barriers
        fitting = (room - warps * own) // tile
        # A thread block has all keys of a head if its queries fit and there are enough heads. It has several heads if
        # warps without keys in the last round can load the next one.
        alone = self.tiles <= fitting and self.group == 1 and heads >= self.limits.multiprocessors
        self.key_warps, self.strips = warps, 1 if alone else -(-key_tiles // warps)
        self.strip_tiles, self.items = -(-key_tiles // self.strips), heads // self.group * self.strips
        thread_blocks = min(self.items, self.limits.multiprocessors) if alone and key_tiles % warps else self.items
        self.slots = min(fitting, self.tiles * self.group * -(-self.items // thread_blocks))
        sizes = (
            heads * self.tiles * dims * ROWS if self.strips > 1 else 0,  # query_sums
            heads * self.tiles * ROWS * 2,  # statistics
            heads * key_tiles * (bases * n + 1),  # weight_parts
            1 + heads * self.tiles,  # turns
        )
        self.scratch, self.places = sum(sizes), [4 * sum(sizes[:index]) for index in range(4)]
        lanes = min(16, 1 << (self.shape.width // CHUNK - 1).bit_length())
        self.launches = {
            "attend_statistics": (-(-heads * self.tiles * ROWS * lanes // 256), 256, 0),
            "attend_backward": (thread_blocks, 32 * warps, 16 + warps * own + self.slots * tile),
        }
        self.launches_with_weights = {**self.launches, "attend_weights": (self.heads * bases, 512, 128 * (n + 1))}

    def run(self, launches: Mapping[str, tuple[int, int, int]], arguments: bytes) -> None:
        """Runs kernels on the current stream of the device, each with a number of thread blocks, threads and bytes."""
        kernels = [(self.kernels.get(name) or self._load(name), *launch) for name, launch in launches.items()]
        nvrtc.run(self.device, kernels, arguments)

    def _load(self, name: str) -> nvrtc.Kernel:
        source, constants = self._program(name)
        kernel = self.kernels[name] = nvrtc.kernel(source, name, constants, self.limits.device)
        return kernel

    def _program(self, name: str) -> tuple[str, nvrtc.Constants]:
        """Returns the source file and the constants of a kernel."""
        if name == "attend_forward":
            return "attend.cu", tuple(self.forward_constants.items())
        constants = {**self.constants, "threads": 32 * self.key_warps, "thread_blocks_per_sm": 1}
        return "attend_backward.cu" if name == "attend_backward" else "attend_sums.cu", tuple(constants.items())

    def inputs(self, call: AttentionCall) -> tuple[AlignedRows, AlignedRows, AlignedRows]:
        """Returns query, key and value as the kernels take them."""
        part, value = self.units
        return aligned_rows(call.query, part), aligned_rows(call.key, part), aligned_rows(call.value, value)

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Computes the readout and the log-sum-exp."""
        if call.query.requires_grad and not self.kernels:
            # Both passes at the same time, where each would compile its own. The longest comes first.
            programs = dict.fromkeys(map(self._program, ("attend_backward", "attend_forward", *self.launches)))
            nvrtc.compile_together(list(programs), self.limits.device)
        query, key, value = self.inputs(call)
        weights = Weights(call)
        results, log_sum = call.empty_results()
        arguments = FORWARD.pack(
            *query[1], *key[1], *value[1], *_place(results), *self.mask(call), *weights.place,
            _address(call.seed), log_sum.data_ptr(),
            self.heads, self.group, self.length, self.count, self.thread_blocks, *self.dropout, call.scaling,
        )  # fmt: skip
        self.run({"attend_forward": self.forward_launch}, arguments)
        return results, log_sum

    def backward(
        self, call: AttentionCall, grad: Tensor, out: Tensor, log_sum: Tensor, need: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Computes the gradients of query, key, value, weight and beta; empty ones where ``need`` is False."""
        inputs, log_sum = self.inputs(call), log_sum.contiguous()
        upstream, readout = (aligned_rows(x, self.units[1]) for x in (grad, out))
        weights, grads = Weights(call), [_empty(x) for x in call[:4]]
        grads.append(log_sum.new_empty(0) if call.beta is None else _empty(call.beta))
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device)
        sums, statistics, parts, turns = (scratch.data_ptr() + place for place in self.places)
        *mask, mask_key = self.mask(call)
        query, key, value = (_place(x) for x in grads[:3])
        arguments = BACKWARD.pack(
            *inputs[0][1], *inputs[1][1], *inputs[2][1], *upstream[1], *mask, *query, *key, *value, *readout[1],
            mask_key, *weights.place, _address(call.seed), log_sum.data_ptr(), statistics, sums, turns, parts,
            grads[3].data_ptr(), _address(None if call.beta is None else grads[4]),
            self.batch, self.heads, self.group, self.length, self.count,
            self.strips, self.strip_tiles, self.items, self.slots, *self.dropout, call.scaling,
        )  # fmt: skip
        self.run(self.launches_with_weights if any(need[3:]) else self.launches, arguments)
        if all(need):
            return tuple(grads)
        return tuple(x if wanted else x.new_empty(0) for x, wanted in zip(grads, need, strict=True))

    def mask(self, call: AttentionCall) -> list[int]:
        """Returns the address of the mask and its strides in bytes."""
        if call.mask is None:
            return [0] * 5
        full, size = call.mask.expand(self.batch, self.heads, self.length, self.count), call.mask.element_size()
        return [full.data_ptr(), *(size * stride for stride in full.stride())]


def _row_bytes(size: int) -> int:
    """Returns the bytes in shared memory of a row of ``size`` bytes, as in ``tiles.cuh``."""
    return 16 * (-(-size // 64) * 4 + 1)


def _even_warps(tiles: int, most: int, heads: int, multiprocessors: int) -> int:
    """Returns the number of warps of a thread block: as few as the fewest thread blocks of at most ``most`` need.

    There are more thread blocks where multiprocessors would be idle, but of four warps at least, which share the work
    of copying keys.
    """
    while most > 4 and 4 * heads * -(-tiles // most) < 3 * multiprocessors:
        most = -(-most // 2)
    return -(-tiles // -(-tiles // most))


_plans: dict[tuple[Any, ...], AttentionPlan] = {}


def _signature(call: AttentionCall) -> tuple[Any, ...]:
    query, key, value, weight, mask, seed, bases, causal, dropout, beta, _ = call
    tensors = query, key, value, weight, mask, seed, beta
    tf32 = query.dtype == torch.float32 and uses_tf32()
    return *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors], bases, causal, dropout, tf32


def planned(call: AttentionCall) -> AttentionPlan | None:
    """Returns the plan of an earlier call with the same shapes, dtypes and options."""
    return _plans.get(_signature(call))


def plan(call: AttentionCall) -> AttentionPlan:
    """Returns the plan of a call from a cache."""
    signature = _signature(call)
    found = _plans.get(signature)
    if found is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        found = _plans[signature] = AttentionPlan(call)
    return found


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def aligned_rows(tensor: Tensor, unit: int) -> AlignedRows:
    """Returns rows of adjacent numbers, at multiples of a unit of bytes, and their place."""
    address, batch, head, row = place = _place(tensor)
    if tensor.stride(-1) != 1 or (address | batch | head | row) % unit:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor, _place(tensor)
    return tensor, place


def _unit(size: int) -> int:
    """Returns the bytes that the kernels copy at once from blocks of ``size`` bytes."""
    return min(16, size & -size)


def _place(tensor: Tensor) -> Place:
    (batch, head, row, _), size = tensor.stride(), tensor.element_size()
    return tensor.data_ptr(), size * batch, size * head, size * row


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=None)
def _limits(device: torch.device) -> Limits:
    index = torch.cuda.current_device() if device.index is None else device.index
    return Limits(index, *nvrtc.shared_limits(index), torch.cuda.get_device_properties(index).multi_processor_count)
