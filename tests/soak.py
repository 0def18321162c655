"""Soak test: random layers, memories, dtypes, masks, threads, forks and HTTP clients against the reference.

To run: make soak, make soak MINUTES=10, or PYTHONMALLOC=malloc python -m tests.soak --minutes 30 --seed 0

Each round draws one check and its inputs from the seed. A round that fails prints what reproduces it, and the run exits
with status 1. The run also fails if the memory in use, the bytes that malloc has given out, grows by more than 0.5 %
from its second quarter to the third, and again to the last one. A leak grows in both; a single step, such as the one of
2 MiB when Python enlarges its table of interned strings, in one. ``PYTHONMALLOC`` makes Python's objects a part of it.
Resident memory would count how the largest round so far left the heap in pieces, too: it has steps of several MiB while
the memory in use is constant. The caches of oneDNN and MKL are off: they keep one matrix product per shape and buffers
per thread. safetensors keeps some 90 bytes for each tensor that it reads. This is measured at the end and deducted.
"""

import argparse
import copy
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MKL_DISABLE_FAST_MM": "1"}  # read when torch is imported

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers import hopfield
from ahop_layers.ops import reference
from tests.gaps import near_ties
from tests.test_serve import REFUSED, service

BASES = (("dis", "dot"), ("dot",), ("dis",), ("l1",), ("dot", "l1"), ("l1", "dis", "dot"))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
FIT, RELOAD = -1, -2  # changes of a whole memory, in the place of an id
MEMORY_GROWTH = 0.005  # from a quarter of the run to the next one
M_ARENA_MAX = -8  # of malloc.h
READ: list[int] = []  # numbers of tensors that were read from files
SERVED: list[Any] = []  # the memory of the HTTP service, the function that sends requests to it, and the service
SERVING = threading.Lock()


class Draw:
    """Random choices of one round, all from one seed, and independent of the global generators."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return self.choose.randint(low, high)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values in a random memory layout: contiguous, transposed, or a slice of a larger tensor."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # float64 of float32 values would have ties
        rows = torch.randn(*shape[:-1], shape[-1] + 3, generator=self.generator, dtype=wide).to(dtype)[..., 1:-2]
        return self.choose.choice((rows, rows.contiguous(), rows.mT.contiguous().mT))

    def blocks(self, d: int) -> int:
        """A number of blocks that divides d; every second one is d itself."""
        return d if self.integer(0, 1) else self.choose.choice([n for n in range(1, d + 1) if d % n == 0])

    def mask(self, *shape: int) -> Tensor:
        """A bool mask, True = ignore, that may mask whole rows."""
        return torch.rand(shape, generator=self.generator) < self.choose.random()


def relative_error(result: Tensor, exact: Tensor, scale: Tensor | None = None) -> float:
    """Norm of the difference over the norm of ``scale``, by default the exact values."""
    result, exact = result.detach(), exact.detach()
    return float((result.double() - exact).norm() / (exact if scale is None else scale).norm().clamp(min=1e-300))


def check(error: float, baseline: float, what: str, rounding: float = 1e-5) -> None:
    """Raises unless the error is at most twice that of plain PyTorch in the same dtype, plus rounding in float32."""
    if not error <= 2 * baseline + rounding:
        raise RuntimeError(f"{what}: relative error {error:.2e}, plain PyTorch {baseline:.2e}")


def weight_gradient_magnitudes(upstream: Tensor, pair: list[Tensor], weight: Tensor, bases: tuple[str, ...]) -> Tensor:
    """The weight gradient with the absolute value of each of its terms, which its rounding is relative to."""
    magnitudes = torch.zeros_like(weight, dtype=torch.float64)
    for index, base in enumerate(bases):
        values = reference.sorted_similarities(pair[0].double(), pair[1].double(), base, weight.shape[-1]).cumsum(-1)
        terms = (upstream.double().unsqueeze(-1) * values).abs().sum((-3, -2))
        magnitudes[..., index, :] = terms.sum_to_size(magnitudes[..., index, :].shape)
    return magnitudes


def scores_and_gradients(draw: Draw) -> None:
    """``adaptive_similarity`` of random blocks, and its gradients, against the float64 reference."""
    bases, dtype = draw.choose.choice(BASES), draw.choose.choice(DTYPES)
    heads = draw.choose.choice((None, None, 1, 3))
    d = draw.choose.choice((1, 2, 7, 16, 31, 64, 65, 100, draw.integer(1, 300)))
    batch = () if heads is None and draw.integer(0, 1) else (draw.integer(1, 3), heads or draw.integer(1, 3))
    pair = [draw.normal(*batch, draw.integer(1, 40), d, dtype=dtype) for _ in range(2)]
    wide, n = torch.float64 if dtype == torch.float64 else torch.float32, draw.blocks(d)
    weight = torch.randn(*([heads] if heads else []), len(bases), n, generator=draw.generator).to(wide)
    inputs = [tensor.detach().requires_grad_() for tensor in (*pair, weight)]
    scores = ah.adaptive_similarity(*inputs, bases=bases, blocks=n)
    upstream = torch.randn(scores.shape, generator=draw.generator).to(scores.dtype)
    upstream = upstream.masked_fill(near_ties(*pair, bases, n), 0)
    ours = (scores, *torch.autograd.grad(scores, inputs, upstream))
    results = []
    for precision in (torch.float64, wide):
        given = [tensor.detach().to(precision).requires_grad_() for tensor in inputs]
        score = reference.adaptive_similarity(*given, bases)
        results.append((score, *torch.autograd.grad(score, given, upstream.to(precision))))
    magnitudes = weight_gradient_magnitudes(upstream, pair, weight, bases)
    for name, result, exact, plain in zip(("scores", "query", "key", "weight"), ours, *results, strict=True):
        scale, rounding = (magnitudes, 3e-7) if name == "weight" else (None, 1e-5)
        errors = (relative_error(value.to(result.dtype), exact, scale) for value in (result, plain))
        check(*errors, f"{name} {bases} {dtype} blocks {n} of {d}", rounding)


def attention(draw: Draw) -> None:
    """``AdaptiveAttention`` at initialization against ``nn.MultiheadAttention``, with a mask of one kind."""
    heads, d, n, length = draw.integer(1, 4), draw.integer(1, 16), draw.integer(1, 3), draw.integer(1, 20)
    options = {"bias": bool(draw.integer(0, 1)), "add_zero_attn": bool(draw.integer(0, 1)), "batch_first": True}
    adaptive = ah.AdaptiveAttention(heads * d, heads, **options, blocks=draw.blocks(d)).eval()
    plain = nn.MultiheadAttention(heads * d, heads, **options).eval()
    x, padding = draw.normal(n, length, heads * d), draw.mask(n, length)
    padding[:, 0] = False  # a fully masked row is NaN in nn.MultiheadAttention
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    masks = {"attn_mask": causal} if draw.integer(0, 1) else {"key_padding_mask": padding}
    agree(draw, adaptive, plain, lambda layer, x: layer(x, x, x, **masks)[0], x, f"attention {heads} x {d} {options}")


def hopfield_layers(draw: Draw) -> None:
    """Each adaptive Hopfield layer at initialization against the plain layer with the same weights."""
    name = draw.choose.choice(("Hopfield", "HopfieldLayer", "HopfieldPooling"))
    heads, d = draw.integer(1, 3), draw.integer(1, 8)
    options = {"num_heads": heads, "update_steps_max": draw.integer(0, 2), "normalize_stored_pattern": True}
    options |= {"input_size": heads * d, "add_zero_association": bool(draw.integer(0, 1))}
    options |= {} if name == "Hopfield" else {"quantity": draw.integer(1, 4)}
    plain = getattr(hopfield, name)(**options).eval()
    adaptive = getattr(ah, f"Adaptive{name}")(**options, blocks=draw.blocks(d)).eval()
    x = draw.normal(draw.integer(1, 3), draw.integer(1, 12), heads * d)
    mask = None if name == "HopfieldLayer" else draw.mask(*x.shape[:2])
    agree(draw, adaptive, plain, lambda layer, x: layer(x, stored_pattern_padding_mask=mask), x, f"{name} {options}")


def agree(
    draw: Draw, adaptive: nn.Module, plain: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor, what: str
) -> None:
    """Raises unless an adaptive layer with the weights of a plain one computes the same for ``x``."""
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw.generator)
    adaptive.load_state_dict(plain.state_dict())
    with torch.no_grad():
        exact = call(copy.deepcopy(plain).double(), x.double())
        check(*(relative_error(call(layer, x), exact) for layer in (adaptive, plain)), what)


def packed_bags(draw: Draw) -> None:
    """Packed bags against the same bags padded, in training mode without dropout, with gradients."""
    heads = draw.integer(1, 3)
    size = heads * draw.integer(1, 8)
    separation = draw.choose.choice(("softmax", "sparsemax", "entmax15"))
    pooling = ah.AdaptiveHopfieldPooling(size, num_heads=heads, quantity=draw.integer(1, 3), separation=separation)
    sizes = [draw.integer(0, 15) for _ in range(draw.integer(1, 6))]
    x = torch.randn(sum(sizes), size, generator=draw.generator, requires_grad=True)
    room = x.new_zeros(max(1, *sizes), size)  # a longest bag, so that padding works for empty ones too
    rows = nn.utils.rnn.pad_sequence([room, *x.split(sizes)], batch_first=True)[1:]
    ignored = torch.arange(rows.shape[1]) >= torch.tensor(sizes)[:, None]
    outputs = pooling.pool_packed(x, sizes), pooling(rows, stored_pattern_padding_mask=ignored)
    gradients = (torch.autograd.grad(output.square().sum(), x, allow_unused=True)[0] for output in outputs)
    zero = torch.zeros_like(x)
    for got, expected in (outputs, (zero if gradient is None else gradient for gradient in gradients)):
        if not torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"packed bags {sizes}, {separation}: differ by {(got - expected).abs().max():.2e}")


def memory_search(draw: Draw) -> None:
    """Scores of a memory, half with unknown values, and hits of a search, against the definition in float64."""
    name, d = draw.choose.choice(("dot", "dis", "l1", "adaptive")), draw.integer(1, 60)
    patterns, query = (draw.normal(draw.integer(1, n), d).contiguous() for n in (400, 9))
    for rows in (patterns, query) if draw.integer(0, 1) else ():
        rows[draw.mask(*rows.shape)] = torch.nan
        rows[:, 0] = rows[:, 0].nan_to_num(0.5)  # a row needs a known value
    memory = ah.AssociativeMemory(patterns, name)
    values = reference.pair_values(query.double(), patterns.double(), "dot" if name == "adaptive" else name)
    exact = values.nansum(-1) * d / (~values.isnan()).sum(-1)
    with torch.no_grad():
        scores, k = memory.scores(query), draw.integer(1, len(patterns))
    check(relative_error(scores, exact), 0.0, f"scores {name} of {d} values")
    hits = memory.search(query, k)
    if not torch.equal(hits[0], scores.sort(-1, descending=True).values[:, :k]):
        raise RuntimeError(f"search of {name} among {tuple(patterns.shape)}: not the largest scores")


def found_in(memory: ah.AssociativeMemory, query: Tensor) -> list[Any]:
    """What a memory with ids and labels finds, each from one call and thus of one state."""
    hits = memory.search(query, 2)
    found = [hits.ids, hits.labels.tolist(), hits[0], memory.classify(query).tolist(), memory.retrieve(query)]
    return [*found, hits.confidence]


def saved_and_loaded(memory: ah.AssociativeMemory, query: Tensor) -> list[Any]:
    """What is found in a copy of the memory that was saved in a file and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        memory.save(f"{folder}/memory.safetensors")
        with safe_open(f"{folder}/memory.safetensors", "pt") as file:
            READ.append(len(file.keys()))
        return found_in(ah.AssociativeMemory.load(f"{folder}/memory.safetensors"), query)


class Replay:
    """A memory with ids, queries, changes, and what is found before and after each of them in a serial replay.

    Patterns are added, replaced and removed; a memory with labels is also fitted twice, and loads a state dict.
    """

    def __init__(self, draw: Draw, shape: tuple[int, ...], find: Callable[..., list[Any]], labeled: bool) -> None:
        count = draw.integer(8, 30)
        rows = torch.rand(count + 9, *shape, generator=draw.generator)
        if draw.integer(0, 1):
            rows[draw.mask(*rows.shape) & draw.mask(*rows.shape)] = torch.nan
            rows[:, 0] = rows[:, 0].nan_to_num(0.5)
        labels = range(count) if labeled else None
        self.memory, self.labeled = ah.AssociativeMemory(rows[:count], labels=labels, ids=range(count)), labeled
        self.query = rows[draw.integer(0, 3) : count : 5] + 0.01
        self.changes: list[tuple[Tensor | None, int]] = []  # a new pattern, one in the place of another, and a removal
        for row, kind in zip(rows[count:], 3 * ("add", "replace", "remove"), strict=True):
            stored = draw.integer(0, count - 1) if kind == "replace" else 1000 + len(self.changes) // 3
            self.changes.append((None if kind == "remove" else row[None], stored))
        if labeled:
            self.changes[3:3], self.changes[7:7] = [(None, FIT)], [(None, RELOAD), (None, FIT)]
        other = torch.rand(count, *shape, generator=draw.generator)
        self.other = ah.AssociativeMemory(other, labels=labels, ids=range(count)).state_dict()
        replayed = copy.deepcopy(self.memory)
        self.states = [find(replayed, self.query)]
        for change in self.changes:
            self.change(replayed, *change)
            self.states.append(find(replayed, self.query))
        self.done = 0  # changes so far

    def change(self, memory: ah.AssociativeMemory, pattern: Tensor | None, stored: int) -> None:
        """Makes one of the changes."""
        if stored == FIT:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # sums of several threads are rounded differently
            memory.fit((torch.arange(8), memory.patterns[:8] + 0.05), "pattern", progress=False)
            torch.set_num_threads(threads)
        elif stored == RELOAD:
            memory.load_state_dict(self.other)
        elif pattern is None:
            memory.remove(ids=[stored])
        else:
            labels = [stored + 2000] if self.labeled else None
            memory.add(pattern, labels=labels, ids=[stored], replace=stored < 1000)

    def run(self, change: Callable[[Tensor | None, int], None], *finds: Callable[[], list[Any]]) -> None:
        """Makes all changes while other threads find what must be a state that the memory had during the call."""

        def read(find: Callable[[], list[Any]]) -> None:
            while self.done < len(self.changes):
                before = self.done
                found = find()
                possible = self.states[before : self.done + 2]  # a change is counted after it was made
                for part, result in enumerate(found):
                    if not any(_equal(result, state[part]) for state in possible):
                        raise RuntimeError(f"part {part}, {tuple(self.query.shape)}: not a state of the memory")

        def write() -> None:
            try:
                for each in self.changes:
                    change(*each)
                    self.done += 1
                    time.sleep(0.002)
            finally:  # also ends the readers
                self.done = len(self.changes)

        with ThreadPoolExecutor(len(finds) + 1) as pool:
            for running in [pool.submit(write), *(pool.submit(read, find) for find in finds)]:
                running.result()
        if not all(map(_equal, finds[0](), self.states[-1])):
            raise RuntimeError(f"memory of {tuple(self.query.shape)}: not the last state of the serial replay")


def readers_and_a_writer(draw: Draw) -> None:
    """Threads search, save and load while another one changes, fits and reloads, against a serial replay."""
    replay = Replay(draw, (12,) if draw.integer(0, 3) else (6, 6), found_in, labeled=True)
    memory, query = replay.memory, replay.query
    finds = [lambda: found_in(memory, query)] * 3
    replay.run(lambda *each: replay.change(memory, *each), *finds, lambda: saved_and_loaded(memory, query))


def explained_in(memory: ah.AssociativeMemory, query: Tensor) -> list[Any]:
    """What the routes search and explain of the service return."""
    hits = memory.search(query, 2)
    values = memory.explain(query.repeat_interleave(2, 0), hits.indices.flatten()).unflatten(0, (-1, 2))
    return [hits.ids, hits.scores, hits.ids, values]


def http_clients(draw: Draw) -> None:
    """Clients of one service search and explain while one adds and removes, and another sends what must be refused."""
    replay = Replay(draw, (6,), explained_in, labeled=False)
    rows = [[None if value != value else value for value in row] for row in replay.query.tolist()]
    with SERVING:  # one round at a time
        if not SERVED:
            memory = ah.AssociativeMemory(torch.rand(9, 6), ids=range(9))
            served = service(memory)  # until the process ends
            SERVED.extend((memory, served.__enter__()[0], served))
        memory, send, _ = SERVED
        memory.load_state_dict(replay.memory.state_dict())

        def valid(route: str, **body: Any) -> Any:
            status, found = send(route, **body)
            if status != 200:
                raise RuntimeError(f"/{route} of a valid request: {status} {found}")
            return found

        def find() -> list[Any]:
            found = []
            for route, name in (("search", "score"), ("explain", "values")):
                hits = valid(route, rows=rows, k=2)
                found.append([[hit["id"] for hit in each] for each in hits])
                found.append(torch.tensor([[hit[name] for hit in each] for each in hits]))
            return found

        def misbehave() -> list[Any]:
            for route, body, expected, _ in REFUSED:
                status, answer = send(route, body) if isinstance(body, bytes) else send(route, **body)
                if status != expected:
                    raise RuntimeError(f"/{route} of an invalid request: {status} {answer}, not {expected}")
            return []

        def change(pattern: Tensor | None, stored: int) -> None:
            if pattern is None:
                valid("remove", ids=[stored])
            else:
                values = [None if value != value else value for value in pattern[0].tolist()]
                valid("add", rows=[values], ids=[stored])

        replay.run(change, find, find, find, misbehave)


def _equal(result: Any, expected: Any) -> bool:
    """Whether results agree: the sum of a matrix product may be rounded differently, and an unknown value is NaN."""
    if not (isinstance(result, Tensor) and isinstance(expected, Tensor)):
        return result is expected or (type(result) is type(expected) and bool(result == expected))
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


CHECKS = (
    scores_and_gradients, attention, hopfield_layers, packed_bags, memory_search, readers_and_a_writer,
    http_clients,
)  # fmt: skip


def in_threads(function: Callable[[Draw], None], seed: int) -> None:
    """The check in four threads at once, each with its own inputs."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: function(Draw(seed + number)), range(4)))


def in_fork(function: Callable[[Draw], None], seed: int) -> None:
    """The native kernel in a forked process, bit by bit as in this one, after the check in this process.

    The child computes scores only: PyTorch's own matrix products and autograd do not support a fork after threads.
    """
    function(draw := Draw(seed))
    inputs = draw.normal(2, 40, 64), draw.normal(2, 50, 64), torch.randn(2, 64, generator=draw.generator)
    expected = ah.adaptive_similarity(*inputs)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ah.adaptive_similarity(*inputs), expected) else 1)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"forked process ended with status {status}")


class Allocated(ctypes.Structure):
    """The struct mallinfo2 of malloc.h; ``uordblks`` are the bytes in use, ``hblkhd`` those of mapped blocks."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> int:
    """Bytes that malloc has given out."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    found: Allocated = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def kept_by_safetensors() -> float:
    """Bytes that safetensors, without this package, keeps for each tensor that it reads."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({str(number): torch.ones(3) for number in range(15)}, f"{folder}/tensors.safetensors")

        def read(times: int) -> None:
            for _ in range(times):
                with safe_open(f"{folder}/tensors.safetensors", "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no mapping
                        file.get_tensor(name)

        read(100)
        before = in_use()
        read(1000)
        return (in_use() - before) / 15_000


def main() -> int:
    """Runs rounds until the time is over, and prints a summary."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    args = parser.parse_args()
    if os.environ.get("PYTHONMALLOC") != "malloc":
        parser.error("expected PYTHONMALLOC=malloc in the environment")
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # mallinfo2 sees the first arena alone
    torch.set_num_threads(2)
    begin, seed = time.monotonic(), 1000 * args.seed
    for function in CHECKS:  # what is imported by the first calls is no growth
        in_threads(function, seed)
    print(f"{time.monotonic() - begin:.0f} s of first calls", flush=True)
    begin = time.monotonic()
    done: Counter[str] = Counter()
    memory: list[tuple[int, int]] = []  # in use, and tensors read, at 120 equal intervals, of at least a second
    while (passed := time.monotonic() - begin) < 60 * args.minutes:
        choose = random.Random(seed)
        function, how = choose.choice(CHECKS), choose.choice((None,) * 8 + (in_threads, in_fork))
        try:
            how(function, seed) if how else function(Draw(seed))
        except Exception as error:
            print(f"FAILED: {function.__name__} {how and how.__name__} seed {seed}: {type(error).__name__}: {error}")
            return 1
        done[function.__name__] += 1
        seed += 10
        if passed >= len(memory) * max(1.0, args.minutes / 2):
            memory.append((in_use(), sum(READ)))
            if len(memory) % 10 == 0:
                used = memory[-1][0] / 2**20
                print(f"{passed / 60:6.1f} min, {done.total()} rounds, {used:.1f} MiB", flush=True)
    quarter = len(memory) // 4
    print(f"{done.total()} rounds in {args.minutes:g} minutes: {dict(done)}")
    kept = kept_by_safetensors()
    print(f"{kept:.0f} bytes for each of {sum(READ)} tensors read are kept by safetensors, and deducted")
    own = [used - kept * read for used, read in memory]
    parts = [median(own[number * quarter : (number + 1) * quarter]) for number in (1, 2, 3) if quarter]
    growth = min((after / before - 1 for before, after in pairwise(parts)), default=0.0)
    print("memory in use in quarters 2 to 4:", ", ".join(f"{part / 2**20:.1f} MiB" for part in parts))
    if growth > MEMORY_GROWTH:
        print(f"FAILED: memory in use grew by {growth:.2%} and more from each quarter to the next one")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
