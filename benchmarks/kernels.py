"""Time and memory of the kernels, compared with the reference, on one device.

To run: python -m benchmarks.kernels [--device cpu|cuda] [--threads N] [--only TEXT] [--output FILE] [--sweep]

All methods of a case run in one process, one after the other. A time is the median of several calls, and ratios compare
times of the same process. ``paper`` is the reference as the paper writes it (sort, cumulative sum, product), ``folded``
is the reference with folded weights (sort, product), and ``compiled`` is torch.compile of ``folded``. ``limit`` is a
lower bound on the forward time: the time of the min and max instructions of the sorting networks, two per comparator,
at 64 per clock and multiprocessor. Block footprints (``n 8``) are also compared with our full footprints of the same
size, and weights that say "dot product" with one block, the dot product itself. On a GPU ``ours_ms`` is device time;
``caller_ms`` includes the time of the host and a synchronization, as a caller's clock shows it.

Memory is the peak in addition to inputs, scores and gradients: of PyTorch's allocator on a GPU, and of the resident set
of a separate process on a CPU (Linux only). ``--only`` keeps the other rows of the device.

``--sweep`` looks for values of d for which the reference is faster, on small problems of about a thousand pairs. Calls
of both methods alternate, and their minimum times are compared. Each shape and pass has one row with its worst d.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ahop_layers as ah
from ahop_layers.hopfield import Hopfield
from ahop_layers.ops import reference
from ahop_layers.ops.attend import attend
from ahop_layers.ops.gpu.layout import comparators
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import CLEAR, in_own_process, least_seconds, peak, reset_peak
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.projects.project import NO_NORMS, STATIC

BASES = ("dis", "dot")
BASELINES = ("paper", "folded", "compiled", "our float32", "our full", "one block", "plain layer", "fused dot product")
ATTENTIONS = {  # N, H, L, d
    f"attention, {' x '.join(map(str, shape))}, 4 blocks, bfloat16": shape
    for shape in ((256, 6, 197, 64), (8, 12, 1024, 64), (2, 3, 50, 64))
}
Method = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A problem size to measure, and the expected speedups.

    Attributes:
        length: number of queries.
        count: number of keys.
        d: dimensions.
        heads: number of heads.
        n: batch size.
        dtype: dtype of all tensors.
        floors: minimum speedup over each method, forward and forward + backward.
        memory: minimum ratio of the memory of ``folded`` to ours.
        compiled: whether to measure torch.compile.
        blocks: number of blocks; by default every dimension is one.
        dot_product: whether the weights make a dot product and need no gradient (forward only).
        plain: whether to measure plain PyTorch.
    """

    length: int
    count: int
    d: int
    heads: int = 1
    n: int = 1
    dtype: torch.dtype = torch.float32
    floors: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory: float = 0
    compiled: bool = False
    blocks: int | None = None
    dot_product: bool = False
    plain: bool = True

    @property
    def name(self) -> str:
        """The sizes, in the order of the tensor shapes."""
        heads = f"{self.n * self.heads} x " if self.n * self.heads > 1 else ""
        blocks = f", n {self.blocks}" if self.blocks else ""
        weights = ", dot-product weights" if self.dot_product else ""
        return f"{heads}{self.length} x {self.count}, d {self.d}{blocks}{weights}, {_dtype_name(self.dtype)}"

    @property
    def baselines(self) -> dict[str, str]:
        """Names of the cases of ours to compare with."""
        changes: dict[str, dict[str, object]] = {"our float32": {"dtype": torch.float32}, "our full": {"blocks": None}}
        if self.dot_product:
            changes = {"one block": {"blocks": 1}}
        names = {name: replace(self, **change).name for name, change in changes.items()}  # type: ignore[arg-type]
        return {name: other for name, other in names.items() if other != self.name}

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        """Returns query, key and weight."""
        generator = torch.Generator().manual_seed(0)
        batch, n = (self.n, self.heads), self.blocks or self.d
        shapes = ((*batch, self.length, self.d), (*batch, self.count, self.d), (len(BASES), n))
        query, key, weight = (torch.randn(shape, generator=generator) for shape in shapes)
        weight /= n
        if self.dot_product:
            weight = torch.zeros(len(BASES), n)
            weight[BASES.index("dot"), -1] = 1
        return tuple(each.to(device, self.dtype).requires_grad_() for each in (query, key, weight))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


HALVES = (torch.bfloat16, torch.float16)
CPU_CASES = [
    Case(256, 2048, 64, floors={"paper": (12, 10)}),
    *(Case(256, 2048, 64, blocks=n, floors={"our full": (6, 4)} if n == 8 else {}) for n in (1, 4, 8, 16, 32)),
    Case(64, 2048, 1024, floors={"paper": (6, 5)}),
    Case(64, 2048, 1024, blocks=64, floors={"our full": (15, 10)}),
    Case(65, 65, 64, heads=64, floors={"paper": (10, 8)}),
    Case(64, 2048, 784, floors={"paper": (6, 5)}),
    Case(1, 10_000, 32, floors={"paper": (6, 5)}),
    Case(1, 1000, 1, floors={"paper": (1, 1)}),
    *(Case(32, 32, d, floors={"paper": (1, 1)}) for d in (2, 8, 16, 33, 100, 128, 257, 512, 1000, 1024)),
    Case(1, 1, 64, n=1000, floors={"paper": (1, 1)}),
    Case(256, 512, 64, dtype=torch.float64, floors={"paper": (1, 1)}),
    Case(256, 512, 64, dtype=torch.bfloat16, floors={"paper": (1, 1)}),
    *(Case(256, 2048, 64, blocks=n, dot_product=True) for n in (1, None)),
]
GPU_CASES = [
    Case(2048, 2048, 64, floors={"paper": (140, 38), "folded": (0, 15)}, memory=40, compiled=True),
    Case(2048, 2048, 64, dtype=torch.bfloat16, floors={"our float32": (1.5, 1.3)}),
    Case(2048, 2048, 64, dtype=torch.float16, floors={"our float32": (1.5, 1.3)}),
    *(Case(2048, 2048, 64, blocks=n, floors={"our full": (4, 4)} if n == 8 else {}) for n in (4, 8, 16, 32)),
    Case(65, 65, 64, heads=3, n=256, floors={"folded": (40, 12)}, memory=20),
    Case(197, 197, 64, heads=12, n=32, floors={"folded": (60, 12)}, memory=20),
    Case(197, 197, 64, heads=12, n=32, dtype=torch.bfloat16),
    *(
        Case(197, 197, 64, heads=12, n=32, dtype=torch.bfloat16, blocks=n, floors=floors)
        for n, floors in ((1, {}), (4, {"our full": (3, 3)}), (8, {"our full": (3, 3)}), (16, {}))
    ),
    Case(2048, 2048, 128, floors={"folded": (20, 6)}, memory=40),
    Case(512, 2048, 784, floors={"folded": (3, 2)}, memory=40),
    *(Case(512, 2048, 784, dtype=dtype, plain=False) for dtype in HALVES),
    Case(512, 2048, 1024),
    Case(512, 2048, 1024, blocks=64, floors={"our full": (15, 10)}),
    Case(1, 100_000, 64, heads=8, floors={"folded": (30, 8)}, memory=20),
    Case(256, 256, 16),
    Case(256, 256, 1024),
    Case(50, 33, 80, n=2, blocks=5),
    *(
        Case(
            1024,
            2048,
            d,
            dtype=dtype,
            plain=False,
            floors={} if dtype == torch.float32 else {"our float32": (0.95, 0.95)},
        )
        for d in (1, 7, 16, 48, 64, 100, 128, 257, 784, 1024)
        for dtype in (torch.float32, *HALVES)
    ),
    Case(2048, 2048, 64, blocks=1, dot_product=True),
    Case(2048, 2048, 64, dot_product=True, floors={"one block": (1 / 1.3, 0)}),
    Case(2048, 2048, 64, blocks=1, dot_product=True, dtype=torch.bfloat16),
    Case(2048, 2048, 64, dot_product=True, dtype=torch.bfloat16),
]
SWEEP_SHAPES = {  # (n, length, count), about a thousand pairs each
    "queries of one key": (1, 1000, 1),
    "keys of one query": (1, 1, 1000),
    "single pairs": (1000, 1, 1),
    "32 x 32": (1, 32, 32),
    "10 x 100": (1, 10, 100),
}
SWEEP_DIMENSIONS = (*range(1, 129), *range(136, 257, 8), *range(272, 513, 16), *range(544, 1025, 32), 1023)
CASES = {"cpu": CPU_CASES, "cuda": GPU_CASES}


