"""What a bag classifier reaches and looks at: the ROC curve and the ranked instances of examples/mil.py."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

SHOWN, RANKED = 8, 100
"""How many bags are shown, and how many instances of each at most."""


class Decided(NamedTuple):
    """A bag under test: its name, label, logit, instances ``(size, features)`` and their weights ``(size,)``."""

    name: str
    label: float
    logit: float
    instances: Tensor
    weights: Tensor


def write(folder: Path, results: dict[str, Any], labels: Tensor, logits: Tensor, bags: list[Decided]) -> None:
    """Write everything a run ends with; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "results.json": json.dumps(results, indent=1).encode(),
        "roc.png": _png(draw_roc(labels, logits, results["test_auc"])),
        "instances.csv": _ranked(bags).encode(),
    }
    if bags and bags[0].instances.shape[1] == 784:
        files["instances.png"] = _png(draw_digits(bags))
    for name, content in files.items():
        (folder / f"{name}.part").write_bytes(content)
        os.replace(folder / f"{name}.part", folder / name)


def some_of_each(labels: Tensor) -> list[int]:
    """Half of the bags to show have label 1, half label 0, as far as there are enough."""
    ones, zeros = ((labels == label).nonzero().flatten()[: SHOWN // 2] for label in (1, 0))
    return torch.cat((ones, zeros)).tolist()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    return buffer.getvalue()


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
    """How many bags of label 1 are found against how many of label 0 are taken for one."""
    false, true, _ = roc_curve(labels.numpy(), logits.numpy())
    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(false, true)
    axis.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    axis.set(xlabel="false positive rate", ylabel="true positive rate", title=f"test AUC {area:.4f}", aspect="equal")
    axis.grid(alpha=0.3)
    return figure


def draw_digits(bags: list[Decided], most: int = 10) -> Figure:
    """The digits of each bag from the heaviest to the lightest, with their weights."""
    figure = Figure(figsize=(0.8 * most + 2.2, 1.05 * len(bags)), layout="constrained")
    for row, bag in zip(figure.subplots(len(bags), most, squeeze=False), bags, strict=True):
        order = bag.weights.argsort(descending=True).tolist()[:most]
        for axis in row:
            axis.set(xticks=[], yticks=[])
            axis.set_frame_on(False)
        for axis, instance in zip(row, order, strict=False):
            axis.imshow(np.asarray(bag.instances[instance].reshape(28, 28)), cmap="gray_r", vmin=0, vmax=1)
            axis.set_title(f"{bag.weights[instance]:.2f}", fontsize=8)
        said = f"label {bag.label:.0f}, said {torch.tensor(bag.logit).sigmoid():.2f}"
        row[0].set_ylabel(said, rotation=0, ha="right", va="center", fontsize=8)
    return figure
