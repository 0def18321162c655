"""Tables and picture of the retrieval benchmark, beside the paper's figures."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.harness.report import GREY, Row, drawing, group, number, table
from benchmarks.paper.figures import RETRIEVAL, RETRIEVAL_TIMES

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

MEASURES = ("accuracy", "error")


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ±{stdev(values):.3f}" if len(values) > 1 else "")


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def level_table(rows: Sequence[Row], measures: Sequence[str] = MEASURES) -> str:
    """Accuracy and error of each system at each difficulty, with the paper's in brackets."""
    columns, body = list(group(rows, "data", "noise")), []
    for (system,), mine in group(rows, "system").items():
        line = [system]
        for data, level in columns:
            here = [row for row in mine if (row["data"], row["noise"]) == (data, level)]
            paper = (
                RETRIEVAL.get(system, {}).get((data, float(level))) if here and here[0]["patterns"] == "2048" else None
            )
            for name in measures:
                values = _values(here, name)
                figure = _spread(values) if values else "-"
                line.append(figure + (f" ({paper[MEASURES.index(name)]:.3f})" if paper else ""))
        body.append(line)
    return table(["system", *(f"{data} {level} {name}" for data, level in columns for name in measures)], body)


def figure_table(rows: Sequence[Row]) -> str:
    """Mean accuracy of each system at each setting of the figure."""
    systems, body = [system for (system,) in group(rows, "system")], []
    for place, here in group(rows, "patterns", "mask", "noise", "bias").items():
        found = [_values((row for row in here if row["system"] == system), "accuracy") for system in systems]
        body.append([*place, *(f"{mean(values):.3f}" if values else "-" for values in found)])
    return table(["N", "mask", "noise", "bias", *systems], body)


def timing_table(rows: Sequence[Row]) -> str:
    """Milliseconds, with the paper's in brackets, and how many times faster than the reference on a CPU."""
    reference = next(row for row in rows if row["system"] == "reference, CPU")
    body = []
    for row in rows:
        paper = RETRIEVAL_TIMES.get(row["system"], {}).get((int(row["dim"]), int(row["patterns"])))
        cells = [number(row[name]) for name in ("train_ms", "recall_ms")]
        cells = [
            cell + (f" ({number(figure)})" if paper else "")
            for cell, figure in zip(cells, paper or (0, 0), strict=True)
        ]
        same = (row["dim"], row["patterns"]) == (reference["dim"], reference["patterns"])
        ratio = float(reference["train_ms"]) / float(row["train_ms"])
        body.append([row["dim"], row["patterns"], row["system"], *cells, number(ratio) if same else ""])
    steps, batch = reference["steps"], reference["batch"]
    header = ["d", "N", "system", f"fit of {steps} x {batch}, ms", f"recall of {batch}, ms", "times the reference"]
    return table(header, body)


TABLES = {"figure": figure_table, "accuracy": level_table, "ablations": level_table}


def draw(rows: Sequence[Row], path: Path) -> Path:
    """The paper's figure: a spoke for each of the twelve settings, a panel for each number of patterns."""
    counts = [count for (count,) in group(rows, "patterns")]
    angles = [2 * math.pi * place / len(FIGURE_LEVELS) for place in range(len(FIGURE_LEVELS))]
    with drawing(path, (8, 6.5 * len(counts) + 1)) as figure:
        axes = figure.subplots(len(counts), squeeze=False, subplot_kw={"projection": "polar"})[:, 0]
        for axis, count in zip(axes, counts, strict=True):
            found = group(rows, "system", "patterns", "mask", "noise", "bias")
            for system in FIGURE_SYSTEMS:
                keys = [(system, count, *map(str, levels)) for levels in FIGURE_LEVELS]
                reached = [mean(_values(found[key], "accuracy")) if key in found else math.nan for key in keys]
                style = {"color": GREY, "linestyle": "--"} if system == LIMIT else {}
                axis.plot([*angles, angles[0]], [*reached, reached[0]], marker="o", markersize=3, label=system, **style)
            axis.set_xticks(
                angles, [" ".join(f"{level:g}" for level in levels) for levels in FIGURE_LEVELS], fontsize=9
            )
            title = f"{count} patterns: accuracy by mask, noise, bias"
            axis.set(title=title, ylim=(0, 1.02), yticks=[0.25, 0.5, 0.75, 1])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return path
