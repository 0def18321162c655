"""Plots of attention maps, learned weights, explanations and repaired queries.

Matplotlib is imported by the first call. Figures follow its current style, and their colors are legible on light and
dark backgrounds. They are not attached to a window: save them, or display them in a notebook. Every function returns
the figure, and raises an :class:`~ahop_layers.AHopError` if an argument is invalid.
"""

from copy import deepcopy
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_floating, check_module, check_numbers, check_sizes, describe
from ahop_layers.memory import AssociativeMemory
from ahop_layers.ops.reference import fold
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.associator import named_similarities

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The color and the line style of each base: lines that coincide remain distinguishable.
LINES: dict[str, Any] = {"dot": ("#3a93b5", "-"), "dis": ("#d67d2f", (0, (5, 1.5))), "l1": ("#6a9a3b", ":")}


def association_map(
    weights: Tensor, image: Tensor, patches: tuple[int, int] | None = None, *, token: int = 0,
    vmax: float | None = None, ax: "Axes | None" = None,
) -> "Figure":  # fmt: skip
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
        ax: axes to draw on; None creates a figure.

    >>> weights, image = torch.rand(3, 17, 17).softmax(-1), torch.rand(1, 8, 8)
    >>> len(association_map(weights, image, patches=(4, 4)).axes[0].images)  # the image, and the map over it
    2
    """
    check_floating(weights=weights)
    if weights.ndim not in (2, 3):
        raise AHopError(f"weights must be (L, S) or (H, L, S), got {describe(weights)}")
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) < 2 or shape[:-2] not in ((), (1,), (3,)):
        raise AHopError(f"image must be (height, width) or (1 or 3, height, width), got {shape}")
    queries, keys = weights.shape[-2:]
    if not isinstance(token, int) or not 0 <= token < queries:
        raise AHopError(f"token must be an index of one of the {queries} queries, got {token!r}")
    rows, columns = (isqrt(keys),) * 2 if patches is None else patches
    check_sizes(rows=rows, columns=columns)
    if rows * columns > keys:
        raise AHopError(f"patches must be (rows, columns) with at most {keys} patches, got {patches!r}")
    row = weights.detach().float().cpu().reshape(-1, queries, keys).mean(0)[token]
    shown = row[keys - rows * columns :].reshape(rows, columns)
    largest = max(float(shown.max()), 1e-12) if vmax is None else vmax
    check_numbers("a positive number", vmax=largest)
    axis: Axes = _panels(1, 1, (2.4, 2.6))[0, 0] if ax is None else ax
    _show(axis, _as_pixels(image))
    # Patches with small weights are transparent, so that the image remains visible.
    opacity = 0.9 * (shown / largest).clamp(0, 1).sqrt()
    extent = axis.images[0].get_extent()
    axis.imshow(shown.numpy(), cmap="inferno", alpha=opacity.numpy(), extent=extent, vmin=0, vmax=largest)
    return axis.figure  # type: ignore[return-value]


@torch.no_grad()
def footprint_weights(source: nn.Module, *, change: bool = False) -> "Figure":
    """Plots the learned weights ``u`` of every similarity: one column per layer, one row per head, one line per base.

    Entry k of ``u`` is the weight of the k-th largest similarity of a dimension, or of a block, as bars. Constant
    weights are the base similarity itself.

    Args:
        source: an :class:`~ahop_layers.AdaptiveSimilarity`, or a model that contains some.
        change: True plots the difference from the weights after ``reset_parameters``.

    >>> import ahop_layers as ah
    >>> len(footprint_weights(ah.AdaptiveSimilarity(16, num_heads=3)).axes)
    3
    """
    check_module(source=source)
    found = {name: part for name, part in named_similarities(source).items() if isinstance(part, AdaptiveSimilarity)}
    if not found:
        raise AHopError(f"source must contain an AdaptiveSimilarity, got {type(source).__name__} without one")
    heads = max(part.num_heads or 1 for part in found.values())
    axes = _panels(heads, len(found), (2.2, 1.5), sharey=True)
    for column, (name, part) in enumerate(found.items()):
        weights, initial = _weights(part), deepcopy(part)
        if change:
            initial.reset_parameters()
            weights = weights - _weights(initial)
        n = weights.shape[-1]
        title = name.removesuffix("similarity").removesuffix(".") or "similarity"
        axes[0, column].set_title(title if n == part.dim else f"{title}, blocks: {n}", fontsize="small")
        axes[len(weights) - 1, column].set_xlabel("rank of the similarity", fontsize="small")
        for panel in axes[len(weights) :, column]:
            panel.set_visible(False)
        for panel, of_bases in zip(axes[:, column], weights, strict=False):
            _draw_weights(panel, dict(zip(part.base_names(), of_bases, strict=True)), bars=n != part.dim)
    for row, panel in enumerate(axes[:, 0]):
        panel.set_ylabel(f"head {row + 1}: {'change of ' if change else ''}u", fontsize="small")
    axes[0, 0].legend(fontsize="x-small", frameon=False, ncols=2, loc="upper right", borderaxespad=0.2)
    return axes[0, 0].figure


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
    reasons = torch.as_tensor(memory.explain(query, index)).float().cpu()
    shape = memory.patterns.shape[1:]
    if reasons.shape != shape:
        raise AHopError(f"query must be one query of the shape {tuple(shape)}, got several")
    found = int(memory.recall(query)) if index is None else index
    pair = torch.as_tensor(query).reshape(shape), memory.patterns[found]
    asked, pattern = (part.float().cpu().nan_to_num(0.0) for part in pair)
    return _side_by_side({"query": asked, f"pattern {found}": pattern}, {"share of the score": reasons})


@torch.no_grad()
def repair(memory: AssociativeMemory, query: Any) -> "Figure":
    """Plots a query, the repaired query, and the probability that each value of the query is intact.

    Unknown values, and those with a probability below one half, have another color in the bars of a row.

    Args:
        memory: an associative memory after a fit.
        query: one query, an image if the patterns are images.

    >>> import ahop_layers as ah
    >>> memory = ah.AssociativeMemory(torch.rand(40, 2) @ torch.rand(2, 8), "l1")
    >>> report = memory.fit()
    >>> [axis.get_title() for axis in repair(memory, memory.patterns[3]).axes]
    ['query', 'repaired', 'probability of being intact']
    """
    shape, given = memory.patterns.shape[1:], torch.as_tensor(query)
    if given.numel() != shape.numel():
        raise AHopError(f"query must be one query of the shape {tuple(shape)}, got {describe(given)}")
    values, intact = (torch.as_tensor(each).float().cpu().reshape(shape) for each in memory.repair(query))
    asked = given.reshape(shape).float().cpu().nan_to_num(0.0)
    colors = [LINES["dot" if each >= 0.5 else "dis"][0] for each in intact.flatten().tolist()]
    return _side_by_side({"query": asked, "repaired": values}, {"probability of being intact": intact}, colors)


def _side_by_side(patterns: dict[str, Tensor], heat: dict[str, Tensor], colors: Any = LINES["dot"][0]) -> "Figure":
    """Draws two patterns, and a number for each of their values: images side by side, or bars one below another."""
    shape = next(iter(patterns.values())).shape
    axes = _panels(1, 3, (2.2, 2.4)) if len(shape) > 1 else _panels(3, 1, (5.0, 1.1))
    for axis, (title, values) in zip(axes.flat, (patterns | heat).items(), strict=True):
        axis.set_title(title, fontsize="small")
        if len(shape) == 1:
            axis.bar(range(len(values)), values.numpy(), color=colors)
            _style(axis)
        elif title in heat:
            _show(axis, values.reshape(-1, *shape[-2:]).sum(0), cmap="inferno")
        else:
            _show(axis, _as_pixels(values))
    return axes[0, 0].figure


def _show(axis: "Axes", pixels: Tensor, cmap: str = "gray") -> None:
    """Draws an image without ticks."""
    axis.imshow(pixels.numpy(), cmap=cmap)
    axis.set(xticks=[], yticks=[])


def _as_pixels(image: Tensor) -> Tensor:
    """Normalizes an image to values from 0 to 1, ``(height, width)`` or ``(height, width, 3)``."""
    pixels = image.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.permute(1, 2, 0) if image.shape[:-2] == (3,) else pixels.reshape(image.shape[-2:])


def _weights(similarity: AdaptiveSimilarity) -> Tensor:
    """Returns the weights ``u`` of a similarity, ``(heads, n_bases, n)``."""
    weights = fold(similarity.footprint_weight().float().cpu())
    return weights.reshape(-1, *weights.shape[-2:])


def _draw_weights(panel: "Axes", weights: dict[str, Tensor], bars: bool) -> None:
    """Draws the weights ``(n,)`` of each base as a line, or as bars side by side."""
    width = 0.8 / len(weights)
    for number, (base, line) in enumerate(weights.items()):
        ranks = torch.arange(1, len(line) + 1)
        color, style = LINES.get(base, (None, "-."))
        if bars:
            places = ranks + (number - (len(weights) - 1) / 2) * width
            panel.bar(places.numpy(), line.numpy(), width, label=base, color=color)
            panel.locator_params(axis="x", integer=True)
        else:
            panel.plot(ranks.numpy(), line.numpy(), label=base, color=color, linestyle=style, linewidth=1.5)
    _style(panel)
    panel.margins(y=0.25)  # room for the legend


def _style(panel: "Axes") -> None:
    panel.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    panel.tick_params(labelsize="x-small")


def _panels(rows: int, columns: int, size: tuple[float, float], sharey: bool = False) -> Any:
    """Returns the panels of a new figure, a grid of the given size in inches each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns + 0.6, size[1] * rows + 0.6), layout="constrained")
    return figure.subplots(rows, columns, squeeze=False, sharey=sharey)
