"""Markdown tables and plots of the reports. Plots are readable on light and on dark pages."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from benchmarks.harness.rows import ORIGIN, RESULTS, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
GRAY = "#82868c"  # equal contrast to black and to white
COLORS = ("#3a93b5", "#d67d2f", "#6a9a3b", "#c8555b", "#8d7cc3", "#a98a3f", "#d070a8")  # about as light as the gray
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1)))
STYLE = {
    "svg.fonttype": "none",  # text stays text: small files, and tests can compare it
    "svg.hashsalt": "ahop-layers",  # reproducible ids
    "savefig.transparent": True,
    "font.family": "sans-serif",
    "grid.color": GRAY,
    "grid.alpha": 0.3,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}


def table(header: Sequence[object], body: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = (header, ["---"] * len(header), *body)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def row_table(rows: Sequence[Row]) -> str:
    """Returns a table of rows as they are stored, without the columns that say where they were measured."""
    names = [name for name in rows[0] if name not in ORIGIN] if rows else []
    return table(names, ([row[name] for name in names] for row in rows))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Returns the mean and, of several values, the standard deviation; nothing without values."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}" if values else ""


def bold_best(cells: Sequence[str], best: Callable[..., float] = max) -> list[str]:
    """Makes the best figures bold, all of them if several are equal as shown.

    Args:
        cells: texts that start with a number, such as ``0.467 ± 0.018``, or are empty.
        best: ``max`` or ``min``.
    """
    figures = [float(cell.split()[0].replace(",", "")) if cell else None for cell in cells]
    target = best((figure for figure in figures if figure is not None), default=None)
    pairs = zip(cells, figures, strict=True)
    return [f"**{cell}**" if cell and figure == target else cell for cell, figure in pairs]


def bold_best_in_columns(body: Sequence[Sequence[str]], best: Mapping[int, Callable[..., float]]) -> list[list[str]]:
    """Applies :func:`bold_best` to columns of a table: ``best`` is ``max`` or ``min`` by the number of a column."""
    columns = [list(column) for column in zip(*body, strict=True)]
    for index, function in best.items():
        columns[index] = bold_best(columns[index], function)
    return [list(line) for line in zip(*columns, strict=True)]


def number(value: str | float) -> str:
    """Returns a number with three significant digits and without an exponent."""
    shown = f"{float(value):.3g}"
    return f"{float(shown):,.0f}" if "e+" in shown else shown


def group(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Groups rows by the values of some columns, in the order of their first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def picture_for(output: Path, name: str) -> Path:
    """Returns the path of a plot: in the documentation for its own results, next to the file for others."""
    own = output.resolve() == (RESULTS / f"{name}.csv").resolve()
    return PICTURES / f"{name}.svg" if own else output.with_suffix(".png")


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator["Figure"]:
    """Yields a figure of a size in inches, and saves it atomically at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    # Color, marker and dashes differ from line to line, so that lines that coincide can be told apart.
    colors = (*COLORS, GRAY)
    lines = matplotlib.cycler(color=colors, marker=MARKERS, linestyle=DASHES * (len(colors) // len(DASHES)))
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": lines}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        form = path.suffix[1:]
        # Without a date, equal plots are equal files.
        figure.savefig(part, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
    os.replace(part, path)
