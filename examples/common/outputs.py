"""What several examples print and draw: means over seeds, digits, and answers that are marked as right or wrong."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

DIGITS = 1797  # of scikit-learn


def digit_patterns(count: int = DIGITS) -> Tensor:
    """Returns the first handwritten digits of scikit-learn, ``(count, 64)`` with values from -1 to 1."""
    return torch.tensor(load_digits().data[:count] / 8 - 1, dtype=torch.float32)


def spread(values: Sequence[float]) -> str:
    """Returns the mean of several runs and their standard deviation."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def draw_digit(axis: Axes, digit: Tensor) -> None:
    """Draws a pattern of 64 values as an image."""
    axis.imshow(digit.reshape(8, 8).numpy(), cmap="gray_r", vmin=-1, vmax=1)


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
    rows: dict[str, Tensor],  # name of a row -> its patterns, the same number in each row
    draw: Callable[[Axes, Tensor], object],  # draws a pattern
    width: float,  # of a panel in inches
    height: float,
    right: Mapping[str, Tensor],  # name of a row of answers -> whether each answer is right
    label_width: float = 1.2,
) -> Figure:
    """Draws one row of panels for each name, one panel for each of its patterns."""
    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(columns * width + label_width, len(rows) * height), layout="constrained")
    for (name, patterns), axes in zip(rows.items(), figure.subplots(len(rows), columns, squeeze=False), strict=True):
        for place, (pattern, axis) in enumerate(zip(patterns, axes, strict=True)):
            draw(axis, pattern)
            axis.set(xticks=[], yticks=[])
            if name in right:
                mark_answer(axis, bool(right[name][place]))
            else:
                axis.spines[:].set_visible(False)
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure
