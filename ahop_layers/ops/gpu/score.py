"""Host code of scores in CUDA C++: lanes that sort blocks of any size."""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from math import gcd
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.chunked import GPU_SCRATCH_BYTES
from ahop_layers.ops.gpu import division, nvrtc
from ahop_layers.ops.gpu.layout import WARP, Layout, choose_layout
from ahop_layers.ops.protocols import Need, allocate_grads

KINDS = ("dis", "dot", "l1", "near")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MIN_FLAT = 9  # from this number of blocks on, the sort is skipped where the weights make the order irrelevant
SHARED_BYTES = 99 * 2**10  # that a thread block may use on every GPU of compute capability 8.0 or newer
OLDER_SHARED_BYTES = 64 * 2**10
THREADS = 4 * WARP  # of the forward kernel
MANY = 256  # threads of kernels that copy and add numbers
MOST_GROUPS = 64  # of parts of the weights' gradient, which are summed first

CALL = Struct("<36q11i4x")
Launch = tuple[int, int, int]
"""Thread blocks, their threads, and their bytes of shared memory."""


class ScoreProblem(NamedTuple):
    """The shapes, dtypes and options of a call. ``scores`` is the dtype of the scores or their gradient."""

    device: torch.device
    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    n: int
    bases: tuple[str, ...]
    scores: torch.dtype
    need: Need | None = None  # of the backward pass


class Program(NamedTuple):
    """A kernel: its source and constants, the dtype, blocks and dimensions it processes, and its thread blocks."""

    source: str
    constants: nvrtc.Constants
    dtype: torch.dtype
    layout: Layout
    keys: int  # of a group of lanes
    warps: int
    shared: int = 0  # bytes


