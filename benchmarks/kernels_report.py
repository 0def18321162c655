"""Table and plot of the kernel benchmark."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.report import GRAY, drawing, group, number, table
from benchmarks.harness.rows import Row

PASSES = ("forward", "forward + backward")


def report(rows: Sequence[Row]) -> str:
    """Milliseconds and speedup over plain PyTorch as in the paper, without empty columns."""
    columns = {
        **{f"{label}, ms": (label, "ours_ms") for label in PASSES},
        **{f"{label}, speedup": (label, "paper/ours") for label in PASSES},
        "forward, multiple of lower bound": ("forward", "ours/limit"),
        "extra memory, MB": ("forward + backward", "extra_MB"),
    }
    cases = {
        case: {name: row[column] for name, (label, column) in columns.items() for row in pair if row["pass"] == label}
        for (case,), pair in group(rows, "case").items()
    }
    there = [name for name in columns if any(cells.get(name) for cells in cases.values())]
    body = [
        [case, *(number(cells[name]) if cells.get(name) else "" for name in there)] for case, cells in cases.items()
    ]
    return table(["queries x keys", *there], body)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the speedup over plain PyTorch as bars, one panel per device."""
    devices = group(rows, "device")
    cases = [list(group(mine, "case")) for mine in devices.values()]
    with drawing(path, (8, 0.34 * sum(map(len, cases)) + 1.2 * len(devices))) as figure:
        axes = figure.subplots(
            len(devices), squeeze=False, gridspec_kw={"height_ratios": [len(each) for each in cases]}
        )
        for axis, ((device,), mine), places in zip(axes[:, 0], devices.items(), cases, strict=True):
            for offset, label in zip((-0.2, 0.2), PASSES, strict=True):
                ratios = {(row["case"],): float(row["paper/ours"]) for row in mine if row["pass"] == label}
                height = [places.index(case) + offset for case in ratios]
                bars = axis.barh(height, list(ratios.values()), height=0.38, label=label)
                axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
            axis.set(xscale="log", title=device, ylim=(len(places) - 0.4, -0.6))
            axis.axvline(1, color=GRAY, linewidth=1)
            axis.set_yticks(range(len(places)), [case for (case,) in places])
            axis.set_xlim(right=2 * max(float(row["paper/ours"]) for row in mine))
        axes[-1, 0].set_xlabel("speedup over plain PyTorch (sort, cumulative sum, product)")
        axes[0, 0].legend(loc="lower right", frameon=False)
