"""Results of a bag classifier: the ROC curve, and the instances of some bags ranked by weight."""

import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

from examples.common.outputs import answer_style, write_atomic, write_figure, write_json

SHOWN, RANKED = 8, 100
"""Number of bags that are shown, and the largest number of instances of each in the table."""


class Decided(NamedTuple):
    """A classified test bag: name, label, logit, instances ``(size, features)`` and their weights ``(size,)``."""

    name: str
    label: float
    logit: float
    instances: Tensor
    weights: Tensor


def write(folder: Path, results: dict[str, Any], labels: Tensor, logits: Tensor, bags: list[Decided]) -> None:
    """Writes the results of a run."""
    write_json(folder / "results.json", results)
    write_figure(folder / "roc.png", draw_roc(labels, logits, results["test_auc"]))
    write_atomic(folder / "instances.csv", _ranked(bags).encode())
    if bags and bags[0].instances.shape[1] in (64, 784):
        write_figure(folder / "instances.png", draw_digits(bags))


def some_of_each(labels: Tensor) -> list[int]:
    """Chooses the bags to show: half with label 1 and half with label 0, if there are enough."""
    ones, zeros = ((labels == label).nonzero().flatten()[: SHOWN // 2] for label in (1, 0))
    return torch.cat((ones, zeros)).tolist()


def _ranked(bags: list[Decided]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(("bag", "label", "probability", "rank", "instance", "weight"))
    for bag in bags:
        probability = f"{torch.tensor(bag.logit).sigmoid():.4f}"
        for rank, instance in enumerate(bag.weights.argsort(descending=True)[:RANKED].tolist(), 1):
            weight = f"{bag.weights[instance]:.6f}"
            table.writerow((bag.name, int(bag.label), probability, rank, instance, weight))
    return text.getvalue()


def draw_roc(labels: Tensor, logits: Tensor, area: float) -> Figure:
    """Draws the ROC curve."""
    false, true, _ = roc_curve(labels.numpy(), logits.numpy())
    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(false, true)
    axis.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    axis.set(xlabel="false positive rate", ylabel="true positive rate", title=f"test AUC {area:.4f}", aspect="equal")
    axis.grid(alpha=0.3)
    return figure


def draw_digits(bags: list[Decided], most: int = 10) -> Figure:
    """Draws the digits of each bag in descending order of weight, and whether the prediction is right."""
    figure = Figure(figsize=(0.8 * most + 2.2, 1.05 * len(bags) + 0.3), layout="constrained")
    figure.suptitle("digits of test bags by attention weight, shown above each digit; label 1: holds a nine", size=10)
    side = math.isqrt(bags[0].instances.shape[1])
    for row, bag in zip(figure.subplots(len(bags), most, squeeze=False), bags, strict=True):
        order = bag.weights.argsort(descending=True).tolist()[:most]
        for axis in row:
            axis.set(xticks=[], yticks=[])
            axis.set_frame_on(False)
        for axis, instance in zip(row, order, strict=False):
            digit = np.asarray(bag.instances[instance].reshape(side, side))
            axis.imshow(digit, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(f"{bag.weights[instance]:.2f}", fontsize=8)
        color, sign = answer_style((bag.logit >= 0) == bool(bag.label))
        text = f"label {bag.label:.0f}, predicted {torch.tensor(bag.logit).sigmoid():.2f} {sign}"
        row[0].set_ylabel(text, rotation=0, ha="right", va="center", fontsize=9, color=color)
    return figure
