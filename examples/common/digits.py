"""The digits of scikit-learn as patterns, for the examples of memories."""

import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import Tensor

DIGITS = 1797
"""How many digits there are."""


def digit_patterns(count: int = DIGITS) -> Tensor:
    """Returns the first handwritten digits, ``(count, 64)`` with values from -1 to 1."""
    return torch.tensor(load_digits().data[:count] / 8 - 1, dtype=torch.float32)


def draw_digit(axis: Axes, digit: Tensor) -> None:
    """Draws a pattern of 64 values as an image."""
    axis.imshow(digit.reshape(8, 8).numpy(), cmap="gray_r", vmin=-1, vmax=1)
