"""The rows of benchmarks/mil.py as tables and as a picture."""

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Rows

NAMES = {
    "dot": "M-Hop", "sparse": "S-Hop", "kernel": "K-Hop", "adaptive": "A-Hop", "adaptive x10": "A-Hop, fast",
    "gated": "gated attention", "uniform": "uniform weights",
}  # fmt: skip
PAPER = {
    "tiger": {"dot": 0.8924, "sparse": 0.8923, "adaptive": 0.9030},
    "fox": {"dot": 0.6327, "sparse": 0.6433, "adaptive": 0.6753},
    "elephant": {"dot": 0.9344, "sparse": 0.9365, "adaptive": 0.9451},
    "ucsb": {"dot": 0.8815, "sparse": 0.8794, "adaptive": 0.8935},
}

PARTS = {"nested": "test bags", "corrupted": "all bags"}
"""What is measured, and which bags are corrupted in it."""

# part -> measure -> pooling -> data -> repeat -> value
Table = dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]


def report(rows: Rows, picture: Path) -> None:
    """Print the tables of each machine's rows; the picture is that of the last machine."""
    for device in dict.fromkeys(row["device"] for row in rows.rows):
        mine = [row for row in rows.rows if row["device"] == device]
        table, data = arrange(mine), list(dict.fromkeys(row["data"] for row in mine))
        print(f"\n{device}\n")
        clean_table(table, data)
        for chosen in [*([name] for name in data), data][: len(data) + (len(data) > 1)]:
            corruption_table(table, chosen)
        if complete(table, "nested", "auc", data):
            draw(table, data, picture)
            print(f"\npicture: {picture}")


def arrange(rows: list[dict[str, str]]) -> Table:
    """Rows by what they measure."""
    table: Table = {part: {} for part in PARTS}
    for row in rows:
        of_measure = table[row["part"]].setdefault(row["measure"], {})
        of_data = of_measure.setdefault(row["pooling"], {}).setdefault(row["data"], {})
        of_data[row["repeat"]] = float(row["value"])
    return table


def complete(table: Table, part: str, measure: str, data: Sequence[str]) -> list[str]:
    """The poolings that were measured on all of the data sets."""
    return [pooling for pooling, found in table[part].get(measure, {}).items() if set(data) <= set(found)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error (NaN for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def above_dot(table: Table, part: str, measure: str, pooling: str, data: Sequence[str]) -> list[float]:
    """AUC minus that of M-Hop with the same folds and seeds: for each repeat, the mean over data sets."""
    if not {"dot", pooling} <= set(complete(table, part, measure, data)):
        return []
    mine, dot = table[part][measure][pooling], table[part][measure]["dot"]
    shared = set.intersection(*(set(mine[name]) & set(dot[name]) for name in data))
    return [statistics.mean(mine[name][repeat] - dot[name][repeat] for name in data) for repeat in sorted(shared)]


def show(*cells: object) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |")


def clean_table(table: Table, data: Sequence[str]) -> None:
    """Mean and deviation over repeats, the paper's figure, and the paired difference from M-Hop."""
    show("data", "pooling", "repeats", "AUC", "deviation", "paper", "above M-Hop", "standard error")
    show(*["---"] * 8)
    for name in data:
        for pooling in complete(table, "nested", "auc", [name]):
            values = list(table["nested"]["auc"][pooling][name].values())
            deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            paper = f"{PAPER[name][pooling]:.4f}" if pooling in PAPER[name] else ""
            pairs = above_dot(table, "nested", "auc", pooling, [name]) if pooling != "dot" else []
            mean, error = mean_and_error(pairs) if pairs else (math.nan, math.nan)
            paired = (f"{mean:+.4f}", f"{error:.4f}") if pairs else ("", "")
            show(name, NAMES[pooling], len(values), f"{statistics.mean(values):.4f}", deviation, paper, *paired)


def corruption_table(table: Table, data: Sequence[str]) -> None:
    """AUC of every pooling under every corruption, and by how much A-Hop is above M-Hop."""
    print(f"\n{', '.join(data)}: AUC with corrupted instances\n")
    poolings = complete(table, "nested", "auc", data)
    show("corrupted", "strength", *(NAMES[pooling] for pooling in poolings), "A-Hop above M-Hop")
    show(*["---"] * (len(poolings) + 3))
    for part, bags in PARTS.items():
        for measure in table[part]:
            there = complete(table, part, measure, data)
            if measure == "epochs" or not there:
                continue
            kind, _, strength = measure.partition(" ")
            means = [f"{mean_over(table, part, measure, each, data):.4f}" if each in there else "" for each in poolings]
            pairs = above_dot(table, part, measure, "adaptive", data)
            paired = "{:+.4f} ± {:.4f}".format(*mean_and_error(pairs)) if pairs else ""
            show(f"{kind}, {bags}" if strength else "nothing", strength, *means, paired)


def mean_over(table: Table, part: str, measure: str, pooling: str, data: Sequence[str]) -> float:
    """The mean over repeats and data sets."""
    return statistics.mean(statistics.mean(table[part][measure][pooling][name].values()) for name in data)


def draw(table: Table, data: Sequence[str], path: Path) -> None:
    """AUC against the strength of each corruption, the mean over data sets, a line for each pooling."""
    from matplotlib.figure import Figure

    titles = {"mask": "masked features (share)", "noise": "noise (deviations)", "bias": "constant bias (deviations)"}
    parts = [part for part in PARTS if table[part]]
    figure = Figure(figsize=(12, 3.4 * len(parts)), layout="constrained", facecolor="white")
    for row, part in zip(figure.subplots(len(parts), 3, sharey=True, squeeze=False), parts, strict=True):
        for axis, (kind, title) in zip(row, titles.items(), strict=True):
            for pooling in complete(table, "nested", "auc", data):
                points = {0.0: mean_over(table, "nested", "auc", pooling, data)}
                for measure in table[part]:
                    if measure.startswith(kind) and pooling in complete(table, part, measure, data):
                        points[float(measure.split()[1])] = mean_over(table, part, measure, pooling, data)
                axis.plot(list(points), list(points.values()), marker="o", markersize=4, label=NAMES[pooling])
            axis.set(xlabel=title, title=f"corrupted: {PARTS[part]}")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("test AUC, mean of the data sets")
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    part_file = path.with_suffix(".part")
    figure.savefig(part_file, dpi=120, format=path.suffix[1:])
    os.replace(part_file, path)
