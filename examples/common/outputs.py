"""Output files that are written atomically, and the pictures that several examples draw."""

import io
import json
import os
from collections.abc import Callable, Sequence
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
    figure.savefig(buffer, dpi=130)
    write_atomic(path, buffer.getbuffer())


def draw_rows(rows: dict[str, Tensor], draw: Callable[[Axes, Tensor], object], width: float, height: float) -> Figure:
    """Draws one row of panels for each name, one panel for each of its patterns; sizes are in inches per panel."""
    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(columns * width, len(rows) * height), layout="constrained")
    for (name, patterns), axes in zip(rows.items(), figure.subplots(len(rows), columns, squeeze=False), strict=True):
        for pattern, axis in zip(patterns, axes, strict=True):
            draw(axis, pattern)
            axis.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure
