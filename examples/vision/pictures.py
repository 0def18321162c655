"""Pictures of a trained vision transformer: confusion matrix, attention maps, footprint weights."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ahop_layers as ah
from ahop_layers import plots
from examples.common.outputs import write_figure
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
        figures["maps"] = maps(model, batches[0][:8])
    if any(isinstance(part, ah.AdaptiveSimilarity) for part in model.modules()):
        figures["weights"] = plots.footprint_weights(model)
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


def maps(model: VisionTransformer, images: Tensor) -> Figure:
    """Draws the attention of the class token, averaged over the heads: blocks as rows, images as columns."""
    found = ah.association_maps(model, images)
    rows = len(found) + 1
    figure = Figure(figsize=(1.2 * len(images) + 0.8, 1.3 * rows), layout="constrained")
    axes = figure.subplots(rows, len(images), squeeze=False)
    for column, image in enumerate(images):
        axes[0, column].imshow(image.cpu().permute(1, 2, 0).numpy(), cmap="gray")
        axes[0, column].set(xticks=[], yticks=[])
        for axis, weights in zip(axes[1:, column], found.values(), strict=True):
            plots.association_map(weights[column], image, model.grid, ax=axis)
    for axis, name in zip(axes[:, 0], ("image", *(f"block {number + 1}" for number in range(len(found)))), strict=True):
        axis.set_ylabel(name)
    return figure
