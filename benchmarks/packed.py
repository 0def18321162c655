"""Packed and padded pooling of 1,000 bags with 1 to 2,000 instances: time and peak memory.

To run: python -m benchmarks.packed [--device cuda]

Both methods start from the concatenated instances of all bags, so the padded call includes the padding. They end with
the pooled bags or with all gradients. Bag sizes are drawn log-uniformly (a few large bags, many small ones), and
uniformly, where padding about doubles the number of instances. Every measurement runs in its own process.
Its memory is the peak in addition to the instances, the model and the results: pooled bags, gradient of the instances.

Rows are stored when all are measured. They replace the rows of this device with the same sizes.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import in_own_process, peak, reset_peak
from benchmarks.harness.report import bold_best, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

SIZE = {"bags": 1000, "longest": 2000, "width": 64, "heads": 4}
"""The sizes in the documentation."""
HELP = {"bags": "number of bags", "longest": "largest bag", "width": "width of an instance", "heads": "number of heads"}


def draw_sizes(kind: str, bags: int, longest: int) -> list[int]:
    """Draws bag sizes from 1 to ``longest`` with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(bags, generator=generator)
    sizes = longest**share if kind == "log-uniform" else share * longest
    return sizes.ceil().long().clamp(1, longest).tolist()


def pad_and_pool(pooling: AdaptiveHopfieldPooling, instances: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Pads the bags and pools them: the baseline."""
    padded = pad_sequence(list(instances.split(sizes)), batch_first=True)
    lengths = torch.tensor(sizes, device=instances.device)
    mask = torch.arange(padded.shape[1], device=instances.device) >= lengths[:, None]
    return pooling(padded, stored_pattern_padding_mask=mask)


def measure(options: argparse.Namespace, kind: str, way: str, backward: bool) -> tuple[float, int]:
    """Returns the median seconds and the peak bytes of one method."""
    torch.manual_seed(0)
    sizes = draw_sizes(kind, options.bags, options.longest)
    pooling = AdaptiveHopfieldPooling(options.width, num_heads=options.heads, blocks=None).to(options.device)
    instances = torch.randn(sum(sizes), options.width, device=options.device, requires_grad=backward)
    pool = pooling.pool_packed if way == "packed" else lambda x, s: pad_and_pool(pooling, x, s)

    def run(x: torch.Tensor, s: list[int]) -> int:
        """Pools once and returns the bytes of the results."""
        with torch.set_grad_enabled(backward):
            output = pool(x, s)
            if backward:
                output.sum().backward()
        x.grad = None
        return output.nbytes + backward * x.nbytes

    run(instances[:8].detach().requires_grad_(backward), [3, 5])  # loads the kernels
    before, times, most = reset_peak(options.device), [], 1
    for _ in range(options.repeats):
        start = time.perf_counter()
        results = run(instances, sizes)
        most = max(most, peak(options.device) - before - results)  # synchronizes
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], most


def report(rows: Sequence[Row]) -> str:
    """Time and memory of both methods, the better one bold, and their ratios."""
    body = []
    for row in rows:
        seconds = bold_best([f"{float(row[f'{way}_s']):.2f}" for way in ("padded", "packed")], min)
        memory = bold_best([f"{int(row[f'{way}_bytes']) / 2**20:,.0f}" for way in ("padded", "packed")], min)
        body.append([row["sizes"], row["pass"], *seconds, row["faster"], *memory, row["less_memory"]])
    header = ["bag sizes", "pass", "padded, s", "packed, s", "speedup", "padded, MB", "packed, MB", "memory ratio"]
    return table(header, body)


def main() -> None:
    """Measures, prints, and stores the figures."""
    parser = make_parser("packed", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    for name, size in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{HELP[name]} (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each measurement (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "packed.csv", help="default: results/packed.csv")
    options = parser.parse_args()

    results = ResultTable(options.output, options.device)
    rows: list[dict[str, object]] = []
    shape = f"{options.bags} bags of 1 to {options.longest}, width {options.width}, {options.heads} heads"
    print(f"{shape}; {results.origin['device']}; torch {torch.__version__}")
    print(f"{'sizes':12} {'pass':17} {'padded':>18} {'packed':>18} {'speedup':>8} {'memory ratio':>13}")
    for kind in ("log-uniform", "uniform"):
        for backward in (False, True):
            padded, packed = (in_own_process(measure, options, kind, way, backward) for way in ("padded", "packed"))
            label = "forward+backward" if backward else "forward"
            faster, less = padded[0] / packed[0], padded[1] / packed[1]
            shown = [f"{seconds:7.2f} s {memory / 2**20:5.0f} MB" for seconds, memory in (padded, packed)]
            print(f"{kind:12} {label:17} {shown[0]:>18} {shown[1]:>18} {faster:7.1f}x {less:12.1f}x", flush=True)
            rows.append({
                **{name: getattr(options, name) for name in SIZE}, "sizes": kind, "pass": label,
                "padded_s": f"{padded[0]:.4f}", "packed_s": f"{packed[0]:.4f}", "padded_bytes": padded[1],
                "packed_bytes": packed[1], "faster": f"{faster:.2f}", "less_memory": f"{less:.2f}",
            })  # fmt: skip
    results.replace(rows, *SIZE)


if __name__ == "__main__":
    main()
