"""Tables and picture of the retrieval benchmark, beside the paper's figures."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, str]

LIMIT, GUESSED = "Bayes limit", "Bayes limit, bias guessed"

# (mask, noise, bias): each alone at two strengths, the three pairs, and all three at three strengths.
FIGURE_LEVELS = [
    (0.5, 0.0, 0.0), (0.8, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.5), (0.0, 0.0, 1.0),
    (0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5), (0.3, 0.3, 0.3), (0.4, 0.4, 0.4), (0.5, 0.5, 0.5),
]  # fmt: skip
FIGURE_SYSTEMS = ["M-Hop", "U-Hop", "K-Hop", "K2-Hop", "MLP", "A-Hop, debias", "table alone, debias", LIMIT]
ACCURACY_SYSTEMS = [
    "M-Hop", "U-Hop", "K-Hop", "K2-Hop", "MLP", "A-Hop", "A-Hop, debias", "A-Hop, debias, table",
    "table alone, debias", LIMIT, GUESSED,
]  # fmt: skip
ABLATION_SYSTEMS = [
    "unsorted", "unsorted, U", "sorted, U fixed random", "sorted, U fixed identity", "sorted, U fixed triangle",
    "sorted, U learned random", "sorted, U learned identity", "sorted, U learned triangle", "dot only", "dis only",
    "A-Hop, debias", "dis, dot, 512 samples",
]  # fmt: skip

# The paper's tables: accuracy and error of a system, by data and difficulty.
PAPER = {
    "M-Hop": {("synthetic", 0.4): (0.520, 0.176), ("synthetic", 0.5): (0.195, 0.300),
              ("mnist", 0.6): (0.875, 0.013), ("mnist", 0.7): (0.661, 0.068)},
    "U-Hop": {("synthetic", 0.4): (0.260, 0.417), ("synthetic", 0.5): (0.059, 0.554),
              ("mnist", 0.6): (0.540, 0.143), ("mnist", 0.7): (0.176, 0.347)},
    "K-Hop": {("synthetic", 0.4): (0.487, 0.295), ("synthetic", 0.5): (0.177, 0.764),
              ("mnist", 0.6): (0.764, 0.064), ("mnist", 0.7): (0.526, 0.164)},
    "K2-Hop": {("synthetic", 0.4): (0.521, 0.176), ("synthetic", 0.5): (0.195, 0.298),
               ("mnist", 0.6): (0.878, 0.013), ("mnist", 0.7): (0.660, 0.068)},
    "A-Hop": {("synthetic", 0.4): (0.724, 0.106), ("synthetic", 0.5): (0.360, 0.227),
              ("mnist", 0.6): (0.939, 0.005), ("mnist", 0.7): (0.849, 0.015)},
    "unsorted": {("synthetic", 0.4): (0.5172, 0.1900), ("synthetic", 0.5): (0.2094, 0.2658)},
    "unsorted, U": {("synthetic", 0.4): (0.5444, 0.1665), ("synthetic", 0.5): (0.1888, 0.2738)},
    "sorted, U fixed random": {("synthetic", 0.4): (0.6928, 0.1147), ("synthetic", 0.5): (0.3340, 0.2305)},
    "sorted, U fixed identity": {("synthetic", 0.4): (0.6802, 0.1194), ("synthetic", 0.5): (0.3458, 0.2298)},
    "sorted, U fixed triangle": {("synthetic", 0.4): (0.7242, 0.1056), ("synthetic", 0.5): (0.3600, 0.2272)},
    "sorted, U learned random": {("synthetic", 0.4): (0.7176, 0.1087), ("synthetic", 0.5): (0.3414, 0.2292)},
    "sorted, U learned identity": {("synthetic", 0.4): (0.7114, 0.1096), ("synthetic", 0.5): (0.3528, 0.2270)},
    "sorted, U learned triangle": {("synthetic", 0.4): (0.7280, 0.1033), ("synthetic", 0.5): (0.3634, 0.2207)},
    "dot only": {("synthetic", 0.4): (0.5926, 0.1517), ("synthetic", 0.5): (0.2520, 0.2515)},
    "dis only": {("synthetic", 0.4): (0.6458, 0.1317), ("synthetic", 0.5): (0.3286, 0.2326)},
    "dis, dot, 512 samples": {("synthetic", 0.4): (0.7204, 0.1077), ("synthetic", 0.5): (0.3541, 0.2311)},
}  # fmt: skip
PAPER["A-Hop, debias"] = PAPER["A-Hop"]  # its text de-biases in the appendix and does not say which the tables use

# Milliseconds of a fit and of a retrieval, by dimensions and patterns.
PAPER_TIMES = {
    "A-Hop, debias": {(64, 2048): (840, 0.355), (128, 2048): (1573, 0.368), (256, 2048): (3609, 0.414),
                      (64, 4096): (1531, 0.446), (64, 8192): (2949, 0.570)},
    "unsorted, U": {(64, 2048): (2093, 0.287), (128, 2048): (3059, 0.318), (256, 2048): (8224, 0.326),
                    (64, 4096): (4011, 0.364), (64, 8192): (7983, 0.467)},
}  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ±{stdev(values) if len(values) > 1 else 0.0:.3f}"


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def _unique(rows: Iterable[Row], *names: str) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _grid(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in columns as wide as they need to be."""
    lines = [list(header), *map(list, body)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["", shown[0], "-" * len(shown[0]), *shown[1:], ""])


