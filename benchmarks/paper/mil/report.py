"""The rows of benchmarks/mil.py as tables and as a picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.report import Row, drawing, group, table
from benchmarks.paper.figures import MIL

NAMES = {
    "dot": "M-Hop", "sparse": "S-Hop", "kernel": "K-Hop", "adaptive": "A-Hop", "adaptive x10": "A-Hop, fast",
    "gated": "gated attention", "uniform": "uniform weights",
}  # fmt: skip

PARTS = {"nested": "test bags", "corrupted": "all bags"}
"""What is measured, and which bags are corrupted in it."""

# part -> measure -> pooling -> data -> repeat -> value
Figures = dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]


def report(rows: Sequence[Row]) -> str:
    """All tables of each machine's rows."""
    parts = []
    for (device,), mine in group(rows, "device").items():
        figures, data = arrange(mine), data_sets(mine)
        parts += [device, clean_table(figures, data)]
        for chosen in [*([name] for name in data), data][: len(data) + (len(data) > 1)]:
            parts += [f"{', '.join(chosen)}: AUC with corrupted instances", corruption_table(figures, chosen)]
    return "\n\n".join(parts)


def data_sets(rows: Sequence[Row]) -> list[str]:
    """The data sets of the rows."""
    return [name for (name,) in group(rows, "data")]


def arrange(rows: Sequence[Row]) -> Figures:
    """Rows by what they measure."""
    figures: Figures = {part: {} for part in PARTS}
    for row in rows:
        of_measure = figures[row["part"]].setdefault(row["measure"], {})
        of_data = of_measure.setdefault(row["pooling"], {}).setdefault(row["data"], {})
        of_data[row["repeat"]] = float(row["value"])
    return figures


def complete(figures: Figures, part: str, measure: str, data: Sequence[str]) -> list[str]:
    """The poolings that were measured on all of the data sets, in the order of their names."""
    found = figures[part].get(measure, {})
    return [pooling for pooling in NAMES if set(data) <= set(found.get(pooling, ()))]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error (NaN for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def above_dot(figures: Figures, part: str, measure: str, pooling: str, data: Sequence[str]) -> list[float]:
    """AUC minus that of M-Hop with the same folds and seeds: for each repeat, the mean over data sets."""
    if not {"dot", pooling} <= set(complete(figures, part, measure, data)):
        return []
    mine, dot = figures[part][measure][pooling], figures[part][measure]["dot"]
    shared = set.intersection(*(set(mine[name]) & set(dot[name]) for name in data))
    return [statistics.mean(mine[name][repeat] - dot[name][repeat] for name in data) for repeat in sorted(shared)]


def short_table(figures: Figures, data: Sequence[str]) -> str:
    """A column for each data set: the mean over repeats and the paper's figure; below, the paired differences."""
    body, poolings = [], complete(figures, "nested", "auc", data)
    for pooling in poolings:
        means = [f"{mean_over(figures, 'nested', 'auc', pooling, [name]):.3f}" for name in data]
        known = [f" ({MIL[name][pooling]:.3f})" if pooling in MIL[name] else "" for name in data]
        body.append([NAMES[pooling], *(mean + paper for mean, paper in zip(means, known, strict=True))])
    for pooling in poolings:
        pairs = [above_dot(figures, "nested", "auc", pooling, [name]) for name in data]
        if pooling != "dot" and all(pairs):
            body.append([f"{NAMES[pooling]} above M-Hop", *(_paired(each) for each in pairs)])
    return table(["pooling", *data], body)


def _paired(differences: Sequence[float]) -> str:
    return "{:+.4f} ± {:.4f}".format(*mean_and_error(differences)) if differences else ""


def clean_table(figures: Figures, data: Sequence[str]) -> str:
    """Mean and deviation over repeats, the paper's figure, and the paired difference from M-Hop."""
    body = []
    for name in data:
        for pooling in complete(figures, "nested", "auc", [name]):
            values = list(figures["nested"]["auc"][pooling][name].values())
            deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            paper = f"{MIL[name][pooling]:.4f}" if pooling in MIL[name] else ""
            pairs = above_dot(figures, "nested", "auc", pooling, [name]) if pooling != "dot" else []
            mean, error = mean_and_error(pairs) if pairs else (math.nan, math.nan)
            paired = (f"{mean:+.4f}", f"{error:.4f}") if pairs else ("", "")
            body.append(
                [name, NAMES[pooling], len(values), f"{statistics.mean(values):.4f}", deviation, paper, *paired]
            )
    return table(["data", "pooling", "repeats", "AUC", "deviation", "paper", "above M-Hop", "standard error"], body)


def corruption_table(figures: Figures, data: Sequence[str]) -> str:
    """AUC of every pooling under every corruption, and by how much A-Hop is above M-Hop."""
    poolings, body = complete(figures, "nested", "auc", data), []
    for part, bags in PARTS.items():
        for measure in figures[part]:
            there = complete(figures, part, measure, data)
            if measure == "epochs" or not there:
                continue
            kind, _, strength = measure.partition(" ")
            means = [
                f"{mean_over(figures, part, measure, each, data):.4f}" if each in there else "" for each in poolings
            ]
            paired = _paired(above_dot(figures, part, measure, "adaptive", data))
            body.append([f"{kind}, {bags}" if strength else "nothing", strength, *means, paired])
    header = ["corrupted", "strength", *(NAMES[pooling] for pooling in poolings), "A-Hop above M-Hop"]
    return table(header, body)


def mean_over(figures: Figures, part: str, measure: str, pooling: str, data: Sequence[str]) -> float:
    """The mean over repeats and data sets."""
    return statistics.mean(statistics.mean(figures[part][measure][pooling][name].values()) for name in data)


def draw(rows: Sequence[Row], path: Path) -> bool:
    """AUC against the strength of each corruption, from the last machine's rows; False where they are not complete.

    The mean over data sets, a line for each pooling.
    """
    machines = list(group(rows, "device").values())
    figures, data = (arrange(machines[-1]), data_sets(machines[-1])) if machines else ({}, [])
    if not machines or not complete(figures, "nested", "auc", data):
        return False
    titles = {"mask": "masked features (share)", "noise": "noise (deviations)", "bias": "constant bias (deviations)"}
    parts = [part for part in PARTS if figures[part]]
    with drawing(path, (9, 3.2 * len(parts) + 0.6)) as figure:
        for row, part in zip(figure.subplots(len(parts), 3, sharey=True, squeeze=False), parts, strict=True):
            for axis, (kind, title) in zip(row, titles.items(), strict=True):
                for pooling in complete(figures, "nested", "auc", data):
                    points = {0.0: mean_over(figures, "nested", "auc", pooling, data)}
                    for measure in figures[part]:
                        if measure.startswith(kind) and pooling in complete(figures, part, measure, data):
                            points[float(measure.split()[1])] = mean_over(figures, part, measure, pooling, data)
                    axis.plot(list(points), list(points.values()), marker="o", markersize=4, label=NAMES[pooling])
                axis.set(xlabel=title, title=f"corrupted: {PARTS[part]}")
                axis.grid()
            row[0].set_ylabel("test AUC, mean of sets")
        labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False)
    return True
