"""Pictures: where a token looks, what a similarity has learned, and how it comes to a score.

Matplotlib is imported by the first call. Figures follow its style, and their own colours stand out on a light
ground and on a dark one. They belong to no window: save them, or show them in a notebook.
"""

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.reference import BASES, fold
from ahop_layers.similarity import AdaptiveSimilarity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The dot product is what everything starts from, so the others stand out against its blue.
COLOURS = {"dot": "#3a93b5", "dis": "#d98032", "l1": "#6a9a3b"}


def association_map(
    weights: Tensor,
    image: Tensor,
    patches: tuple[int, int] | None = None,
    *,
    token: int = 0,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw where a token looks, over the patches of an image.

    Args:
        weights: ``(L, S)`` or ``(H, L, S)``, of which the mean over the heads is drawn: one sample of what
            :func:`ahop_layers.association_maps` gives. The last ``rows * columns`` keys are the patches, row by row;
            keys before them, such as a class token, are left out.
        image: ``(height, width)``, or ``(channels, height, width)`` with 1 or 3 channels, of any range of values.
        patches: rows and columns of patches; None for a square of all keys but the leading ones.
        token: the query whose weights are drawn; the first is the class token in most models.
        title: stands above the picture.
        ax: where to draw; None for a new figure.

    Returns:
        The figure.

    Raises:
        AHopError: a shape or token that does not fit.

    >>> weights, image = torch.rand(3, 17, 17).softmax(-1), torch.rand(1, 8, 8)
    >>> figure = association_map(weights, image, patches=(4, 4), title="block 1")
    >>> figure.axes[0].get_title()
    'block 1'
    """
    check_floating(weights=weights)
    if weights.ndim not in (2, 3):
        raise AHopError(f"weights must be (L, S) or (H, L, S), got {describe(weights)}")
    row = (weights.mean(0) if weights.ndim == 3 else weights).detach().float().cpu()
    if not 0 <= token < len(row):
        raise AHopError(f"token must be one of the {len(row)} queries, counted from 0, got {token!r}")
    rows, columns = _grid(patches, row.shape[-1])
    grid = row[token, row.shape[-1] - rows * columns :].reshape(rows, columns)
    pixels = _as_pixels(image)
    figure, axis = _canvas(ax, (2.4, 2.6))
    height, width = pixels.shape[:2]
    axis.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1)
    # The image shows through where nobody looks.
    opacity = 0.9 * (grid / grid.max().clamp(min=1e-12)).clamp(min=0).sqrt()
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(grid.numpy(), cmap="inferno", alpha=opacity.numpy(), extent=extent, vmin=0)
    axis.set(xticks=[], yticks=[], xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axis.set_title(title, fontsize="small")
    return figure


def _grid(patches: tuple[int, int] | None, keys: int) -> tuple[int, int]:
    if patches is None:
        side = isqrt(keys)
        return side, side
    rows, columns = patches
    if rows < 1 or columns < 1 or rows * columns > keys:
        raise AHopError(f"patches must be (rows, columns) with at most {keys} patches, got {patches}")
    return rows, columns


def _as_pixels(image: Tensor) -> Tensor:
    """From 0 to 1, ``(height, width)`` or ``(height, width, 3)``."""
    if not isinstance(image, Tensor) or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[0] not in (1, 3)):
        got = describe(image) if isinstance(image, Tensor) else type(image).__name__
        raise AHopError(f"image must be (height, width) or (1 or 3, height, width), got {got}")
    pixels = image.detach().float().cpu()
    pixels = pixels.squeeze(0) if pixels.ndim == 3 and len(pixels) == 1 else pixels
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels


def footprint_weights(source: nn.Module, *, folded: bool = True, ax: "Axes | None" = None) -> "Figure":
    """Draw the learned weights of every similarity: a column for each layer, a row for each head, a line for each base.

    Args:
        source: an :class:`~ahop_layers.AdaptiveSimilarity`, or a model with some inside.
        folded: draw ``u``, the weight of the dimension that agrees k-th best; a flat line is the base similarity
            itself. False: draw ``beta * w``, the weight of the k-th entry of the footprint.
        ax: where to draw, if there is one layer with one head; None for a new figure.

    Returns:
        The figure.

    Raises:
        AHopError: there is no similarity inside, or ``ax`` is given for more than one panel.

    >>> import ahop_layers as ah
    >>> figure = footprint_weights(ah.AdaptiveSimilarity(16, num_heads=3))
    >>> len(figure.axes)
    3
    """
    found = {name: part for name, part in source.named_modules() if isinstance(part, AdaptiveSimilarity)}
    if not found:
        raise AHopError(f"expected a module with an AdaptiveSimilarity inside, got {type(source).__name__} without")
    heads = max(part.num_heads or 1 for part in found.values())
    if ax is not None and (len(found), heads) != (1, 1):
        raise AHopError(f"ax holds one layer with one head, got {len(found)} layers with up to {heads} heads")
    figure, axes = _panels(ax, heads, len(found))
    for column, (name, part) in enumerate(found.items()):
        lines = _weights(part, folded)
        for row in range(heads):
            panel = axes[row][column]
            if row >= len(lines):
                panel.set_visible(False)
                continue
            for base, line in zip(part.bases, lines[row], strict=True):
                panel.plot(range(1, len(line) + 1), line.numpy(), label=base, color=COLOURS.get(base), linewidth=1.5)
            panel.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            if row == 0:
                panel.set_title(name.removesuffix("similarity").removesuffix(".") or "similarity", fontsize="small")
            if column == 0:
                panel.set_ylabel(f"head {row + 1}", fontsize="small")
            if row == len(lines) - 1:
                panel.set_xlabel("k-th best dimension" if folded else "k-th entry of the footprint", fontsize="small")
            panel.tick_params(labelsize="x-small")
    axes[0][0].legend(fontsize="x-small", frameon=False)
    return figure


@torch.no_grad()
def footprint_steps(
    similarity: AdaptiveSimilarity, query: Tensor, keys: Tensor, names: Sequence[str] | None = None
) -> "Figure":
    """Draw how a query gets its score with each key: compared, sorted, added up, weighed; a row for each base.

    The last column adds up the sorted similarities times their weights (``u`` in :func:`footprint_weights`): it ends at
    what the base gives to the score.

    Args:
        similarity: without heads.
        query: ``(d,)``.
        keys: ``(S, d)``, a line each, so a few of them.
        names: of the keys, for the legend; None numbers them.

    Returns:
        The figure.

    Raises:
        AHopError: a similarity with heads, or a shape or number of names that does not fit.

    >>> import ahop_layers as ah
    >>> figure = footprint_steps(ah.AdaptiveSimilarity(16), torch.randn(16), torch.randn(2, 16), ["cat", "dog"])
    >>> len(figure.axes)  # two bases, four steps
    8
    """
    check_floating(query=query, keys=keys)
    if similarity.num_heads is not None:
        raise AHopError(f"expected a similarity without heads, got one with {similarity.num_heads}")
    if query.shape != (similarity.dim,) or keys.ndim != 2 or keys.shape[1] != similarity.dim:
        expected = f"({similarity.dim},) and (S, {similarity.dim})"
        raise AHopError(f"query and keys must be {expected}, got {describe(query)} and {describe(keys)}")
    names = [f"key {number}" for number in range(len(keys))] if names is None else list(names)
    if len(names) != len(keys):
        raise AHopError(f"names must be as many as keys, {len(keys)}, got {len(names)}")
    titles = ("compared", "sorted", "added up: the footprint", "weighed: running total")
    figure, axes = _panels(None, len(similarity.bases), len(titles), sharey=False)
    query = similarity.unbiased(query[None])
    for row, base, weight in zip(axes, similarity.bases, _weights(similarity, folded=True)[0], strict=True):
        compared = BASES[base].value(query, keys).float().cpu()
        ordered = compared.sort(descending=True).values
        steps = (compared, ordered, ordered.cumsum(-1), (weight * ordered).cumsum(-1))
        for panel, lines, title in zip(row, steps, titles, strict=True):
            for name, line in zip(names, lines, strict=True):
                panel.plot(range(1, similarity.dim + 1), line.numpy(), label=name, linewidth=1.5)
            panel.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            panel.tick_params(labelsize="x-small")
            if base == similarity.bases[0]:
                panel.set_title(title, fontsize="small")
        row[0].set_ylabel(base, fontsize="small")
    axes[0][0].legend(fontsize="x-small", frameon=False)
    return figure


@torch.no_grad()
def _weights(part: AdaptiveSimilarity, folded: bool) -> Tensor:
    """The lines of a similarity, ``(heads, n_bases, d)``."""
    weight = (part.beta.unsqueeze(-1) * part.w).float().cpu()
    weight = fold(weight) if folded else weight
    return weight if part.num_heads else weight.unsqueeze(0)


def _canvas(ax: "Axes | None", size: tuple[float, float]) -> "tuple[Figure, Axes]":
    """The figure of one panel, and the panel."""
    figure, axes = _panels(ax, 1, 1, size)
    return figure, axes[0][0]


def _panels(
    ax: "Axes | None", rows: int, columns: int, size: tuple[float, float] = (2.2, 1.5), *, sharey: bool = True
) -> "tuple[Figure, Any]":
    """The figure of a table of panels, each of a size in inches, and the panels; or those of ``ax``."""
    if ax is not None:
        return ax.figure, [[ax]]  # type: ignore[return-value]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns + 0.6, size[1] * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey and rows * columns > 1)
