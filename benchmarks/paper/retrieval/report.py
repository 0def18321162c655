"""Tables and heat map of the retrieval benchmark, with the paper's figures in their own columns."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from benchmarks.harness.report import bold_best, bold_best_in_columns, drawing, group, number, spread, table
from benchmarks.harness.rows import Row
from benchmarks.paper.figures import MULTIMODAL, RETRIEVAL, RETRIEVAL_TIMES

LIMIT, GUESSED = "Bayes limit", "Bayes limit, bias guessed"
REFERENCE = "reference, CPU"

# (mask, noise, bias): each alone with two strengths, the three pairs, and all three with three strengths.
FIGURE_LEVELS = [
    (0.5, 0.0, 0.0), (0.8, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.5), (0.0, 0.0, 1.0),
    (0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5), (0.3, 0.3, 0.3), (0.4, 0.4, 0.4), (0.5, 0.5, 0.5),
]  # fmt: skip
FIGURE_SYSTEMS = ["M-Hop", "U-Hop", "K-Hop", "K2-Hop", "MLP", "default", "A-Hop, debias", "table alone, debias", LIMIT]
ACCURACY_SYSTEMS = [
    "M-Hop", "U-Hop", "K-Hop", "K2-Hop", "MLP", "default", "A-Hop", "A-Hop, debias", "A-Hop, debias, table",
    "table alone, debias", LIMIT, GUESSED,
]  # fmt: skip
ABLATION_SYSTEMS = [
    "unsorted", "unsorted, U", "sorted, U fixed random", "sorted, U fixed identity", "sorted, U fixed triangle",
    "sorted, U learned random", "sorted, U learned identity", "sorted, U learned triangle", "dot only", "dis only",
    "A-Hop, debias", "dis, dot, 512 samples",
]  # fmt: skip

MEASURES = {"accuracy": max, "error": min}
"""The measures, and which value is the best."""


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name]]


def _bold_best(systems: Sequence[str], cells: Sequence[str], best: Callable[..., float] = max) -> list[str]:
    """Makes the best system bold. The Bayes limits do not compete."""
    competing = ["" if system in (LIMIT, GUESSED) else cell for system, cell in zip(systems, cells, strict=True)]
    return [marked or cell for marked, cell in zip(bold_best(competing, best), cells, strict=True)]


def level_table(rows: Sequence[Row], measures: Sequence[str] = tuple(MEASURES)) -> str:
    """Accuracy and error of each system at each level of damage: mean and standard deviation over the runs.

    A column of the paper's figures follows where there are any. The best system is bold.
    """
    systems = [system for (system,) in group(rows, "system")]
    cells = group(rows, "data", "noise", "system")
    header, columns = ["system"], [systems]
    for (data, level), name in product(group(rows, "data", "noise"), measures):
        here = [cells.get((data, level, system), []) for system in systems]
        measured = [spread(_values(each, name)) for each in here]
        title = f"{data} {level}" + (f", {name}" if len(measures) > 1 else "")
        header.append(title)
        columns.append(_bold_best(systems, measured, MEASURES[name]))
        paper = [_reported(system, each, name) for system, each in zip(systems, here, strict=True)]
        if any(paper):
            header.append(f"{title}, paper")
            columns.append(paper)
    return table(header, zip(*columns, strict=True))


def _reported(system: str, rows: Sequence[Row], measure: str) -> str:
    """The paper's figure for some rows of a system, all of one data set and level; the paper stores 2048 patterns."""
    if not rows or rows[0]["patterns"] != "2048":
        return ""
    figures = RETRIEVAL.get(system, {}).get((rows[0]["data"], float(rows[0]["noise"])))
    return f"{figures[list(MEASURES).index(measure)]:.3f}" if figures else ""


def figure_table(rows: Sequence[Row]) -> str:
    """Mean accuracy of each system in each mixture of the figure; the best system is bold."""
    systems, body = [system for (system,) in group(rows, "system")], []
    for mixture, here in group(rows, "patterns", "mask", "noise", "bias").items():
        cells = group(here, "system")
        found = [_values(cells.get((system,), []), "accuracy") for system in systems]
        means = [f"{mean(values):.3f}" if values else "" for values in found]
        body.append([*mixture, *_bold_best(systems, means)])
    return table(["patterns", "mask", "noise", "bias", *systems], body)


