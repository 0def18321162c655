"""Two memories and a link: recognise a corrupted digit, follow its link, and retrieve what belongs to it.

To run: python examples/multimodal.py

A concept is a pair of real patterns: a handwritten digit (64 pixels) and the measurements of a tumour's cells (30
numbers), both shipped with scikit-learn. One memory holds the digits, another the measurements. In the first phase a
corrupted digit is looked up. Its concept leads to a trace of the measurements, which is no clean copy but a variant
itself; in the second phase that trace is looked up among all measurements. Only if both find the right pattern is the
concept complete. Each modality is corrupted in its own way, which no fixed similarity knows. Writes out/multimodal.png.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor
from tqdm import tqdm

import ahop_layers as ah
from ahop_layers.variants import Mixed
from examples.common.outputs import output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = Mixed(mask=0.2, noise=0.05, bias=0.6, seed=1)
TRACES = Mixed(mask=0.1, noise=0.002, bias=0.6, seed=2)
PAIRS = [("M-Hop", "M-Hop"), ("K2-Hop", "K2-Hop"), ("K2-Hop", "A-Hop"), ("A-Hop", "K2-Hop"), ("A-Hop", "A-Hop")]


def digits(count: int) -> Tensor:
    """Handwritten digits (count, 64) in [-1, 1]."""
    return torch.tensor(load_digits().data[:count] / 8 - 1, dtype=torch.float32)


def measurements(count: int) -> Tensor:
    """Cell measurements (count, 30), standardised and squeezed into [-1, 1]."""
    values = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    return torch.tanh((values - values.mean(0)) / values.std(0))[:count]


def fitted(name: str, patterns: Tensor, variant: Mixed, steps: int) -> ah.AssociativeMemory:
    """A memory of the patterns that has seen variants of them, where it can learn."""
    keywords = {"debias": True} if name == "A-Hop" else {}
    memory = ah.AssociativeMemory.preset(name, patterns, **keywords)
    if name != "M-Hop":
        memory.fit(variant, epochs=steps, lr=0.05 if name == "A-Hop" else 0.01, batch=64, progress=False)
    return memory


def complete(
    images: ah.AssociativeMemory, facts: ah.AssociativeMemory, query: Tensor, links: Tensor
) -> tuple[Tensor, Tensor]:
    """Both phases: the concept an image is recognised as, and the one its linked trace is recognised as."""
    first = images.recall(query)
    return first, facts.recall(links[first])


def save_picture(path: Path, rows: dict[str, Tensor], index: Tensor) -> None:
    """A column for each concept: digits as pictures, measurements as bars."""
    figure, axes = plt.subplots(len(rows), len(index), figsize=(len(index) * 1.2, len(rows)), layout="constrained")
    for (name, patterns), row in zip(rows.items(), axes, strict=True):
        for pattern, axis in zip(patterns, row, strict=True):
            if len(pattern) == 64:
                axis.imshow(pattern.reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            else:
                axis.bar(range(len(pattern)), pattern, color="#2a7f9e")
                axis.set_ylim(-1.5, 1.5)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Fit the memories, run both phases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concepts", type=int, nargs="+", default=[128, 256, 512], help="how many, at most 569")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each memory (60)")
    parser.add_argument("--queries", type=int, default=500, help="corrupted digits to look up (500)")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (0)")
    parser.add_argument("--out", type=output_folder, default="out", help="folder for the picture (out)")
    arguments = parser.parse_args()
    if not all(1 <= count <= 569 for count in arguments.concepts):
        parser.error(f"concepts must be between 1 and 569, got {arguments.concepts}")

    generator = torch.Generator().manual_seed(arguments.seed)
    accuracy: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    for count in tqdm(arguments.concepts, desc="fitting memories", unit="size"):
        looks, facts = digits(count), measurements(count)
        links = TRACES.corrupt(facts, generator)
        index, query = IMAGES.sample(looks, arguments.queries, generator)
        names = dict.fromkeys(name for pair in PAIRS for name in pair)
        first = {name: fitted(name, looks, IMAGES, arguments.steps) for name in names}
        second = {name: fitted(name, facts, TRACES, arguments.steps) for name in names}
        for pair in PAIRS:
            concept, found = complete(first[pair[0]], second[pair[1]], query, links)
            accuracy[pair].append(((concept == index) & (found == index)).double().mean().item())

    print(f"\nconcepts completed, of {arguments.queries} corrupted digits\n")
    print(f"{'phase 1':<10}{'phase 2':<10}" + "".join(f"{f'N = {count}':>10}" for count in arguments.concepts))
    for (one, two), values in accuracy.items():
        print(f"{one:<10}{two:<10}" + "".join(f"{value:>10.3f}" for value in values))
    shown, path = slice(0, 8), arguments.out / "multimodal.png"
    recognised, found = complete(first["A-Hop"], second["A-Hop"], query[shown], links)  # of the last size
    pictures = {"query": query[shown], "1: digit": looks[recognised], "its trace": links[recognised]}
    pictures |= {"2: retrieved": facts[found], "truth": facts[index[shown]]}
    save_picture(path, pictures, index[shown])
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
