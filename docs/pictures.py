"""The explanatory pictures: footprints of pixels and blocks, attention maps.

To run: python docs/pictures.py   (or: python docs/pictures.py footprint blocks --out folder)

The package computes everything they show, from digits and seeded random patterns; a second run writes the same bytes.
The background is transparent, and the colors are legible on light and dark pages.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from sklearn.datasets import load_digits
from torch import Tensor

import ahop_layers as ah
from ahop_layers.plots import LINES
from benchmarks.harness import report
from benchmarks.harness.report import GRAY
from benchmarks.paper.networks import Network
from benchmarks.paper.training import train

HERE = Path(__file__).parent
ORIGIN, OTHER = LINES["dot"][0], LINES["dis"][0]
PATCHES = ah.patches(8, 8, 2)
STYLE = {**report.STYLE, "svg.fonttype": "path", "font.size": 12}  # text as paths: independent of fonts
# Without date and version of matplotlib, so that the same picture has the same bytes.
NAMELESS: dict[str, dict[str, None]] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}


def digits() -> tuple[Tensor, Tensor]:
    """Returns the 1797 digits of scikit-learn, ``(n, 64)`` with values from -1 to 1, and their classes ``(n,)``."""
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)


class Example(NamedTuple):
    """A query, its two candidate patterns ``(2, d)`` with the original first, and learned weights ``(n,)``."""

    query: Tensor
    keys: Tensor
    weights: Tensor


def example() -> Example:
    """Returns the clearest damaged digit that a trained network recalls and the distance assigns to another class."""
    patterns, shown = digits()
    patterns = patterns[:100]
    variant = ah.variants.Mixed(mask=0.4, noise=0.02)
    memory = Network(patterns, ah.AdaptiveSimilarity(64, bases=("dis",), init="dis"))
    train(memory, variant, steps=600, batch=128)
    index, query = variant.sample(patterns, 2000, torch.Generator().manual_seed(1))
    return _clearest(memory, index, query, shown)


def occluded_example() -> Example:
    """Returns the clearest occluded digit that a memory with blocks recalls and the distance assigns to another class.

    A square of 4 x 4 pixels of the query shows another digit.
    """
    patterns, shown = digits()
    patterns = patterns[:100]
    random = torch.Generator().manual_seed(0)

    def occluded(count: int) -> tuple[Tensor, Tensor]:
        index, other = torch.randint(100, (2, count), generator=random)
        rows, columns = (torch.randint(5, (count, 1), generator=random) for _ in range(2))
        y, x = torch.arange(64) // 8, torch.arange(64) % 8
        inside = (y >= rows) & (y < rows + 4) & (x >= columns) & (x < columns + 4)
        return index, torch.where(inside, patterns[other], patterns[index])

    memory = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(64, bases=("dis",), init="dis", blocks=PATCHES))
    memory.fit(occluded(4000))
    return _clearest(memory, *occluded(2000), shown)


def _clearest(memory: ah.AssociativeMemory | Network, index: Tensor, query: Tensor, shown: Tensor) -> Example:
    """Chooses among ``query (n, d)``, made from the patterns ``index (n,)``, whose classes are ``shown``."""
    similarity, patterns = memory.similarity, memory.patterns
    wrong = ah.AssociativeMemory(patterns, similarity="dis").recall(query)
    rows = ((memory.recall(query) == index) & (shown[wrong] != shown[index])).nonzero()[:, 0]
    pairs = patterns[torch.stack((index[rows], wrong[rows]), 1)]
    curves = ah.footprint(query[rows, None], pairs, base="dis", blocks=similarity.blocks.assignment)[:, 0]
    lead = (curves[:, 0] - curves[:, 1]) / curves[:, 0, -1:].abs()
    best = torch.minimum(lead.amax(-1), -lead[:, -1]).argmax()  # a large lead first, far behind in the end
    return Example(query[rows[best]], pairs[best], similarity.footprint_weight().detach()[0])


def footprint() -> Figure:
    """Draws the steps from a query and two stored digits to their scores: compare, sort, add up, weigh."""
    return _steps(example(), torch.arange(64))


def blocks() -> Figure:
    """Draws the same steps for an occluded query and patches of 2 x 2 pixels."""
    return _steps(occluded_example(), PATCHES)


def _steps(shown: Example, blocks: Tensor) -> Figure:
    """Draws the steps from a query to its scores, for the given block of each pixel."""
    query, keys, weights = shown
    n = int(blocks.max()) + 1
    similarity = torch.zeros(2, n).index_add(1, blocks, -(query - keys).square())
    curves = ah.footprint(query[None], keys, base="dis", blocks=blocks)[0]
    colors = (ORIGIN, OTHER)
    figure = Figure(figsize=(10, 4.4))
    height, tops = 0.29, (0.545, 0.12)
    side = height * 0.44

    def label(x: float, y: float, text: str, **keywords: Any) -> None:
        figure.text(x, y, text, ha="center", va="center", **{"fontsize": 18, **keywords})

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": GRAY, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
        figure.add_artist(FancyArrowPatch(start, end, transform=figure.transFigure, **style))

    names = ("query", "stored", "compare", "sort", "add up", "weigh")
    for x, name in zip((0.066, 0.232, 0.382, 0.532, 0.722, 0.922), names, strict=True):
        label(x, 0.94, name)
    center = sum(tops) / 2 + height / 2
    _pixels(figure.add_axes((0.003, center - height / 2, side, height)), query, GRAY, blocks)
    for y, key, q, color, name in zip(tops, keys, similarity, colors, ("the origin", "a look-alike"), strict=True):
        middle = y + height / 2
        arrow((0.137, center + (middle - center) * 0.25), (0.165, middle))
        _pixels(figure.add_axes((0.168, y, side, height)), key, color, blocks)
        label(0.232, y - 0.06, name, color=color, fontsize=15)
        _disagreement(figure.add_axes((0.318, y, side, height)), q[blocks], color, -2.0 * 64 / n)
        arrow((0.45, middle), (0.468, middle))
        bars = figure.add_axes((0.472, y, 0.12, height))
        bars.fill_between(range(n + 1), [0, *q.sort(descending=True).values], step="pre", color=color, linewidth=0)
        bars.set(ylim=(float(similarity.min()), 0), xlim=(0, n))
        bars.axis("off")
        arrow((0.6, middle), (0.618, center + (middle - center) * 0.6))

    places = range(1, n + 1)
    panel = figure.add_axes((0.625, 0.36, 0.2, 0.49))
    for curve, color in zip(curves, colors, strict=True):
        panel.plot(places, curve.numpy(), color=color, linewidth=2.5)
    strip = figure.add_axes((0.625, 0.12, 0.2, 0.18), sharex=panel)
    strip.bar(places, weights.numpy(), width=1, color=GRAY)
    label(0.725, 0.06, "learned weights", fontsize=15)
    for axis in (panel, strip):
        axis.set(xlim=(0.5, n + 0.5), xticks=[], yticks=[])
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.axhline(0, color=GRAY, linewidth=1)
    verdicts = (("distance \u2717", curves[:, -1]), ("learned \u2713", curves @ weights))
    for y, (name, scores) in zip(tops, verdicts, strict=True):
        axis = figure.add_axes((0.865, y, 0.115, height))
        axis.bar((0, 1), scores.numpy(), width=0.6, color=colors)
        axis.axhline(0, color=GRAY, linewidth=1)
        axis.set(xlim=(-0.6, 1.6))
        axis.axis("off")
        label(0.922, y - 0.06, name, color=colors[int(scores.argmax())], fontsize=15)
    return figure


def _pixels(axis: Axes, pattern: Tensor, color: str, blocks: Tensor) -> None:
    """Draws a digit in a frame, cut into its blocks unless every pixel is one."""
    axis.pcolormesh(pattern.reshape(8, 8).numpy(), cmap="gray", vmin=-1, vmax=1, edgecolors="face", linewidth=0.5)
    if blocks.max() < 63:
        for line in range(2, 8, 2):
            axis.axhline(line, color=color, linewidth=1)
            axis.axvline(line, color=color, linewidth=1)
    _frame(axis, color)


def _disagreement(axis: Axes, similarity: Tensor, color: str, lowest: float) -> None:
    """Draws the distance of the block of each pixel as opacity."""
    clear = LinearSegmentedColormap.from_list("clear", [(*to_rgb(color), 1), (*to_rgb(color), 0)])
    axis.pcolormesh(similarity.reshape(8, 8).numpy(), cmap=clear, vmin=lowest, vmax=0)
    _frame(axis, color)


def _frame(axis: Axes, color: str) -> None:
    axis.set(xticks=[], yticks=[], aspect="equal")
    axis.invert_yaxis()
    for spine in axis.spines.values():
        spine.set(visible=True, color=color, linewidth=2)


def maps() -> Figure:
    """Draws the class token's attention in a small ViT, fine-tuned with the dot product and with adaptive attention."""
    from examples.vit import VisionTransformer, draw_maps

    torch.manual_seed(0)
    patterns, shown = digits()
    images = (patterns.reshape(-1, 1, 8, 8) + 1) / 2
    model = VisionTransformer(channels=1, side=8, classes=10, patch=2, size=(2, 48, 2))
    _train(model, images[:1400], shown[:1400], epochs=15)
    dot, adaptive = model, deepcopy(model)
    ah.adapt_(dot)  # equals the dot product, and gives access to the attention maps
    for parameter in ah.similarity_parameters(dot):
        parameter.requires_grad_(False)
    ah.adapt_(adaptive)
    for each in (dot, adaptive):
        torch.manual_seed(1)
        _train(each, images[:1400], shown[:1400], epochs=8)
    chosen = torch.stack([1400 + (shown[1400:] == digit).nonzero()[0, 0] for digit in range(0, 10, 2)])
    rows = {
        name: list(ah.association_maps(each.eval(), images[chosen]).values())[-1]
        for name, each in (("dot product", dot), ("adaptive", adaptive))
    }
    predicted = adaptive(images[chosen]).argmax(-1)
    answers = [(str(int(label)), str(int(answer))) for label, answer in zip(shown[chosen], predicted, strict=True)]
    return draw_maps(images[chosen], rows, answers, model.grid)


def _train(model: torch.nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PICTURES: dict[str, Callable[[], Figure]] = {
    "footprint.svg": footprint,
    "blocks.svg": blocks,
    "maps.png": maps,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stems = [name.partition(".")[0] for name in PICTURES]
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(stems)} (default: all)")
    parser.add_argument("--out", type=Path, default=HERE / "pictures", help="folder (default: docs/pictures)")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(stems)
    if unknown:
        parser.error(f"expected any of {', '.join(stems)}, got {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # several threads change the last bit of sums, and do not speed up steps this small
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            if name.partition(".")[0] in options.names or not options.names:
                path = options.out / name
                draw().savefig(path, dpi=150, metadata=NAMELESS[path.suffix])
                print(path)


if __name__ == "__main__":
    main()
