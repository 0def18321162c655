"""Table, curves and picture of the search benchmark."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from textwrap import wrap

import numpy as np
from torch import Tensor

from benchmarks.harness.report import COLORS, bold_best, bold_best_in_columns, drawing, group, number, spread, table
from benchmarks.harness.rows import Row
from benchmarks.search.measure import Shown
from benchmarks.search.packaged import OURS

KINDS = {"pixels": "pixels replaced", "occlusion": "the area covered by a block of another image"}
"""Kind of damage -> what a level is the fraction of."""


def _accuracies(rows: Sequence[Row]) -> list[float]:
    return [float(row["accuracy"]) for row in rows]


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy of each method at each level: mean and standard deviation over the splits. The best mean is bold."""
    parts = []
    for (data, kind), here in group(rows, "data", "kind").items():
        levels = sorted((level for (level,) in group(here, "level")), key=float)
        cells = group(here, "method", "level")
        methods = [method for (method,) in group(here, "method")]
        columns = [[spread(_accuracies(cells.get((method, level), []))) for method in methods] for level in levels]
        body = zip(methods, *map(bold_best, columns), strict=True)
        splits = len(group(here, "split"))
        caption = f"Accuracy on {data} by the fraction of {KINDS[kind]}, {splits} split{'s' * (splits > 1)}."
        parts.append(f"{caption}\n\n{table(['method', *levels], body)}")
    return "\n\n".join(parts)


def time_table(rows: Sequence[Row]) -> str:
    """Mean time of one training for all levels of a kind of damage, and of one query; two columns for each data set."""
    sets, body = [data for (data,) in group(rows, "data")], []
    for (method,), mine in group(rows, "method").items():
        cells = [method]
        for data in sets:
            same = [row for row in mine if row["data"] == data]
            if not same:
                cells += ["", ""]
                continue
            fit = mean(float(one[0]["fit_s"]) for one in group(same, "kind", "split").values())
            query = sum(float(row["query_s"]) for row in same) / sum(int(row["queries"]) for row in same)
            cells += [number(fit) if fit > 1e-3 else "0", number(1000 * query)]
        body.append(cells)
    marked = bold_best_in_columns(body, {2 * place: min for place in range(1, 1 + len(sets))})
    header = (f"{data}: {column}" for data in sets for column in ("training, s", "query, ms"))
    return table(["method", *header], marked)


def _ours_first(named: tuple[str, object]) -> bool:
    return named[0] != OURS


def draw_curves(rows: Sequence[Row], path: Path) -> Path:
    """Draws accuracy by level, with one row of panels for each data set and one panel for each kind of damage."""
    sets, kinds = ([name for (name,) in group(rows, column)] for column in ("data", "kind"))
    panels = group(rows, "data", "kind")
    with drawing(path, (4.6 * len(kinds), 3.4 * len(sets) + 0.6)) as figure:
        axes = figure.subplots(len(sets), len(kinds), squeeze=False)
        for data, line in zip(sets, axes, strict=True):
            for kind, axis in zip(kinds, line, strict=True):
                methods = group(panels.get((data, kind), []), "method")
                for method, here in sorted(((name, same) for (name,), same in methods.items()), key=_ours_first):
                    points = sorted(
                        (float(level), mean(_accuracies(same))) for (level,), same in group(here, "level").items()
                    )
                    style = {"linewidth": 3, "markersize": 6, "zorder": 3} if method == OURS else {"linewidth": 1.2}
                    axis.plot(*zip(*points, strict=True), label=method, **{"markersize": 5, **style})
                axis.set(title=data, xlabel=f"fraction of {KINDS[kind]}", ylabel="accuracy", ylim=(0, 1.02))
                axis.grid(True)
        labels = {
            label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)
    return path


def draw_answers(shown: Shown, path: Path) -> Path:
    """Draws each query, its clean image, and the stored image that each method answered, marked as right or wrong.

    The last column shows what each pixel adds to the score of the answer of the adaptive memory.
    """
    split, shape = shown.split, shown.split.stored.shape

    def image(row: Tensor) -> np.ndarray:
        return row.reshape(shape).cpu().numpy()

    columns: list[tuple[str, Tensor, Tensor | None]] = [
        ("query", shown.query, None),
        ("clean image", split.asked.rows, None),
        *((name, split.stored.rows[given.index], given.label) for name, given in shown.answers.items()),
    ]
    truth, extra = split.asked.labels, shown.explained is not None
    with drawing(path, (1.3 * (len(columns) + extra), 1.35 * len(truth) + 0.4)) as figure:
        axes = figure.subplots(len(truth), len(columns) + extra, squeeze=False)
        for place, (name, rows, labels) in enumerate(columns):
            axes[0, place].set_title("\n".join(wrap(name, 14)), fontsize=9)
            for line, axis in enumerate(axes[:, place]):
                axis.imshow(image(rows[line]), cmap="gray", vmin=0, vmax=max(float(rows[line].max()), 1e-6))
                axis.set(xticks=[], yticks=[])
                if labels is None:
                    axis.spines[:].set_visible(False)
                    continue
                color, sign = (COLORS[2], "\u2713") if labels[line] == truth[line] else (COLORS[3], "\u2717")
                axis.spines[:].set(visible=True, color=color, linewidth=2.5)
                box = {"facecolor": color, "linewidth": 0, "boxstyle": "round,pad=0.15"}
                axis.text(0.94, 0.06, sign, transform=axis.transAxes, ha="right", color="white", fontsize=9, bbox=box)
        if shown.explained is not None:
            axes[0, -1].set_title("pixels\nthat count", fontsize=9)
            for axis, row in zip(axes[:, -1], shown.explained.flatten(1), strict=True):
                low, high = row.quantile(row.new_tensor([0.02, 0.98])).tolist()  # few pixels may count for much more
                axis.imshow(image(row), cmap="viridis", vmin=low, vmax=high)
                axis.set_axis_off()
    return path
