"""Tables and plot of the kernel benchmark."""

import re
from collections.abc import Sequence

from ahop_layers.ops.gpu.layout import comparators
from benchmarks.harness.report import group, number, table
from benchmarks.harness.rows import Row

PASSES = ("forward", "forward + backward")
N = re.compile(r", n (\d+)")


def report(rows: Sequence[Row]) -> str:
    """Milliseconds and speedup over plain PyTorch as in the paper, of full footprints, without empty columns."""
    rows = [row for row in rows if row["paper/ours"] and not has_blocks(row)]
    columns = {
        **{f"{label}, ms": (label, "ours_ms") for label in PASSES},
        "forward, ms on the caller's clock": ("forward", "caller_ms"),
        **{f"{label}, speedup": (label, "paper/ours") for label in PASSES},
        "forward, multiple of lower bound": ("forward", "ours/limit"),
        "extra memory, MB": ("forward + backward", "extra_MB"),
    }
    cases = {
        case: {
            name: row.get(column, "")
            for name, (label, column) in columns.items()
            for row in pair
            if row["pass"] == label
        }
        for (case,), pair in group(rows, "case").items()
    }
    there = [name for name in columns if any(cells.get(name) for cells in cases.values())]
    body = [
        [case, *(number(cells[name]) if cells.get(name) else "" for name in there)] for case, cells in cases.items()
    ]
    return table(["queries x keys", *there], body)


def has_blocks(row: Row) -> bool:
    """Tells whether a row measures block footprints, such as ``256 x 2048, d 64, n 8``."""
    return N.search(row["case"]) is not None


def of_blocks(rows: Sequence[Row]) -> str:
    """Milliseconds of block footprints, and their speedup over full footprints of the same size."""
    measured = {(row["case"], row["pass"]): float(row["ours_ms"]) for row in rows}
    body = []
    for case in dict.fromkeys(row["case"] for row in rows if has_blocks(row)):
        size, n = N.sub("", case), int(N.findall(case)[0])
        times = [measured.get((case, label)) for label in PASSES]
        full = [measured.get((size, label)) for label in PASSES]
        ratios = [None if None in (mine, whole) else whole / mine for mine, whole in zip(times, full, strict=True)]
        cells = ["" if value is None else number(value) for value in (*times, *ratios)]
        body.append([size, n, comparators(n), *cells])
    labels = [f"{label}, {unit}" for unit in ("ms", "speedup over full footprints") for label in PASSES]
    return table(["queries x keys", "n", "comparators", *labels], body)


def of_attention(rows: Sequence[Row]) -> str:
    """Milliseconds of fused attention with 4 blocks, and their speed relative to the fused dot product."""
    columns = {
        "ms": "ours_ms",
        "ms on the caller's clock": "caller_ms",
        "speed, dot product 1": "fused dot product/ours",
    }
    body = []
    for (case,), pair in group(rows, "case").items():
        size = case.removeprefix("attention, ").removesuffix(", 4 blocks, bfloat16")
        body.append([size, *(number(row[column]) for row in pair for column in columns.values())])
    return table(["N x H x L x d", *(f"{label}, {name}" for label in PASSES for name in columns)], body)
