"""Output files that are written atomically, and the pictures that several examples draw."""

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor


def spread(values: Sequence[float]) -> str:
    """Returns the mean of several runs and their standard deviation."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Writes ``<path>.part`` and renames it, so that a full disk or a crash leaves the previous file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes values as JSON."""
    write_atomic(path, json.dumps(values, indent=1).encode())


def write_figure(path: Path, figure: Figure) -> None:
    """Writes a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    write_atomic(path, buffer.getbuffer())


def answer_style(right: bool) -> tuple[str, str]:
    """Returns the color and the sign of a right or wrong answer."""
    return ("#6a9a3b", "\u2713") if right else ("#c8555b", "\u2717")


def mark_answer(axis: Axes, right: bool) -> None:
    """Marks a panel as a right or wrong answer, by a colored frame and a sign."""
    color, sign = answer_style(right)
    axis.spines[:].set(visible=True, color=color, linewidth=2.5)
    axis.text(0.94, 0.06, sign, transform=axis.transAxes, ha="right", color="white", fontsize=9,
              bbox={"facecolor": color, "linewidth": 0, "boxstyle": "round,pad=0.15"})  # fmt: skip


def draw_rows(
    rows: dict[str, Tensor],
    draw: Callable[[Axes, Tensor], object],
    width: float,
    height: float,
    right: Mapping[str, Tensor] | None = None,
    label_width: float = 1.2,
) -> Figure:
    """Draws one row of panels for each name, one panel for each of its patterns.

    Args:
        rows: name of a row -> its patterns, the same number in each row.
        draw: draws a pattern on axes.
        width, height: size of a panel in inches.
        right: name of a row of answers -> whether each answer is right. Its panels are marked, and the other rows have
            no frame.
        label_width: width of the row names in inches.
    """
    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(columns * width + label_width, len(rows) * height), layout="constrained")
    for (name, patterns), axes in zip(rows.items(), figure.subplots(len(rows), columns, squeeze=False), strict=True):
        for place, (pattern, axis) in enumerate(zip(patterns, axes, strict=True)):
            draw(axis, pattern)
            axis.set(xticks=[], yticks=[])
            if right is not None and name in right:
                mark_answer(axis, bool(right[name][place]))
            elif right is not None:
                axis.spines[:].set_visible(False)
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure
