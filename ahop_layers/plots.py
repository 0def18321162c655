"""Plots of attention maps, learned weights, the steps that compute a score, similarities of blocks, and explanations.

Matplotlib is imported by the first call. Figures follow its current style, and their colors are legible on light and
dark backgrounds. They are not attached to a window: save them, or display them in a notebook. Every function returns
the figure, and raises an :class:`~ahop_layers.AHopError` if an argument is invalid.
"""

from collections.abc import Sequence
from copy import deepcopy
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_floating, check_module, describe
from ahop_layers.memory import AssociativeMemory
from ahop_layers.ops.reference import fold
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.associator import named_similarities

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The initial similarity, the dot product, is blue; the others contrast with it.
COLORS = {"dot": "#3a93b5", "dis": "#d67d2f", "l1": "#6a9a3b"}
# Lines that coincide remain distinguishable: each base and each key has a line style of its own.
STYLES = {"dot": "-", "dis": (0, (5, 1.5)), "l1": ":"}
CYCLE = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), ":")


def association_map(
    weights: Tensor,
    image: Tensor,
    patches: tuple[int, int] | None = None,
    *,
    token: int = 0,
    title: str = "",
    vmax: float | None = None,
    colorbar: bool = False,
    ax: "Axes | None" = None,
) -> "Figure":
    """Plots the association weights of one token over the patches of an image.

    Args:
        weights: ``(L, S)`` or ``(H, L, S)``, one sample of a result of :func:`ahop_layers.association_maps`. Heads are
            averaged. The last ``rows * columns`` keys are the patches in row-major order; earlier keys, such as a class
            token, are not shown.
        image: ``(height, width)``, or ``(channels, height, width)`` with 1 or 3 channels. Values are normalized.
        patches: number of rows and columns of patches. None means the largest square grid that the keys fill.
        token: index of the query; in most models 0 is the class token.
        vmax: weight of the lightest color; None means the largest weight of this map. Maps that are compared need a
            common one.
        title, colorbar, ax: title of the plot, whether to draw a color bar, and axes to draw on; None creates a figure.

    >>> weights, image = torch.rand(3, 17, 17).softmax(-1), torch.rand(1, 8, 8)
    >>> association_map(weights, image, patches=(4, 4), title="block 1").axes[0].get_title()
    'block 1'
    """
    check_floating(weights=weights)
    if weights.ndim not in (2, 3):
        raise AHopError(f"weights must be (L, S) or (H, L, S), got {describe(weights)}")
    row = (weights.mean(0) if weights.ndim == 3 else weights).detach().float().cpu()
    if not isinstance(token, int) or not 0 <= token < len(row):
        raise AHopError(f"token must be an index of one of the {len(row)} queries, got {token!r}")
    if vmax is not None and not (isinstance(vmax, (int, float)) and vmax > 0):
        raise AHopError(f"vmax must be a positive number, got {vmax!r}")
    rows, columns = _grid(patches, row.shape[-1])
    grid = row[token, row.shape[-1] - rows * columns :].reshape(rows, columns)
    pixels = _as_pixels(image)
    figure, axis = _show(pixels, title, ax, cmap="gray", vmin=0, vmax=1)
    largest = max(float(grid.max()), 1e-12) if vmax is None else vmax
    # Patches with small weights are transparent, so that the image remains visible.
    opacity = 0.9 * (grid / largest).clamp(0, 1).sqrt()
    extent = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
    overlay = axis.imshow(grid.numpy(), cmap="inferno", alpha=opacity.numpy(), extent=extent, vmin=0, vmax=largest)
    if colorbar:
        figure.colorbar(overlay, ax=axis, label="association weight")
    return figure


def _show(pixels: Tensor, title: str, ax: "Axes | None", **options: Any) -> "tuple[Figure, Axes]":
    """Draws an image without ticks."""
    figure, ((axis,),) = _panels(ax, 1, 1, size=(2.4, 2.6))
    axis.imshow(pixels.numpy(), **options)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize="small")
    return figure, axis


def _grid(patches: tuple[int, int] | None, keys: int) -> tuple[int, int]:
    given = (isqrt(keys),) * 2 if patches is None else patches
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not pair or not all(isinstance(count, int) and count >= 1 for count in given) or prod(given) > keys:
        raise AHopError(f"patches must be (rows, columns) with at most {keys} patches, got {patches!r}")
    return given[0], given[1]


def _as_pixels(image: Tensor) -> Tensor:
    """Normalizes an image to values from 0 to 1, ``(height, width)`` or ``(height, width, 3)``."""
    shape = tuple(image.shape) if isinstance(image, Tensor) else ()
    if len(shape) not in (2, 3) or shape[:-2] not in ((), (1,), (3,)):
        got = shape or type(image).__name__
        raise AHopError(f"image must be (height, width) or (1 or 3, height, width), got {got}")
    pixels = image.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.permute(1, 2, 0) if shape[:-2] == (3,) else pixels.reshape(shape[-2:])


def footprint_weights(
    source: nn.Module, *, folded: bool = True, change: bool = False, ax: "Axes | None" = None
) -> "Figure":
    """Plots the learned weights of every similarity: one row per head, one line per base.

    A column is a layer. Weights of blocks are bars by the rank of the block.

    Args:
        source: an :class:`~ahop_layers.AdaptiveSimilarity`, or a model that contains some.
        folded: True plots ``u``, the weight of the k-th largest similarity of a dimension or block; constant weights
            are the base similarity itself. False plots ``beta * w``, the weight of the k-th footprint entry.
        change: True plots the difference from the initial weights, those of ``reset_parameters``.
        ax: axes to draw on, for one layer with one head; None creates a figure.

    >>> import ahop_layers as ah
    >>> len(footprint_weights(ah.AdaptiveSimilarity(16, num_heads=3)).axes)
    3
    """
    check_module(source=source)
    found = {name: part for name, part in named_similarities(source).items() if isinstance(part, AdaptiveSimilarity)}
    if not found:
        raise AHopError(f"source must contain an AdaptiveSimilarity, got {type(source).__name__} without one")
    heads = max(part.num_heads or 1 for part in found.values())
    if ax is not None and (len(found), heads) != (1, 1):
        raise AHopError(f"ax needs one layer with one head, got {len(found)} layers with up to {heads} heads")
    figure, axes = _panels(ax, heads, len(found))
    quantity = ("change of " if change else "") + ("weight u" if folded else "weight \u03b2w")
    for column, (name, part) in enumerate(found.items()):
        lines, by_block = _weights(part, folded), part.blocks.assignment is not None
        if change:
            initial = deepcopy(part)
            initial.reset_parameters()
            lines = lines - _weights(initial, folded)
        largest = "k-th most similar block" if by_block else "k-th largest similarity"
        title = name.removesuffix("similarity").removesuffix(".") or "similarity"
        axes[0][column].set_title(title + _blocks_of(part), fontsize="small")
        axes[len(lines) - 1][column].set_xlabel(largest if folded else "k-th footprint entry", fontsize="small")
        for row in range(heads):
            panel = axes[row][column]
            panel.set_visible(row < len(lines))
            if row < len(lines):
                _draw_weights(panel, dict(zip(part.base_names(), lines[row], strict=True)), by_block)
            if column == 0:
                panel.set_ylabel(quantity if heads == 1 else f"head {row + 1}\n{quantity}", fontsize="small")
    axes[0][0].legend(fontsize="x-small", frameon=False, ncols=2, loc="upper right", borderaxespad=0.2)
    return figure


def _draw_weights(panel: "Axes", weights: dict[str, Tensor], by_block: bool) -> None:
    """Draws the weights ``(n,)`` of each base as a line, or by rank of block as bars side by side."""
    for number, (base, line) in enumerate(weights.items()):
        ranks, color = torch.arange(1, len(line) + 1), COLORS.get(base)
        if by_block:
            width = 0.8 / len(weights)
            places = ranks + (number - (len(weights) - 1) / 2) * width
            panel.bar(places.numpy(), line.numpy(), width, label=base, color=color)
            panel.locator_params(axis="x", integer=True)
        else:
            style = STYLES.get(base, "-.")
            panel.plot(ranks.numpy(), line.numpy(), label=base, color=color, linestyle=style, linewidth=1.5)
    _style(panel)
    panel.margins(y=0.25)  # room for the legend


