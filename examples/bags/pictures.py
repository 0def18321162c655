"""Results of a bag classifier: the ROC curve, and the instances of some bags ranked by weight."""

import csv
import math
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from sklearn.metrics import RocCurveDisplay
from torch import Tensor

from examples.common.outputs import answer_style


class Decided(NamedTuple):
    """A classified test bag: name, label, probability, instances ``(size, features)`` and weights ``(size,)``."""

    name: str
    label: float
    probability: float
    instances: Tensor
    weights: Tensor


def draw_roc(labels: Tensor, logits: Tensor) -> Figure:
    """Draws the ROC curve."""
    figure = Figure(figsize=(4.2, 4), layout="constrained")
    RocCurveDisplay.from_predictions(labels, logits, ax=figure.subplots(), plot_chance_level=True)
    return figure


def write_ranked(path: Path, bags: list[Decided], most: int = 100) -> None:
    """Writes a table of the instances of each bag with the largest weights."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("bag", "label", "probability", "rank", "instance", "weight"))
        for bag in bags:
            for rank, instance in enumerate(bag.weights.argsort(descending=True)[:most].tolist(), 1):
                weight = f"{bag.weights[instance]:.6f}"
                table.writerow((bag.name, int(bag.label), f"{bag.probability:.4f}", rank, instance, weight))


def draw_digits(bags: list[Decided], most: int = 10) -> Figure:
    """Draws the digits of each bag in descending order of weight, and whether the prediction is right."""
    figure = Figure(figsize=(0.8 * most + 2.2, 1.05 * len(bags) + 0.3), layout="constrained")
    figure.suptitle("digits of test bags by attention weight, shown above each digit; label 1: holds a nine", size=10)
    side = math.isqrt(bags[0].instances.shape[1])
    for row, bag in zip(figure.subplots(len(bags), most, squeeze=False), bags, strict=True):
        for axis in row:
            axis.set(xticks=[], yticks=[], frame_on=False)
        for axis, instance in zip(row, bag.weights.argsort(descending=True).tolist(), strict=False):
            axis.imshow(bag.instances[instance].reshape(side, side).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axis.set_title(f"{bag.weights[instance]:.2f}", fontsize=8)
        color, sign = answer_style((bag.probability >= 0.5) == bool(bag.label))
        text = f"label {bag.label:.0f}, predicted {bag.probability:.2f} {sign}"
        row[0].set_ylabel(text, rotation=0, ha="right", va="center", fontsize=9, color=color)
    return figure