def methods(compiled: bool = False, plain: bool = True) -> dict[str, Method]:
    """Returns the methods to compare, by name."""
    ours: dict[str, Method] = {"ours": partial(ah.adaptive_similarity, bases=BASES)}
    if not plain:
        return ours

    def folded(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        return reference.folded_similarity(query, key, reference.fold(weight), BASES)

    table: dict[str, Method] = {"paper": partial(reference.adaptive_similarity, bases=BASES), "folded": folded}
    if compiled:
        table["compiled"] = torch.compile(folded)
    return table | ours


def call(method: Method, inputs: tuple[Tensor, ...], grad: Tensor, backward: bool) -> tuple[Tensor, ...]:
    """Computes the scores and, with ``backward``, the gradients."""
    with torch.set_grad_enabled(backward):
        scores = method(*inputs)
    return (scores, *torch.autograd.grad(scores, inputs, grad)) if backward else (scores,)


def milliseconds(function: Callable[[], object], device: str, caller: bool = False) -> float:
    """Returns the median time of several calls after a warm-up: of a GPU itself, or on the clock of the caller."""

    def once() -> float:
        if device == "cuda" and not caller:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)  # about 2 ms, so that the host runs ahead and only device time is measured
            start.record()
            function()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        return 1e3 * least_seconds(function, device, 1)

    function()
    first = once()
    return statistics.median([first, *(once() for _ in range(max(1, min(100, int(300 / first)))))])


def extra_megabytes(case: Case, device: str, name: str, threads: int) -> float | None:
    """Returns the peak memory of forward and backward in addition to inputs and results; None without /proc."""
    if device == "cuda":
        return _extra_megabytes(case, device, name, threads)
    return in_own_process(_extra_megabytes, case, device, name, threads) if CLEAR.exists() else None


def _extra_megabytes(case: Case, device: str, name: str, threads: int) -> float:
    torch.set_num_threads(threads)
    method, inputs = methods()[name], case.inputs(device)
    grad = torch.ones(case.n, case.heads, case.length, case.count, dtype=case.dtype, device=device)
    small = Case(2, 2, 2, dtype=case.dtype).inputs(device)  # loads the kernels
    call(method, small, torch.ones(1, 1, 2, 2, dtype=case.dtype, device=device), True)
    before = reset_peak(device)
    results = call(method, inputs, grad, True)
    return max(0, peak(device) - before - sum(tensor.nbytes for tensor in results)) / 1e6


def limit_milliseconds(case: Case) -> float:
    """Returns a lower bound on the forward time: the time of the min and max instructions on the current GPU."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    clock = 1e6 * float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    pairs = case.n * case.heads * case.length * case.count
    operations = 2 * comparators(case.blocks or case.d) * len(BASES) * pairs
    return 1e3 * operations / (64 * properties.multi_processor_count * clock)


def measure(case: Case, device: str, threads: int, known: dict[tuple[str, bool], float]) -> list[dict[str, object]]:
    """Returns the rows of forward and of forward + backward.

    ``known`` collects our times, the baselines of later cases.
    """
    inputs = case.inputs(device)
    grad = torch.randn(case.n, case.heads, case.length, case.count, device=device).to(case.dtype)
    rows = []
    for backward in (False,) if case.dot_product else (False, True):
        calls = {
            name: partial(call, method, inputs, grad, backward)
            for name, method in methods(case.compiled, case.plain).items()
        }
        times = {name: milliseconds(function, device) for name, function in calls.items()}
        ours = known[case.name, backward] = times["ours"]
        times |= {name: known[other, backward] for name, other in case.baselines.items() if (other, backward) in known}
        ratios = {name: times[name] / ours if name in times else None for name in BASELINES}
        limit = limit_milliseconds(case) if device == "cuda" and not backward else None
        extra = extra_megabytes(case, device, "ours", threads) if backward else None
        saved = None
        if extra and device == "cuda" and case.plain:
            saved = (extra_megabytes(case, device, "folded", threads) or 0) / extra
        missed = [name for name, floor in case.floors.items() if (ratios[name] or 0) < floor[backward]]
        if saved is not None and saved < case.memory:
            missed.append("memory")
        numbers = {
            "ours_ms": ours,
            "caller_ms": milliseconds(calls["ours"], device, caller=True) if device == "cuda" else None,
            **{f"{name}/ours": ratio for name, ratio in ratios.items()},
            "ours/limit": ours / limit if limit and case.dtype == torch.float32 and not case.dot_product else None,
            "compiled/limit": times["compiled"] / limit if limit and "compiled" in times else None,
            "extra_MB": extra,
            "folded/ours_memory": saved,
        }
        rows.append(_row(case.name, backward, numbers, " ".join(missed)))
    return rows


def measure_layer() -> Iterator[dict[str, object]]:
    """Yields the rows of a Hopfield layer without projections, with 16 blocks, compared with the plain layer."""
    size, d, n = 256, 1024, 16
    options: dict[str, Any] = {"input_size": d, **STATIC, **NO_NORMS}
    layers = {"ours": ah.AdaptiveHopfield(**options, blocks=n), "plain layer": Hopfield(**options)}
    patterns = torch.randn(2, 1, size, d, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layers["ours"].association_core.similarity.w.normal_(std=0.1)  # the sort is not skipped

    def train(layer: torch.nn.Module, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            stored, state = patterns.clone().requires_grad_(backward)
            result = layer((stored, state, stored))
        if backward:
            result.sum().backward()

    for backward in (False, True):
        times = least_milliseconds({name: partial(train, layer, backward) for name, layer in layers.items()})
        case = f"Hopfield layer, {size} x {size} static patterns, d {d}, n {n}, float32"
        ratio = times["plain layer"] / times["ours"]
        missed = "plain layer" if backward and ratio < 1 / 4 else ""
        yield _row(case, backward, {"ours_ms": times["ours"], "plain layer/ours": ratio}, missed)


def _row(name: str, backward: bool, numbers: dict[str, float | None], missed: str = "") -> dict[str, object]:
    """Returns the row of a pass, with empty cells where there is no number."""
    columns = ["ours_ms", "caller_ms", *(f"{baseline}/ours" for baseline in BASELINES)]
    columns += ["ours/limit", "compiled/limit", "extra_MB", "folded/ours_memory"]
    shown = {column: "" if (number := numbers.get(column)) is None else f"{number:.3g}" for column in columns}
    label = "forward + backward" if backward else "forward"
    return {"case": name, "pass": label, **shown, "below_floor": missed}


def measure_attention(names: list[str]) -> Iterator[dict[str, object]]:
    """Yields rows of fused attention with 4 blocks in half precision, compared with the fused dot product."""
    for name, shape in ((name, ATTENTIONS[name]) for name in names):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for _ in range(4)]
        query, key, value, grad = (tensor.requires_grad_(index < 3) for index, tensor in enumerate(tensors))
        weight = torch.randn(shape[1], 2, 4, generator=generator).cuda().div_(32).requires_grad_()
        beta = torch.ones(shape[1], 2, device="cuda", requires_grad=True)

        def ours(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor) -> Tensor:
            readout = attend(query, key, value, weights[0], BASES, beta=weights[1])
            assert readout is not None
            return readout

        for backward in (False, True):
            inputs = query, key, value, weight, beta
            step = partial(call, ours, inputs, grad, backward)
            dot = partial(call, functional.scaled_dot_product_attention, inputs[:3], grad, backward)
            times = {method: milliseconds(each, "cuda") for method, each in (("ours", step), ("dot", dot))}
            numbers = {"ours_ms": times["ours"], "caller_ms": milliseconds(step, "cuda", caller=True)}
            numbers["fused dot product/ours"] = times["dot"] / times["ours"]
            yield _row(name, backward, numbers)


def least_milliseconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the minimum time of each function. Alternating calls spread disturbances over all functions."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    start = time.perf_counter()
    while time.perf_counter() - start < 0.05 or len(times["ours"]) < 5:
        for name, function in functions.items():
            times[name].append(1e3 * least_seconds(function, "cpu", 1))
    return {name: min(each) for name, each in times.items()}


def sweep(device: str, dimensions: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Yields a row for each shape and pass, with the d of the smallest speedup."""
    table = {name: method for name, method in methods().items() if name in ("paper", "ours")}
    for name, (n, length, count) in SWEEP_SHAPES.items():
        worst: dict[bool, tuple[float, int]] = {}
        slower: dict[bool, list[int]] = {False: [], True: []}
        for d in dimensions:
            case = Case(length, count, d, n=n)
            inputs, grad = case.inputs(device), torch.randn(n, 1, length, count, device=device)
            for backward in (False, True):
                times = least_milliseconds(
                    {each: partial(call, f, inputs, grad, backward) for each, f in table.items()}
                )
                ratio = times["paper"] / times["ours"]
                worst[backward] = min(worst.get(backward, (ratio, d)), (ratio, d))
                if ratio < 1:
                    slower[backward].append(d)
        for backward, (ratio, d) in worst.items():
            yield {
                "case": f"{name}, {len(dimensions)} d in {dimensions[0]}..{max(dimensions)}, worst d {d}",
                "pass": "forward + backward" if backward else "forward",
                "paper/ours": f"{ratio:.3g}",
                "below_floor": " ".join(f"d{d}" for d in slower[backward]),
            }


def measure_all(cases: list[Case], attentions: list[str], device: str, threads: int) -> Iterator[dict[str, object]]:
    """Yields the rows of these cases and attentions, and of a layer on a CPU unless only some cases are measured."""
    known: dict[tuple[str, bool], float] = {}
    for case in cases:
        yield from measure(case, device, threads, known)
    if device == "cpu" and cases == CPU_CASES:
        yield from measure_layer()
    yield from measure_attention(attentions)


def first_call_seconds() -> float:
    """Measures forward and backward with d = 64 in a new process with an empty compilation cache."""
    code = (
        "import time, torch, ahop_layers as ah\n"
        "x = torch.randn(8, 64, device='cuda', requires_grad=True); w = torch.randn(2, 64, device='cuda')\n"
        "start = time.perf_counter(); ah.adaptive_similarity(x, x, w).sum().backward(); torch.cuda.synchronize()\n"
        "print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "AHOP_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    """Measures, prints a table, and stores it."""
    parser = make_parser("kernels", __doc__)
    parser.add_argument("--device", choices=CASES, default="cpu", help="device to measure (default: %(default)s)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help="threads of the CPU (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this text")
    parser.add_argument("--output", type=Path, help="CSV file (default: benchmarks/results/kernels.csv or sweep.csv)")
    parser.add_argument("--sweep", action="store_true", help="measure small problems with many d instead of the cases")
    options = parser.parse_args()
    cases = [case for case in CASES[options.device] if options.only in case.name]
    attentions = [name for name in ATTENTIONS if options.device == "cuda" and options.only in name]
    if options.sweep and options.only:
        parser.error("--only selects cases, and --sweep has none: expected one of them, got both")
    if not cases and not attentions:
        known = ATTENTIONS if options.device == "cuda" else ()
        names = "; ".join([*(case.name for case in CASES[options.device]), *known])
        parser.error(f"--only: expected a part of one of these names: {names}; got {options.only!r}")
    torch.set_num_threads(options.threads)
    output = options.output or RESULTS / ("sweep.csv" if options.sweep else "kernels.csv")
    results = ResultTable(output, options.device)
    print(f"{results.origin['device']}, torch {results.origin['torch']}")
    rows: list[dict[str, object]] = []
    measured = measure_all(cases, attentions, options.device, options.threads)
    for row in sweep(options.device, SWEEP_DIMENSIONS) if options.sweep else measured:
        widths = [58 if options.sweep else 38, 18, *(max(9, len(name)) for name in list(row)[2:])]
        if not rows:
            print("  ".join(f"{name:>{width}}" for name, width in zip(row, widths, strict=True)))
        print("  ".join(f"{text!s:>{width}}" for text, width in zip(row.values(), widths, strict=True)), flush=True)
        rows.append(row)
    if options.device == "cuda" and not options.sweep:
        print(f"first call, d = 64, forward and backward compiled: {first_call_seconds():.1f} s")
    # A complete measurement replaces all rows of the device, including cases that no longer exist.
    results.replace(rows, *(("case", "pass") if options.only else ()))


if __name__ == "__main__":
    main()