def _forward_program(problem: ScoreProblem) -> Program:
    device, dtype, (*_, d), _, n, bases, *_ = problem
    # Two keys at a time: single dimensions in half precision, if the GPU has the instructions.
    packed = n == d and dtype != torch.float32 and nvrtc.capability(device) >= (8, 0)
    packed = packed and (dtype == torch.float16 or nvrtc.capability(device) >= (9, 0))
    layout = choose_layout(n, d // n, alone=96, shared=64, step=1 + packed)
    dtype = _padded_dtype(problem, layout)
    packed = packed and dtype != torch.float32 and layout.chunk % 2 == 0
    flat = n >= MIN_FLAT and "near" not in bases
    constants = {**_constants(problem, layout, dtype, flat), "packed": packed}
    return Program("score.cu", tuple(constants.items()), dtype, layout, 1 + packed, THREADS // WARP)


def _backward_program(problem: ScoreProblem) -> Program:
    device, dtype, (*_, d), _, n, bases, _, need = problem
    room = SHARED_BYTES if nvrtc.capability(device) >= (8, 0) else OLDER_SHARED_BYTES
    layout = choose_layout(n, d // n, alone=32, shared=32)
    dtype = _padded_dtype(problem, layout)

    def shared_bytes(warps: int) -> int:
        rows = 2 * warps * 4 * layout.dims if warps > 1 else 0
        return warps * len(bases) * layout.chunk * 4 * WARP + rows

    # Wide rows have few keys in a warp: warps that add up their gradients of a query leave fewer parts.
    most = 4 if layout.pairs <= (8 if n == d else 4) else 1
    warps = next(each for each in (4, 2, 1) if each == 1 or (each <= most and shared_bytes(each) <= room))
    flat = n >= MIN_FLAT and need is not None and not need[2]  # constant weights have a gradient
    tagged = n == d and dtype != torch.float32
    constants = {**_constants(problem, layout, dtype, flat), "tagged": tagged, "warps": warps}
    return Program("score_backward.cu", tuple(constants.items()), dtype, layout, 1, warps, shared_bytes(warps))


def _padded_dtype(problem: ScoreProblem, layout: Layout) -> torch.dtype:
    """Returns float32 if blocks are padded with values that the dtype cannot hold, else the dtype."""
    is_half = problem.dtype == torch.float16
    return torch.float32 if layout.blocks > problem.n and is_half else problem.dtype


def _constants(problem: ScoreProblem, layout: Layout, dtype: torch.dtype, flat: bool) -> dict[str, int]:
    bases, n = problem.bases, problem.n
    return {
        **layout.constants(),
        "given_dtype": DTYPES[problem.dtype],
        "dtype": DTYPES[dtype],
        "score_dtype": DTYPES[problem.scores],
        "n": n,
        "size": problem.query[-1] // n,
        "bases": len(bases),
        "kinds": sum(KINDS.index(base) << 2 * place for place, base in enumerate(bases)),
        "has_near": "near" in bases,
        "may_be_flat": flat,
    }


class ScorePlan:
    """All that depends on a problem alone: kernels, their launches, and scratch memory."""

    def __init__(self, problem: ScoreProblem) -> None:
        self.problem, self.program = problem, (_backward_program if problem.need else _forward_program)(problem)
        program, layout, bases = self.program, self.program.layout, len(problem.bases)
        self.batch, self.heads, length, d = problem.query
        self.all_heads = self.batch * self.heads
        self.is_swapped = self._is_better_swapped(length, problem.key[2])
        self.lengths = self.in_order((length, problem.key[2]))
        self.is_padded = layout.dims > d or program.dtype != problem.dtype
        stretch = program.dtype.itemsize * layout.stretch  # bytes of adjacent dimensions that a lane reads
        self.alignment = 4 * gcd(stretch // 4, 4) if stretch % 4 == 0 else program.dtype.itemsize
        self.folding = -(-self.heads * bases * WARP // MANY)  # thread blocks that fold weights
        launches, parts = self._divide_backward(problem.need) if problem.need else self._divide_forward()
        make = partial(nvrtc.kernel, program.source, constants=program.constants, index=problem.device.index or 0)
        self.prepare = make(name="score_prepare")
        self.launches = [(make(name=name), *launch) for name, launch in launches.items()]
        # Bytes from which folded weights, the parts of three gradients and first sums of parts start, and the end.
        sizes = self.heads * bases * layout.blocks * (2 if "near" in problem.bases else 1), *parts
        self.places = list(accumulate((-(-4 * size // 256) * 256 for size in sizes), initial=0))

    def _is_better_swapped(self, length: int, count: int) -> bool:
        """Returns whether fewer lanes are idle if queries and keys change places; all bases are symmetric."""
        if not self.problem.need:
            return self.all_heads * count < 32 * WARP and length > count
        keys = self.program.warps * self.program.layout.pairs
        return _filled(length, keys) > 1.1 * _filled(count, keys)

    def in_order(self, pair: Sequence[Any]) -> tuple[Any, Any]:
        """Returns what belongs to query and key in the order in which the kernels take them."""
        return (pair[1], pair[0]) if self.is_swapped else (pair[0], pair[1])

    def _divide_forward(self) -> tuple[dict[str, Launch], list[int]]:
        (length, count), program = self.lengths, self.program
        programs = -(-self.all_heads * -(-count // program.keys) * program.layout.lanes // THREADS)
        rows = division.even_split(length, programs * program.warps, division.slots(self.problem.device), 6)
        self.division, self.is_direct = (rows, programs, 0, 0, 0, 0, 0), (False, False)
        return {"score": (programs * -(-length // rows), THREADS, 0)}, [0] * 4

    def _divide_backward(self, need: Need) -> tuple[dict[str, Launch], list[int]]:
        """Cuts keys into strips and queries into chunks; returns launches, and sizes of parts of gradients."""
        (length, count), program, device = self.lengths, self.program, self.problem.device
        queries, keys = (self.all_heads * each * program.layout.dims for each in self.lengths)
        tiles, warps = -(-count // (program.warps * program.layout.pairs)), self.all_heads * program.warps
        span, rows = division.divide(tiles, length, warps, division.slots(device), 4 * queries, 4 * keys)
        strips, chunks, weights = -(-tiles // span), -(-length // rows), self.heads * len(self.problem.bases)
        programs = self.all_heads * strips
        parts = strips * chunks * self.batch * program.warps
        groups = min(parts, MOST_GROUPS) if need[2] else 0
        self.division = rows, programs, span, strips, chunks, program.warps, groups
        # A single part in float32 is the gradient itself.
        single = self.problem.dtype == torch.float32 and not self.is_padded
        wanted = self.in_order(need)
        self.is_direct = single and wanted[0] and strips == 1, single and wanted[1] and chunks == 1
        rows_summed = sum(self.lengths[side] for side in (0, 1) if wanted[side] and not self.is_direct[side])
        summed = rows_summed * self.all_heads * self.problem.query[-1] + groups * weights * self.problem.n
        launches = {"score_backward": (programs * chunks, WARP * program.warps, program.shared)}
        if summed:
            launches["score_sum"] = -(-summed // MANY), MANY, 0
        if need[2]:
            launches["score_sum_weights"] = self.folding, MANY, 0
        of_rows = queries * strips * (not self.is_direct[0]), keys * chunks * (not self.is_direct[1])
        return launches, [*of_rows, parts * weights * program.layout.blocks, groups * weights * self.problem.n]

    def run(
        self,
        pair: tuple[Tensor, Tensor],
        weight: Tensor,
        scores: Tensor,
        widths: Tensor | None = None,
        grads: Sequence[Tensor | None] = (None, None, None),
    ) -> None:
        """Computes the scores of query and key, or gradients from the gradients of the scores."""
        inputs, layout, item = self.in_order(pair), self.program.layout, self.program.dtype.itemsize
        sizes = [0 if self._is_ready(x) else x.shape[-2] * self.all_heads * layout.dims for x in inputs]
        scratch = torch.empty(self.places[-1] + item * sum(sizes), dtype=torch.uint8, device=scores.device)
        *places, end = (scratch.data_ptr() + place for place in self.places)
        rows, copied = [], end
        for x, size in zip(inputs, sizes, strict=True):
            *given, column = _place(x)
            row = item * layout.dims
            strides = self.heads * x.shape[-2] * row, x.shape[-2] * row, row
            rows += [*given, column, *((copied, *strides) if size else given)]
            copied += item * size
        *heads, down, across = _place(scores)
        addresses = [0 if x is None else x.data_ptr() for x in (*self.in_order(grads[:2]), grads[2])]
        for side in (0, 1):
            if self.is_direct[side]:
                places[1 + side], addresses[side] = addresses[side], 0
        arguments = CALL.pack(
            *rows, *heads, *self.in_order((down, across)), weight.data_ptr(), *weight.stride(),
            0 if widths is None else widths.data_ptr(), *places,
            *addresses, self.batch, self.heads, *self.lengths, *self.division,
        )  # fmt: skip
        prepare = self.prepare, self.folding + -(-sum(sizes) // MANY), MANY, 0
        nvrtc.run(scores.device, [prepare, *self.launches], arguments)

    def _is_ready(self, rows: Tensor) -> bool:
        """Returns whether the kernels can read rows where they are: aligned, adjacent numbers that need no padding."""
        batch, head, row, column = rows.stride()
        address = rows.data_ptr() | (batch | head | row) * rows.element_size()
        return column == 1 and address % self.alignment == 0 and not self.is_padded


_plan = lru_cache(maxsize=4096)(ScorePlan)


def _filled(count: int, tile: int) -> float:
    """Returns the fraction of lanes that ``count`` keys in tiles of ``tile`` keys occupy."""
    return count / (-(-count // tile) * tile)


def _place(tensor: Tensor) -> list[int]:
    """Returns the address of a tensor ``(N, H, L, d)`` and its strides in bytes."""
    return [tensor.data_ptr(), *(tensor.element_size() * stride for stride in tensor.stride())]


def score(
    query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], out: Tensor, widths: Tensor | None
) -> None:
    """Computes the scores into ``out``; for the other arguments see :func:`ahop_layers.ops.chunked.score`."""
    problem = ScoreProblem(query.device, query.dtype, query.shape, key.shape, weight.shape[-1], bases, out.dtype)
    _plan(problem).run((query, key), weight, out, None if widths is None else widths.contiguous())


@lru_cache(maxsize=None)
def compile_ahead(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    n: int,
    bases: tuple[str, ...],
    scores: torch.dtype,
    trains_weights: bool,
) -> None:
    """Compiles the kernels of forward and backward pass at the same time, where each would compile its own."""
    problem = ScoreProblem(device, dtype, (1, 1, 1, d), (1, 1, 1, d), n, bases, scores)
    programs = _forward_program(problem), _backward_program(problem._replace(need=(True, True, trains_weights)))
    nvrtc.compile_together([(each.source, each.constants) for each in programs], device.index or 0)


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: tuple[str, ...], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and weight, contiguous and in their dtypes; empty where not needed."""
    problem = ScoreProblem(query.device, query.dtype, query.shape, key.shape, weight.shape[-1], bases, grad.dtype, need)
    query_grad, key_grad, weight_grad = grads = allocate_grads((query, key, weight), need)
    _run_backward(problem, query, key, weight, grad, grads)
    return query_grad, key_grad, weight_grad


def _run_backward(
    problem: ScoreProblem, query: Tensor, key: Tensor, weight: Tensor, grad: Tensor, grads: Sequence[Tensor]
) -> None:
    """Computes gradients at once, or each half of a batch whose parts of gradients need too much scratch memory."""
    plan, half = _plan(problem), query.shape[0] // 2
    if half == 0 or plan.places[-1] <= GPU_SCRATCH_BYTES:
        return plan.run((query, key), weight, grad, None, grads)
    rest = torch.empty_like(grads[2])
    for part, weight_grad in ((slice(half), grads[2]), (slice(half, None), rest)):
        queries, keys = query[part], key[part]
        smaller = problem._replace(query=queries.shape, key=keys.shape)
        _run_backward(smaller, queries, keys, weight, grad[part], (grads[0][part], grads[1][part], weight_grad))
    grads[2].add_(rest)
