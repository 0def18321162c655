"""Tables and plot of the bag benchmark."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness.report import bold_best, group, table
from benchmarks.harness.rows import Row
from benchmarks.paper.figures import MIL

NAMES = {
    "dot": "M-Hop", "sparse": "S-Hop", "kernel": "K-Hop", "adaptive": "A-Hop", "adaptive x10": "A-Hop, fast",
    "gated": "gated attention", "uniform": "uniform weights",
}  # fmt: skip

PARTS = {"nested": "test bags", "damaged": "all bags"}
"""The parts of the benchmark, and the bags that are damaged in them."""

# part -> measure -> pooling -> data -> repeat -> value
Figures = dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]


def report(rows: Sequence[Row]) -> str:
    """All tables, for each device."""
    parts = []
    for (device,), mine in group(rows, "device").items():
        figures, data = arrange(mine), data_sets(mine)
        parts.append(f"Test AUC, measured on {device}.")
        if figures["nested"]:
            parts.append(short_tables(figures, data))
        for chosen in [*([name] for name in data), data][: len(data) + (len(data) > 1)]:
            parts += [f"Test AUC with damaged instances on {', '.join(chosen)}.", damage_table(figures, chosen)]
    return "\n\n".join(parts)


def data_sets(rows: Sequence[Row]) -> list[str]:
    """Returns the data sets of the rows."""
    return [name for (name,) in group(rows, "data")]


def arrange(rows: Sequence[Row]) -> Figures:
    """Returns the values of the rows by part, measure, pooling, data set and repeat."""
    figures: Figures = {part: {} for part in PARTS}
    for row in rows:
        of_measure = figures[row["part"]].setdefault(row["measure"], {})
        of_data = of_measure.setdefault(row["pooling"], {}).setdefault(row["data"], {})
        of_data[row["repeat"]] = float(row["value"])
    return figures


def complete(figures: Figures, part: str, measure: str, data: Sequence[str]) -> list[str]:
    """Returns the poolings that were measured on all of the data sets, in the order of ``NAMES``."""
    found = figures[part].get(measure, {})
    return [pooling for pooling in NAMES if set(data) <= set(found.get(pooling, ()))]


def mean_over(figures: Figures, part: str, measure: str, pooling: str, data: Sequence[str]) -> float:
    """Returns the mean over repeats and data sets."""
    return statistics.mean(statistics.mean(figures[part][measure][pooling][name].values()) for name in data)


def _paired(differences: Sequence[float]) -> str:
    """Returns the mean, with its sign, and the standard error of several differences; nothing without differences."""
    error = f" ± {statistics.stdev(differences) / math.sqrt(len(differences)):.4f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.4f}{error}" if differences else ""


def difference(figures: Figures, part: str, measure: str, pooling: str, data: Sequence[str]) -> list[float]:
    """Returns AUC minus the AUC of M-Hop with the same folds and seeds: for each repeat, the mean over data sets."""
    if not {"dot", pooling} <= set(complete(figures, part, measure, data)):
        return []
    mine, dot = figures[part][measure][pooling], figures[part][measure]["dot"]
    shared = set.intersection(*(set(mine[name]) & set(dot[name]) for name in data))
    return [statistics.mean(mine[name][repeat] - dot[name][repeat] for name in data) for repeat in sorted(shared)]


def short_tables(figures: Figures, data: Sequence[str]) -> str:
    """A column for each data set: mean AUC over repeats, with the paper's figures; then the paired differences."""
    poolings = complete(figures, "nested", "auc", data)
    header, columns, differences = ["pooling"], [[NAMES[pooling] for pooling in poolings]], []
    for name in data:
        means = [f"{mean_over(figures, 'nested', 'auc', pooling, [name]):.3f}" for pooling in poolings]
        paper = [f"{MIL[name][pooling]:.3f}" if pooling in MIL[name] else "" for pooling in poolings]
        header += [name, f"{name}, paper"]
        columns += [bold_best(means), paper]
    for pooling in poolings:
        pairs = [difference(figures, "nested", "auc", pooling, [name]) for name in data]
        if pooling != "dot" and all(pairs):
            differences.append([NAMES[pooling], *(_paired(each) for each in pairs)])
    parts = [table(header, zip(*columns, strict=True))]
    if differences:
        caption = "AUC minus the AUC of M-Hop with the same folds and seeds: mean and standard error over the repeats."
        parts += [caption, table(["pooling", *data], differences)]
    return "\n\n".join(parts)


def damage_table(figures: Figures, data: Sequence[str]) -> str:
    """AUC of every pooling with every kind of damage, the best one bold, and the difference between A-Hop and M-Hop."""
    measures = [(part, measure) for part in PARTS for measure in figures[part] if measure != "epochs"]
    found = {each: complete(figures, *each, data) for each in measures}
    poolings = [pooling for pooling in NAMES if any(pooling in there for there in found.values())]
    body = []
    for (part, measure), there in found.items():
        if there:
            kind, _, strength = measure.partition(" ")
            means = {each: f"{mean_over(figures, part, measure, each, data):.4f}" for each in there}
            cells = bold_best([means.get(pooling, "") for pooling in poolings])
            paired = _paired(difference(figures, part, measure, "adaptive", data))
            body.append([f"{kind}, {PARTS[part]}" if strength else "none", strength, *cells, paired])
    header = ["damage", "strength", *(NAMES[pooling] for pooling in poolings), "A-Hop minus M-Hop"]
    return table(header, body)
