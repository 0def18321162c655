"""The native CPU kernel: footprint.c, called through ctypes on the memory of tensors.

The library receives its sorting network as data: :func:`steps` lists sorts and merges of groups of rows that fit in
vector registers.
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

from ahop_layers.ops import chunked
from ahop_layers.ops.protocols import Need, allocate_grads
from ahop_layers.ops.reference import accumulation_dtype, fold

MAX_BLOCKS, MAX_DIMENSIONS = 2**16, 2**18  # bound the scratch memory
BASE_CODES = {"dis": 0, "dot": 1, "l1": 2, "near": 3}
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
END, SORT2, SORT4, SORT8, SORT16, SORT32, MERGE32, CHAIN1, CHAIN2, CHAIN3, CHAIN4 = range(11)
SORTS = {2: SORT2, 4: SORT4, 8: SORT8, 16: SORT16}
CHAINS = {1: CHAIN1, 2: CHAIN2, 3: CHAIN3, 4: CHAIN4}

# Calls with less work run single-threaded: starting a thread would take longer. The unit is a sorted similarity;
# summing 8 dimensions takes about as long.
SERIAL_WORK = 50_000
ABI_VERSION = 7  # also in footprint.c; increase both with every change of the interface
# ``call_t`` of footprint.c: 11 pointers, 7 sizes, 3 x 4 strides, dtype, need, threads, paired, missing.
CALL = struct.Struct("11P24q")


@lru_cache(maxsize=None)
def _library() -> ctypes.CDLL | str:
    """Loads the library, once per process. Returns the reason instead if it cannot be used."""
    path = _library_path()
    if not path.is_file():
        return f"{path} does not exist: the package was installed without a C compiler, or compilation failed"
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
        version = library.ahop_abi_version()
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}; reinstall the package"
    if version != ABI_VERSION:
        return f"{path.name} has ABI version {version}, expected {ABI_VERSION}; reinstall the package"
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.ahop_abi_version.argtypes, library.ahop_abi_version.restype = [], ctypes.c_int64
    for function in (library.ahop_forward, library.ahop_backward):
        function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_char_p], ctypes.c_int
    library.ahop_isa.argtypes, library.ahop_isa.restype = [ctypes.c_int64], ctypes.c_char_p


def _library_path() -> Path:
    """Returns the path of the library beside this file, or the one in ``AHOP_CPU_LIBRARY``."""
    path = os.environ.get("AHOP_CPU_LIBRARY")
    return Path(path).resolve() if path else Path(__file__).with_name("_footprint.so")


@lru_cache(maxsize=None)
def instruction_sets() -> dict[str, int]:
    """Returns the library's instruction sets that this processor supports, fastest first, with their indices."""
    library, names, index = _library(), {}, 0
    while not isinstance(library, str) and (name := library.ahop_isa(index)) is not None:
        if name:
            names[name.decode()] = index
        index += 1
    return names


def unavailable() -> str | None:
    """Returns the reason why this kernel cannot run here, or None."""
    library = _library()
    return library if isinstance(library, str) else None


def detail() -> str:
    """Returns one line on how this kernel runs here."""
    return f"native, {next(iter(instruction_sets()))}, {torch.get_num_threads()} threads"


def serves(query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False) -> bool:
    """Returns whether this kernel supports the call, whether or not values can be ``missing``."""
    d = query.shape[-1]
    fits = d <= MAX_DIMENSIONS and blocks <= MAX_BLOCKS
    supported = query.device.type == "cpu" and query.dtype in DTYPE_CODES
    return fits and supported and all(base in BASE_CODES for base in bases)


def score(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    dtype: torch.dtype | None = None,
    widths: Tensor | None = None,
    missing: bool = False,
    softmax: bool = False,
) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)`` for n consecutive blocks.

    With ``softmax``, for at most as many queries as keys, the result is the softmax of the scores.
    """
    several = weight.shape[-1] not in (1, query.shape[-1])  # blocks, where the library knows no missing values
    if missing and several and has_nan(query, key):
        return chunked.score(query, key, weight, bases, dtype, widths, missing)
    scores = query.new_empty(*query.shape[:-1], key.shape[-2], dtype=accumulation_dtype(query.dtype))
    weight = fold(weight, scores.dtype)
    missing = missing and not several
    _run("ahop_forward", (query, key, weight, scores), bases, (), widths, missing, scores if softmax else None)
    return scores.to(dtype or scores.dtype)


def score_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bases: Sequence[str],
    need: Need,
    widths: Tensor | None = None,
    missing: bool = False,
    softmax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors.

    With the ``softmax`` of the scores, ``grad`` is its gradient.
    """
    missing = missing and has_nan(query, key)
    if missing or "near" in bases:  # which the library does not differentiate
        return chunked.score_backward(grad, query, key, weight, bases, need, widths, missing)
    dtype = accumulation_dtype(query.dtype)
    grad = grad.to(dtype) if softmax is None else grad.contiguous()
    grads = allocate_grads((query, key, weight), need, dtype)
    if grad.numel() == 0:
        for each in grads:
            each.zero_()
    _run("ahop_backward", (query, key, fold(weight, dtype), grad), bases, grads, softmax=softmax)
    query_grad, key_grad, weight_grad = grads
    # The cumulative sum is the transpose of fold.
    return query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.cumsum(-1)


def has_nan(*tensors: Tensor) -> bool:
    """Returns True if a tensor has NaN, and possibly if it has infinities of both signs; reads each value once."""
    return any(bool(each.sum().isnan()) for each in tensors)


def _run(
    function: str,
    inputs: Sequence[Tensor],
    bases: Sequence[str],
    grads: Sequence[Tensor] = (),
    widths: Tensor | None = None,
    missing: bool = False,
    softmax: Tensor | None = None,
) -> None:
    """Calls ``function`` with lanes along the longer of query and key, or along a batch of single pairs."""
    query, key, weight, scores = inputs
    if scores.numel() == 0 or (grads and not any(tensor.numel() for tensor in grads)):
        return
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(library)
    (length, d), blocks = query.shape[-2:], weight.shape[-1]
    paired = softmax is None and length == key.shape[-2] == 1
    weight, widths = weight.contiguous(), None if widths is None else widths.contiguous()
    pair_grads, weight_grads = list(grads[:2]), grads[2:]
    if length > key.shape[-2]:  # every base is symmetric in query and key
        query, key, scores = key, query, scores.transpose(-1, -2)
        pair_grads.reverse()
    elif paired:
        query, key, scores = query.transpose(0, 2), key.transpose(0, 2), scores.transpose(0, 3)
    pointers = [tensor.data_ptr() for tensor in (query, key, weight)]
    pointers += [0 if widths is None else widths.data_ptr()]
    pointers += [tensor.data_ptr() for tensor in (scores, *pair_grads, *weight_grads)]
    pointers += [0] * (8 - len(pointers)) + [0 if softmax is None else softmax.data_ptr()]
    need = sum(1 << bit for bit, tensor in enumerate((*pair_grads, *weight_grads)) if tensor.numel())
    threads = torch.get_num_threads() if scores.numel() * (blocks + d // 8) * len(bases) >= SERIAL_WORK else 1
    call = CALL.pack(
        *(*pointers, ctypes.addressof(_codes(tuple(bases))), ctypes.addressof(_network(blocks))),
        *(*scores.shape, d, blocks, len(bases)),
        *(*query.stride(), *key.stride(), *scores.stride()),
        *(DTYPE_CODES[query.dtype], need, threads, paired, missing),
    )
    instruction_set = next(iter(instruction_sets().values()))
    if getattr(library, function)(instruction_set, call):
        raise MemoryError("the native kernel could not allocate its scratch memory")


class Step(NamedTuple):
    """``step_t`` of footprint.c: groups of rows ``step`` apart, one group every ``advance`` rows, up to ``end``."""

    code: int
    start: int
    advance: int
    groups: int
    step: int
    end: int


def steps(n: int) -> Iterator[Step]:
    """Yields a sorting network for ``n`` rows as steps on groups of rows that fit in vector registers.

    The first steps sort runs of 32 rows, and the remaining rows at the end. The others merge runs as in Batcher's
    network: the comparators of the five largest distances form independent merges of 32 rows, and the comparators
    of smaller distances form chains of up to four distances each.
    """
    whole, rest = divmod(n, 32)
    if whole:
        yield Step(SORT32, 0, 32, whole, 1, n)
    for start in range(32 * whole, n - 1, 16):
        code = next(code for size, code in SORTS.items() if size >= min(n - start, 16))
        yield Step(code, start, 16, 1, 1, n)
    if rest > 16:
        yield Step(MERGE32, 32 * whole, 1, 1, 1, n)
    run = 32
    while run < n:
        for block in range(0, n - run, 2 * run):
            end = min(block + 2 * run, n)
            step = run // 16
            yield Step(MERGE32, block, 1, min(step, end - block - run), step, end)
            while step > 1:
                distances = min(step.bit_length() - 1, max(CHAINS))
                step >>= distances
                yield Step(CHAINS[distances], block, 1, step, step, end)
        run *= 2


@lru_cache(maxsize=None)
def _codes(bases: tuple[str, ...]) -> "ctypes.Array[ctypes.c_int32]":
    return (ctypes.c_int32 * len(bases))(*(BASE_CODES[base] for base in bases))


@lru_cache(maxsize=None)
def _network(n: int) -> "ctypes.Array[ctypes.c_int32]":
    words = [word for step in (*steps(n), Step(END, 0, 0, 0, 0, 0)) for word in step]
    return (ctypes.c_int32 * len(words))(*words)