def level_table(rows: Sequence[Row]) -> str:
    """Accuracy and error of each system at each difficulty, with the paper's in brackets."""
    columns, body = _unique(rows, "data", "noise"), []
    for (system,) in _unique(rows, "system"):
        line = [system]
        for data, level in columns:
            mine = [row for row in rows if (row["system"], row["data"], row["noise"]) == (system, data, level)]
            paper = PAPER.get(system, {}).get((data, float(level))) if mine[0]["patterns"] == "2048" else None
            for place, name in enumerate(("accuracy", "error")):
                values = _values(mine, name)
                figure = _spread(values) if values else "-"
                line.append(figure + (f" ({paper[place]:.3f})" if paper else ""))
        body.append(line)
    return _grid(["system", *(f"{d} {level} {name}" for d, level in columns for name in ("accuracy", "error"))], body)


def figure_table(rows: Sequence[Row]) -> str:
    """Mean accuracy of each system at each setting of the figure."""
    systems = [system for (system,) in _unique(rows, "system")]
    body = []
    for patterns, *levels in _unique(rows, "patterns", "mask", "noise", "bias"):
        here = [
            row for row in rows if [row[name] for name in ("patterns", "mask", "noise", "bias")] == [patterns, *levels]
        ]
        found = [_values((row for row in here if row["system"] == system), "accuracy") for system in systems]
        body.append([patterns, *levels, *(f"{mean(values):.3f}" if values else "-" for values in found)])
    return _grid(["N", "mask", "noise", "bias", *systems], body)


def timing_table(rows: Sequence[dict[str, object]]) -> str:
    """Milliseconds, with the paper's in brackets, and how many times faster than the reference on a CPU."""
    reference = next(row for row in rows if row["system"] == "reference, CPU")
    body = []
    for row in rows:
        place = (int(str(row["dim"])), int(str(row["patterns"])))
        paper = PAPER_TIMES.get(str(row["system"]), {}).get(place)
        cells = [f"{float(str(row[name])):.3g}" for name in ("train_ms", "recall_ms")]
        cells = [
            cell + (f" ({figure:g})" if paper else "") for cell, figure in zip(cells, paper or (0, 0), strict=True)
        ]
        same = place == (reference["dim"], reference["patterns"])
        ratio = float(str(reference["train_ms"])) / float(str(row["train_ms"]))
        body.append([str(row["dim"]), str(row["patterns"]), str(row["system"]), *cells, f"{ratio:.3g}" if same else ""])
    steps, batch = reference["steps"], reference["batch"]
    header = ["d", "N", "system", f"fit of {steps} x {batch}, ms", f"recall of {batch}, ms", "times the reference"]
    return _grid(header, body)


TABLES = {"figure": figure_table, "accuracy": level_table, "ablations": level_table}


def draw(rows: Sequence[Row], counts: Sequence[int], path: Path) -> Path:
    """The paper's figure: a spoke for each of the twelve settings, a panel for each number of patterns."""
    figure, axes = plt.subplots(
        1, len(counts), figsize=(6 * len(counts) + 2, 6), layout="constrained", squeeze=False,
        subplot_kw={"projection": "polar"},
    )  # fmt: skip
    names = ("system", "patterns", "mask", "noise", "bias")
    angles = [2 * math.pi * place / len(FIGURE_LEVELS) for place in range(len(FIGURE_LEVELS))]
    for axis, count in zip(axes[0], counts, strict=True):
        for system in FIGURE_SYSTEMS:
            reached = []
            for levels in FIGURE_LEVELS:
                key = [system, str(count), *map(str, levels)]
                reached.append(mean(_values((row for row in rows if [row[name] for name in names] == key), "accuracy")))
            style = {"color": "0.4", "linestyle": "--"} if system == LIMIT else {}
            axis.plot([*angles, angles[0]], [*reached, reached[0]], marker="o", markersize=3, label=system, **style)
        axis.set_xticks(angles, [" ".join(f"{level:g}" for level in levels) for levels in FIGURE_LEVELS], fontsize=8)
        axis.set(title=f"{count} patterns: accuracy by mask, noise, bias", ylim=(0, 1.02), yticks=[0.25, 0.5, 0.75, 1])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130, facecolor="white")
    plt.close(figure)
    return temporary.replace(path)
