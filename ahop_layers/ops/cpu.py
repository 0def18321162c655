"""The native CPU kernel: footprint.c, called through ctypes on the tensors' memory.

The C file sorts with a network it gets as data: :func:`steps` lists sorts and merges of as many rows as fit in vector
registers. The interface is that of :mod:`ahop_layers.ops.chunked`.
"""

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.chunked import Need
from ahop_layers.ops.reference import accumulation_dtype

MAX_DIMENSIONS = 1024
BASE_CODES = {"dis": 0, "dot": 1, "l1": 2}
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
END, SORT2, SORT4, SORT8, SORT16, SORT32, MERGE32, CHAIN1, CHAIN2, CHAIN3, CHAIN4 = range(11)
SORTS = {2: SORT2, 4: SORT4, 8: SORT8, 16: SORT16}
CHAINS = {1: CHAIN1, 2: CHAIN2, 3: CHAIN3, 4: CHAIN4}

SERIAL_WORK = 50_000
"""Below so many similarities a call takes less time than starting a thread would gain."""


CALL = struct.Struct("9P22q")
"""``call_t`` of footprint.c: nine pointers, six sizes, three times four strides, dtype, need, threads, paired."""


@lru_cache(maxsize=None)
def _library() -> ctypes.CDLL | str:
    """The library, loaded once in a process, or the reason why it cannot be."""
    path = Path(os.environ.get("AHOP_CPU_LIBRARY") or Path(__file__).with_name("_footprint.so"))
    if not path.is_file():
        return f"{path.name} was not built: the package was installed without a C compiler"
    try:
        library = ctypes.CDLL(str(path))
        library.ahop_isa.argtypes, library.ahop_isa.restype = [ctypes.c_int64], ctypes.c_char_p
        for function in (library.ahop_forward, library.ahop_backward):
            function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_char_p], ctypes.c_int
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"
    return library


@lru_cache(maxsize=None)
def instruction_sets() -> dict[str, int]:
    """Instruction sets of the library that this processor has, fastest first, with their numbers there."""
    library, names, number = _library(), {}, 0
    while not isinstance(library, str) and (name := library.ahop_isa(number)) is not None:
        if name:
            names[name.decode()] = number
        number += 1
    return names


def unavailable() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    library = _library()
    return library if isinstance(library, str) else None


def detail() -> str:
    """One line on how this backend runs here."""
    return f"native, {next(iter(instruction_sets()))}, {torch.get_num_threads()} threads"


def serves(query: Tensor, bases: Sequence[str], blocks: int) -> bool:
    """Returns whether this kernel supports the tensor and implements the bases; every dimension must be a block."""
    fits = query.device.type == "cpu" and query.shape[-1] <= MAX_DIMENSIONS and query.dtype in DTYPE_CODES
    return fits and blocks == query.shape[-1] and all(base in BASE_CODES for base in bases)


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
    """``(N, H, L, d), (N, H, S, d), (H, n_bases, d) -> (N, H, L, S)``."""
    scores = query.new_empty(*query.shape[:-1], key.shape[-2], dtype=accumulation_dtype(query.dtype))
    _run("ahop_forward", query, key, weight, scores, bases)
    return scores


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`score`; one that ``need`` does not ask for comes back empty."""
    dtype = accumulation_dtype(query.dtype)
    grads = [
        tensor.new_empty(tensor.shape if wanted else 0, dtype=dtype)
        for tensor, wanted in zip((query, key, weight), need, strict=True)
    ]
    if grad.numel() == 0:
        for each in grads:
            each.zero_()
    _run("ahop_backward", query, key, weight, grad.to(dtype), bases, grads)
    query_grad, key_grad, weight_grad = grads
    return query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.to(weight.dtype)


def _run(
    function: str,
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    scores: Tensor,
    bases: Sequence[str],
    grads: Sequence[Tensor] = (),
) -> None:
    """Call ``function`` with lanes along the longer of query and key, or along a batch of single pairs."""
    if scores.numel() == 0 or (grads and not any(tensor.numel() for tensor in grads)):
        return
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(library)
    length, d = query.shape[-2:]
    paired = length == key.shape[-2] == 1
    weight = weight.to(scores.dtype).contiguous()
    pair_grads, weight_grads = list(grads[:2]), grads[2:]
    if length > key.shape[-2]:  # every base is symmetric in query and key
        query, key, scores = key, query, scores.transpose(-1, -2)
        pair_grads.reverse()
    elif paired:
        query, key, scores = query.transpose(0, 2), key.transpose(0, 2), scores.transpose(0, 3)
    pointers = [tensor.data_ptr() for tensor in (query, key, weight, scores, *pair_grads, *weight_grads)]
    pointers += [0] * (7 - len(pointers))
    need = sum(1 << bit for bit, tensor in enumerate((*pair_grads, *weight_grads)) if tensor.numel())
    threads = torch.get_num_threads() if scores.numel() * d * len(bases) >= SERIAL_WORK else 1
    call = CALL.pack(
        *(*pointers, ctypes.addressof(_codes(tuple(bases))), ctypes.addressof(_program(d))),
        *(*scores.shape, d, len(bases)),
        *(*query.stride(), *key.stride(), *scores.stride()),
        *(DTYPE_CODES[query.dtype], need, threads, paired),
    )
    if getattr(library, function)(next(iter(instruction_sets().values())), call):
        raise MemoryError("the native kernel could not allocate its scratch memory")


@lru_cache(maxsize=None)
def _codes(bases: tuple[str, ...]) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * len(bases))(*(BASE_CODES[base] for base in bases))


class Step(NamedTuple):
    """``step_t`` of footprint.c: groups of rows ``step`` apart, one group every ``advance`` rows, up to ``end``."""

    code: int
    start: int
    advance: int
    groups: int
    step: int
    end: int


def steps(d: int) -> Iterator[Step]:
    """A sorting network for ``d`` rows, in groups of rows that fit in vector registers.

    Sort runs of 32 rows first, or of fewer at the end. Then merge runs as Batcher does: comparators of the five largest
    distances form merges of 32 rows that do not touch one another, and those of smaller distances form chains, up to
    four distances at a time.
    """
    whole, rest = divmod(d, 32)
    if whole:
        yield Step(SORT32, 0, 32, whole, 1, d)
    for start in range(32 * whole, d - 1, 16):
        code = next(code for size, code in SORTS.items() if size >= min(d - start, 16))
        yield Step(code, start, 16, 1, 1, d)
    if rest > 16:
        yield Step(MERGE32, 32 * whole, 1, 1, 1, d)
    run = 32
    while run < d:
        for block in range(0, d - run, 2 * run):
            end = min(block + 2 * run, d)
            step = run // 16
            yield Step(MERGE32, block, 1, min(step, end - block - run), step, end)
            while step > 1:
                distances = min(step.bit_length() - 1, max(CHAINS))
                step >>= distances
                yield Step(CHAINS[distances], block, 1, step, step, end)
        run *= 2


@lru_cache(maxsize=None)
def _program(d: int) -> "ctypes.Array[ctypes.c_int32]":
    words = [word for step in (*steps(d), Step(END, 0, 0, 0, 0, 0)) for word in step]
    return (ctypes.c_int32 * len(words))(*words)