def _style(panel: "Axes") -> None:
    panel.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    panel.tick_params(labelsize="x-small")


@torch.no_grad()
def footprint_steps(
    similarity: AdaptiveSimilarity, query: Tensor, keys: Tensor, names: Sequence[str] | None = None
) -> "Figure":
    """Plots the steps that compute the score of a query with each key, one row per base.

    The steps are the similarities of dimensions or blocks, these sorted, their cumulative sum, which is the footprint,
    and the cumulative sum of the sorted similarities times their weights ``u`` (see :func:`footprint_weights`). The
    last value of the last step is the contribution of that row to the score.

    Args:
        similarity: a similarity without heads.
        query, keys: ``(d,)`` and ``(S, d)``; each key is one line.
        names: names of the keys for the legend; None numbers them.

    >>> import ahop_layers as ah
    >>> len(footprint_steps(ah.AdaptiveSimilarity(16), torch.randn(16), torch.randn(2, 16)).axes)  # 2 bases, 4 steps
    8
    """
    check_floating(query=query, keys=keys)
    _check_headless(similarity)
    if query.shape != (similarity.dim,) or keys.ndim != 2 or keys.shape[1] != similarity.dim:
        expected = f"({similarity.dim},) and (S, {similarity.dim})"
        raise AHopError(f"query and keys must be {expected}, got {describe(query)} and {describe(keys)}")
    names = [f"key {number}" for number in range(len(keys))] if names is None else list(names)
    if len(names) != len(keys):
        raise AHopError(f"names must have one entry for each of the {len(keys)} keys, got {len(names)}")
    unit = "dimension" if similarity.blocks.assignment is None else "block"
    titles = (f"similarity per {unit}", "sorted", "footprint", "weighted cumulative sum")
    figure, axes = _panels(None, len(similarity.bases), len(titles), sharey=False)
    for row, base, label, weight in zip(
        axes, similarity.bases, similarity.base_names(), _weights(similarity, folded=True)[0], strict=True
    ):
        similarities = similarity.block_similarities(query[None], keys, base)[0].float().cpu()
        ordered = similarities.sort(descending=True).values
        steps = (similarities, ordered, ordered.cumsum(-1), (weight * ordered).cumsum(-1))
        for panel, lines in zip(row, steps, strict=True):
            for key, (name, line) in enumerate(zip(names, lines, strict=True)):
                style = CYCLE[key % len(CYCLE)]
                panel.plot(range(1, len(line) + 1), line.numpy(), label=name, linewidth=1.5, linestyle=style)
            _style(panel)
        row[0].set_ylabel(label + _blocks_of(similarity), fontsize="small")
    for column, title in enumerate(titles):
        axes[0][column].set_title(title, fontsize="small")
        axes[-1][column].set_xlabel(f"rank of the {unit}" if column else unit, fontsize="small")
    axes[0][0].legend(fontsize="x-small", edgecolor="none", framealpha=0.8)
    return figure


