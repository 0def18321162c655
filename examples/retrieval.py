"""Store 500 handwritten digits, corrupt them, and get them back: dot product against adaptive similarity.

To run: python examples/retrieval.py

The queries are mixed variants of the stored digits: noise is added, a part of the pixels is replaced by random values,
and one fixed bias is added to all. The adaptive memories are fitted on variants drawn for training and compared on
variants they have not seen. The last row is what the best possible decision reaches. Writes out/retrieval.png.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import ahop_layers as ah
from ahop_layers.variants import Mixed, retrieval_accuracy, retrieval_error
from examples.common.outputs import output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def stored_digits(count: int) -> Tensor:
    """Real 8x8 digits that scikit-learn ships, as patterns (count, 64) in [-1, 1]."""
    return torch.tensor(load_digits().data[:count] / 8 - 1, dtype=torch.float32)


def save_picture(path: Path, rows: dict[str, Tensor]) -> None:
    """One row of digits for each name."""
    columns = len(next(iter(rows.values())))
    figure, axes = plt.subplots(len(rows), columns, figsize=(columns * 0.8, len(rows) * 0.95), layout="constrained")
    for (name, digits), row in zip(rows.items(), axes, strict=True):
        for digit, axis in zip(digits, row, strict=True):
            axis.imshow(digit.reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=500, help="how many digits to store (default 500)")
    parser.add_argument("--difficulty", type=float, default=0.3, help="strength of noise, mask and bias, 0 to 1 (0.3)")
    parser.add_argument("--steps", type=int, default=150, help="training steps (150)")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (0)")
    parser.add_argument("--out", type=output_folder, default="out", help="folder for the picture (out)")
    arguments = parser.parse_args()

    patterns = stored_digits(arguments.patterns)
    variant = Mixed(*[arguments.difficulty] * 3, seed=arguments.seed)
    memories = {
        "dot product": ah.AssociativeMemory.preset("M-Hop", patterns),
        "adaptive": ah.AssociativeMemory.preset("A-Hop", patterns, debias=True),
        "with table": ah.AssociativeMemory.preset("A-Hop", patterns, debias=True, table=True),
    }
    for name, memory in memories.items():
        if name != "dot product":
            print(f"fitting: {name}")
            memory.fit(variant, epochs=arguments.steps, batch=128, seed=arguments.seed)

    index, query = variant.sample(patterns, 1000, torch.Generator().manual_seed(arguments.seed + 1))
    print(f"\n{len(patterns)} digits stored, difficulty {arguments.difficulty}, {len(index)} new queries\n")
    print(f"{'similarity':<14}{'accuracy':>10}{'error':>10}")
    for name, memory in memories.items():
        accuracy, error = retrieval_accuracy(memory, index, query), retrieval_error(memory, index, query)
        print(f"{name:<14}{accuracy:>10.3f}{error:>10.3f}")
    limit = (variant.most_likely(query, patterns) == index).double().mean().item()
    print(f"{'Bayes limit':<14}{limit:>10.3f}")
    shown = slice(0, 14)
    pictures = {name: patterns[memory.recall(query[shown])] for name, memory in memories.items()}
    path = arguments.out / "retrieval.png"
    save_picture(path, {"query": query[shown], **pictures, "original": patterns[index[shown]]})
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