def pair_table(rows: Sequence[Row]) -> str:
    """Accuracy of each pair of memories by the number of concepts: mean and standard deviation over the runs.

    The paper's figures are in columns of their own. The best pair is bold.
    """
    pairs, header = list(group(rows, "system_1", "system_2")), ["phase 1", "phase 2"]
    cells, columns = group(rows, "concepts", "system_1", "system_2"), [list(side) for side in zip(*pairs, strict=True)]
    for (concepts,) in group(rows, "concepts"):
        found = [_values(cells.get((concepts, *pair), []), "accuracy") for pair in pairs]
        header.append(f"N = {concepts}")
        columns.append(bold_best([spread(values) for values in found]))
        paper = [MULTIMODAL.get(pair, {}).get(int(concepts)) for pair in pairs]
        if any(paper):
            header.append(f"N = {concepts}, paper")
            columns.append([f"{figure:.3f}" if figure else "" for figure in paper])
    caption = "Accuracy for N concepts. Both sides are digits of scikit-learn; the paper does not describe its data."
    return f"{caption}\n\n{table(header, zip(*columns, strict=True))}"


def timing_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a fit and of a recall, those of the paper, and the speedup of the fit over the CPU reference.

    The fastest system of each problem size is bold.
    """
    reference = next(row for row in rows if row["system"] == REFERENCE)
    body = []
    for (dim, count), here in group(rows, "dim", "patterns").items():
        lines = []
        for row in here:
            paper = RETRIEVAL_TIMES.get(row["system"], {}).get((int(dim), int(count)))
            fit, recall = (number(figure) for figure in paper) if paper else ("", "")
            same = (dim, count) == (reference["dim"], reference["patterns"])
            speedup = number(float(reference["train_ms"]) / float(row["train_ms"])) if same else ""
            times = (number(row["train_ms"]), fit, number(row["recall_ms"]), recall)
            lines.append([dim, count, row["system"], *times, speedup])
        body += bold_best_in_columns(lines, {3: min, 5: min})
    header = ["d", "patterns", "system", "fit, ms", "fit, ms, paper", "recall, ms", "recall, ms, paper", "fit, speedup"]
    steps, batch = reference["steps"], reference["batch"]
    caption = f"A fit has {steps} steps of {batch} queries, and a recall has {batch} queries."
    return f"{caption} The speedup is relative to `{REFERENCE}`.\n\n{table(header, body)}"


TABLES = {"figure": figure_table, "accuracy": level_table, "ablations": level_table}


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws the mixtures of the paper's figure as heat maps of accuracy, one panel per number of patterns."""
    counts = [count for (count,) in group(rows, "patterns")]
    labels = ["\n".join(f"{level:g}" for level in levels) for levels in FIGURE_LEVELS]
    cells = group(rows, "system", "patterns", "mask", "noise", "bias")
    with drawing(path, (8, 3.6 * len(counts) + 0.3)) as figure:
        axes = figure.subplots(len(counts), squeeze=False)[:, 0]
        for axis, count in zip(axes, counts, strict=True):
            found = [
                [cells.get((system, count, *map(str, levels)), []) for levels in FIGURE_LEVELS]
                for system in FIGURE_SYSTEMS
            ]
            means = [[mean(_values(cell, "accuracy")) if cell else math.nan for cell in row] for row in found]
            image = axis.pcolormesh(means, cmap="viridis", vmin=0, vmax=1, edgecolors="face", linewidth=0.3)
            for row, values in enumerate(means):
                for column, value in enumerate(values):
                    if not math.isnan(value):
                        style = {"fontsize": 8, "color": "black" if value > 0.6 else "white"}
                        axis.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", **style)
            axis.axhline(FIGURE_SYSTEMS.index(LIMIT), color="white", linewidth=3)
            axis.invert_yaxis()
            axis.set_xticks([place + 0.5 for place in range(len(labels))], labels, fontsize=8)
            axis.set_yticks([place + 0.5 for place in range(len(FIGURE_SYSTEMS))], FIGURE_SYSTEMS, fontsize=9)
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
            axis.set_title(f"{count} patterns: accuracy by mask, noise and bias", fontsize=11)
            names = {"xycoords": "axes fraction", "ha": "right", "va": "top", "fontsize": 8}
            axis.annotate("mask\nnoise\nbias", (-0.01, -0.025), **names)
        figure.colorbar(image, ax=axes, label="accuracy", shrink=0.6)
    return path