@torch.no_grad()
def block_map(
    similarity: AdaptiveSimilarity,
    query: Tensor,
    key: Tensor,
    *,
    base: str | None = None,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Figure":
    """Plots how similar the blocks of two images are: the more similar a block, the lighter.

    Args:
        similarity: a similarity without heads for flattened images, with channels first.
        query, key: two images ``(height, width)`` or ``(channels, height, width)``.
        base: base similarity to show, by default the first one.
        title, ax: title of the plot, and axes to draw on; None creates a figure.

    >>> import ahop_layers as ah
    >>> similarity = ah.AdaptiveSimilarity(64, blocks=ah.Blocks(ah.patches(8, 8, 4), normalize=True))
    >>> block_map(similarity, torch.rand(8, 8), torch.rand(8, 8), title="distance").axes[0].get_title()
    'distance'
    """
    check_floating(query=query, key=key)
    _check_headless(similarity)
    if query.ndim not in (2, 3) or query.shape != key.shape or query.numel() != similarity.dim:
        expected = f"(height, width) or (channels, height, width) with {similarity.dim} values"
        raise AHopError(f"query and key must be {expected}, got {describe(query)} and {describe(key)}")
    rows = query.reshape(1, -1), key.reshape(1, -1)
    values = similarity.block_similarities(*rows, base or similarity.bases[0])[0, 0].float().cpu()
    pixels = values[similarity.blocks.numbers(similarity.dim)].reshape(-1, *query.shape[-2:]).mean(0)
    return _show(pixels, title, ax, cmap="inferno")[0]


@torch.no_grad()
def explanation(memory: AssociativeMemory, query: Any, index: int | None = None) -> "Figure":
    """Plots a query, the pattern that a memory finds for it, and what each value adds to the score.

    Args:
        memory: an associative memory.
        query: one query, an image if the patterns are images.
        index: the pattern; None for the one with the largest score.

    >>> import ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.rand(9, 8, 8))
    >>> [axis.get_title() for axis in explanation(memory, memory.patterns[3]).axes]
    ['query', 'pattern 3', 'share of the score']
    """
    reasons = torch.as_tensor(memory.explain(query, index))
    shape = memory.patterns.shape[1:]
    if reasons.shape != shape:
        raise AHopError(f"query must be one query of the shape {tuple(shape)}, got several")
    found = int(memory.recall(query)) if index is None else index
    asked = torch.as_tensor(query).reshape(shape).float().cpu()
    match, reasons = memory.patterns[found].float().cpu(), reasons.float().cpu()
    titles = ("query", f"pattern {found}", "share of the score")
    if len(shape) == 1:
        figure, axes = _panels(None, 3, 1, size=(5.0, 1.1), sharey=False)
        for (axis,), values, title in zip(axes, (asked, match, reasons), titles, strict=True):
            axis.bar(range(len(values)), values.nan_to_num(0.0).numpy(), color=COLORS["dot"])
            axis.set_title(title, fontsize="small")
            _style(axis)
        return figure
    figure, axes = _panels(None, 1, 3, size=(2.2, 2.4))
    low = reasons.sum(0) if reasons.ndim == 3 else reasons
    pixels = (_as_pixels(asked.nan_to_num(0.0)), _as_pixels(match.nan_to_num(0.0)), low)
    for axis, image, title in zip(axes[0], pixels, titles, strict=True):
        _show(image, title, axis, cmap="inferno" if image is low else "gray")
    return figure


def _check_headless(similarity: object) -> None:
    if not isinstance(similarity, AdaptiveSimilarity):
        raise AHopError(f"similarity must be an AdaptiveSimilarity, got {type(similarity).__name__}")
    if similarity.num_heads is not None:
        raise AHopError(f"similarity must have num_heads=None, got {similarity.num_heads}")


def _blocks_of(part: AdaptiveSimilarity) -> str:
    """Returns a suffix with the number of blocks, empty for a similarity without blocks."""
    if part.blocks.assignment is None:
        return ""
    n = part.blocks.count(part.dim)
    return f", {n} {'normalized ' if part.blocks.normalize else ''}block{'s' if n > 1 else ''}"


@torch.no_grad()
def _weights(part: AdaptiveSimilarity, folded: bool) -> Tensor:
    """Returns the weights of a similarity, ``(heads, n_bases, n)``."""
    weight = part.footprint_weight().float().cpu()
    weight = fold(weight) if folded else weight
    return weight if part.num_heads else weight.unsqueeze(0)


def _panels(
    ax: "Axes | None", rows: int, columns: int, size: tuple[float, float] = (2.2, 1.5), *, sharey: bool = True
) -> "tuple[Figure, Any]":
    """Returns a figure with a grid of panels of the given size in inches, and the panels; or those of ``ax``."""
    if ax is not None:
        return ax.figure, [[ax]]  # type: ignore[return-value]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns + 0.6, size[1] * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey and rows * columns > 1)
