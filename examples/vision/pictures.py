"""Pictures of a trained vision transformer: confusion matrix, attention maps, footprint weights."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay, accuracy_score
from torch import Tensor

import ahop_layers as ah
from ahop_layers import plots
from benchmarks.image_sets import Images
from examples.common.outputs import answer_style
from examples.vision.batches import InOrder, as_floats
from examples.vision.model import VisionTransformer


@torch.no_grad()
def draw_pictures(model: VisionTransformer, test: Images, classes: list[str], folder: Path) -> list[Path]:
    """Writes the pictures of a model in eval mode and returns their paths."""
    like = next(model.parameters())
    predicted = torch.cat([model(as_floats(images).to(like)).argmax(-1).cpu() for images, _ in InOrder(test)])
    figures = {"confusion": confusion(test.labels, predicted, classes)}
    if any(isinstance(part, ah.AdaptiveSimilarity) for part in model.modules()):
        answers = [(classes[label], classes[answer]) for label, answer in zip(test.labels, predicted, strict=True)]
        figures["maps"] = maps(model, as_floats(test.images[:8]).to(like), answers[:8])
        figures["weights"] = plots.footprint_weights(model, change=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=100)
    return [folder / f"{name}.png" for name in figures]


def confusion(labels: Tensor, predicted: Tensor, classes: list[str]) -> Figure:
    """Draws the confusion matrix: true classes as rows, predicted classes as columns."""
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axis, few = figure.subplots(), len(classes) <= 20
    ConfusionMatrixDisplay.from_predictions(
        labels, predicted, labels=range(len(classes)), display_labels=classes, include_values=few, cmap="Blues",
        xticks_rotation="vertical" if max(map(len, classes)) > 2 else "horizontal", ax=axis,
    )  # fmt: skip
    axis.set(xlabel="predicted class", ylabel="true class", title=f"accuracy {accuracy_score(labels, predicted):.1%}")
    if not few:
        axis.set(xticks=[], yticks=[])
    return figure


def maps(model: VisionTransformer, images: Tensor, answers: Sequence[tuple[str, str]]) -> Figure:
    """Draws the attention of the class token, averaged over the heads: blocks as rows, images as columns.

    The last row shows the last block with the dot product, the initial state, in all similarities.
    """
    initial = deepcopy(model)
    for part in initial.modules():
        if isinstance(part, ah.AdaptiveSimilarity):
            part.reset_parameters()
    found, dot = (list(ah.association_maps(each, images).values()) for each in (model, initial))
    rows = {f"block {number}": weights for number, weights in enumerate(found, 1)}
    return draw_maps(images, {**rows, f"block {len(found)},\ndot product": dot[-1]}, answers, model.grid)


def draw_maps(
    images: Tensor, rows: dict[str, Tensor], answers: Sequence[tuple[str, str]], grid: tuple[int, int]
) -> Figure:
    """Draws images with their true and predicted classes, and named rows of maps ``(n, heads, queries, keys)``.

    All maps have one color scale. The grid has the number of rows and columns of patches.
    """
    figure = Figure(figsize=(1.2 * len(images) + 1.6, 1.25 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots(len(rows) + 1, len(images), squeeze=False)
    patches = grid[0] * grid[1]
    largest = max(float(weights[..., 0, -patches:].mean(1).max()) for weights in rows.values())
    for column, (image, (true, predicted)) in enumerate(zip(images, answers, strict=True)):
        axes[0, column].imshow(image.cpu().permute(1, 2, 0).numpy(), cmap="gray")
        axes[0, column].set(xticks=[], yticks=[])
        color, sign = answer_style(true == predicted)
        axes[0, column].set_title(f"true {true}\npredicted {predicted} {sign}", fontsize="small", color=color)
        for axis, weights in zip(axes[1:, column], rows.values(), strict=True):
            plots.association_map(weights[column], image, grid, vmax=largest, ax=axis)
    for axis, name in zip(axes[:, 0], ("image", *rows), strict=True):
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
    figure.colorbar(axes[1, 0].images[-1], ax=axes[1:], label="attention weight", shrink=0.9)
    return figure
