"""Packed against padded pooling of 1,000 bags of 1 to 2,000 instances: time and peak memory.

To run: ``python -m benchmarks.packed`` (``--device cuda`` where there is one). Prints a table; when all is
measured, its rows take the place of this machine's earlier ones of the same size in ``benchmarks/results/packed.csv``.

Both start from the instances of all bags laid end to end and end with the pooled bags, or with all gradients. The
padded call therefore includes the padding. Bag sizes are drawn log-uniformly, as sizes of bags tend to be (a few large,
many small), and uniformly, where padding can waste no more than half. Every measurement has a process of its own; its
memory is the peak beyond the instances, the model and the results (pooled bags, gradient of the instances).
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from benchmarks.harness.memory import in_own_process, peak, reset_peak
from benchmarks.harness.report import Row, table
from benchmarks.harness.rows import RESULTS, origin, read, replaced, write

SIZE = {"bags": 1000, "longest": 2000, "width": 64, "heads": 4}
"""The measurement of the documentation; other sizes are trials."""


def draw_sizes(kind: str, bags: int, longest: int) -> list[int]:
    """Sizes of bags from 1 to ``longest``, always the same."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(bags, generator=generator)
    sizes = longest**share if kind == "log-uniform" else share * longest
    return sizes.ceil().long().clamp(1, longest).tolist()


def pad_and_pool(pooling: AdaptiveHopfieldPooling, instances: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What one does without ``pool_packed``."""
    padded = pad_sequence(list(instances.split(sizes)), batch_first=True)
    lengths = torch.tensor(sizes, device=instances.device)
    mask = torch.arange(padded.shape[1], device=instances.device) >= lengths[:, None]
    return pooling(padded, stored_pattern_padding_mask=mask)


def measure(args: argparse.Namespace, kind: str, way: str, backward: bool) -> tuple[float, int]:
    """Median seconds and peak bytes of one way, in this process."""
    torch.manual_seed(0)
    sizes = draw_sizes(kind, args.bags, args.longest)
    pooling = AdaptiveHopfieldPooling(args.width, num_heads=args.heads).to(args.device)
    instances = torch.randn(sum(sizes), args.width, device=args.device, requires_grad=backward)
    pool = pooling.pool_packed if way == "packed" else lambda x, s: pad_and_pool(pooling, x, s)

    def run(x: torch.Tensor, s: list[int]) -> int:
        """Run once and return the bytes of the results."""
        with torch.set_grad_enabled(backward):
            output = pool(x, s)
            if backward:
                output.sum().backward()
        x.grad = None
        return output.nbytes + backward * x.nbytes

    run(instances[:8].detach().requires_grad_(backward), [3, 5])  # load every kernel before the memory is read
    before, times, most = reset_peak(args.device), [], 1
    for _ in range(args.repeats):
        start = time.perf_counter()
        results = run(instances, sizes)
        times.append(time.perf_counter() - start)
        most = max(most, peak(args.device) - before - results)
    return sorted(times)[len(times) // 2], most


def report(rows: Sequence[Row]) -> str:
    """Both ways, and how many times the packed one is faster and smaller."""
    body = []
    for row in rows:
        ways = [
            cell
            for way in ("padded", "packed")
            for cell in (f"{float(row[f'{way}_s']):.2f}", f"{int(row[f'{way}_bytes']) / 2**20:,.0f}")
        ]
        body.append([row["sizes"], row["pass"], *ways, row["faster"], row["less_memory"]])
    header = [
        "bag sizes",
        "pass",
        "padded, s",
        "padded, MB",
        "packed, s",
        "packed, MB",
        "times faster",
        "times smaller",
    ]
    return table(header, body)


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    for name, size in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the rows (benchmarks/results/packed.csv)")
    args = parser.parse_args()

    about = origin(args.device)
    rows: list[dict[str, object]] = []
    shape = f"{args.bags} bags of 1 to {args.longest}, width {args.width}, {args.heads} heads"
    print(f"{shape}; {about['device']}; torch {torch.__version__}")
    print(f"{'sizes':12} {'pass':17} {'padded':>18} {'packed':>18} {'faster':>7} {'less memory':>12}")
    for kind in ("log-uniform", "uniform"):
        for backward in (False, True):
            padded, packed = (in_own_process(measure, args, kind, way, backward) for way in ("padded", "packed"))
            label = "forward+backward" if backward else "forward"
            faster, less = padded[0] / packed[0], padded[1] / packed[1]
            shown = [f"{seconds:7.2f} s {memory / 2**20:5.0f} MB" for seconds, memory in (padded, packed)]
            print(f"{kind:12} {label:17} {shown[0]:>18} {shown[1]:>18} {faster:6.1f}x {less:11.1f}x", flush=True)
            rows.append({
                **{name: getattr(args, name) for name in SIZE}, "sizes": kind, "pass": label,
                "padded_s": f"{padded[0]:.4f}", "packed_s": f"{packed[0]:.4f}", "padded_bytes": padded[1],
                "packed_bytes": packed[1], "faster": f"{faster:.2f}", "less_memory": f"{less:.2f}", **about,
            })  # fmt: skip
    output = args.output or RESULTS / "packed.csv"
    write(output, replaced(read(output), rows, "device", *SIZE))


if __name__ == "__main__":
    main()
