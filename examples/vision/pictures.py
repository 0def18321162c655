"""Pictures of a trained vision transformer: confusion matrix, attention maps, footprint weights."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ahop_layers as ah
from ahop_layers import plots
from examples.common.outputs import answer_style, write_figure
from examples.vision.batches import as_floats
from examples.vision.data import Images
from examples.vision.model import VisionTransformer


@torch.no_grad()
def draw_pictures(model: VisionTransformer, test: Images, classes: list[str], folder: Path) -> list[Path]:
    """Writes the pictures of a model in eval mode and returns their paths."""
    like = next(model.parameters())
    batches = [as_floats(images).to(like) for images in test.images.split(256)]
    predicted = torch.cat([model(images).argmax(-1).cpu() for images in batches])
    figures = {"confusion": confusion(test.labels, predicted, classes)}
    if any(isinstance(part, ah.AdaptiveAttention) for part in model.modules()):
        answers = [(classes[label], classes[answer]) for label, answer in zip(test.labels, predicted, strict=True)]
        figures["maps"] = maps(model, batches[0][:8], answers[:8])
    if any(isinstance(part, ah.AdaptiveSimilarity) for part in model.modules()):
        figures["weights"] = plots.footprint_weights(model, change=True)
    for name, figure in figures.items():
        write_figure(folder / f"{name}.png", figure)
    return [folder / f"{name}.png" for name in figures]


def confusion(labels: Tensor, predicted: Tensor, classes: list[str]) -> Figure:
    """Draws the confusion matrix: true classes as rows, predicted classes as columns."""
    count = len(classes)
    table = torch.bincount(labels * count + predicted, minlength=count**2).reshape(count, count)
    share = table / table.sum(1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axis = figure.subplots()
    accuracy = (labels == predicted).float().mean()
    axis.set(xlabel="predicted class", ylabel="true class", title=f"accuracy {accuracy:.1%}")
    picture = axis.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, label="share of the true class")
    if count <= 20:
        axis.set_xticks(range(count), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
        axis.set_yticks(range(count), classes)
        for row, column in table.nonzero().tolist():
            dark = share[row, column] > 0.5
            text = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if dark else "black"}
            axis.text(column, row, int(table[row, column]), **text)
    return figure


def maps(model: VisionTransformer, images: Tensor, answers: Sequence[tuple[str, str]]) -> Figure:
    """Draws the attention of the class token, averaged over the heads: blocks as rows, images as columns.

    If the similarities are adaptive, the last row shows the last block with the dot product in all similarities.

    Args:
        model: with adaptive attention, in eval mode.
        images: ``(n, channels, height, width)``.
        answers: true and predicted class of each image.
    """
    found = ah.association_maps(model, images)
    rows = {f"block {number}": weights for number, weights in enumerate(found.values(), 1)}
    if any(isinstance(part, ah.AdaptiveSimilarity) for part in model.modules()):
        dot = ah.association_maps(with_dot_product(model), images)
        rows[f"block {len(found)},\ndot product"] = list(dot.values())[-1]
    return draw_maps(images, rows, answers, model.grid)


def with_dot_product(model: VisionTransformer) -> VisionTransformer:
    """Returns a copy of a model whose similarities are the dot product, their initial state."""
    copy = deepcopy(model)
    for part in copy.modules():
        if isinstance(part, ah.AdaptiveSimilarity):
            part.reset_parameters()
    return copy


def draw_maps(
    images: Tensor, rows: dict[str, Tensor], answers: Sequence[tuple[str, str]], grid: tuple[int, int]
) -> Figure:
    """Draws images with their predictions, and rows of association maps with one color scale.

    Args:
        images: ``(n, channels, height, width)``.
        rows: name of a row -> association weights ``(n, heads, queries, keys)``.
        answers: true and predicted class of each image.
        grid: rows and columns of patches.
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
