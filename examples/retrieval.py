"""Store 500 handwritten digits, corrupt them, and get them back: dot product against adaptive similarity.

To run: python examples/retrieval.py

The queries are mixed variants of the stored digits: noise is added, a part of the pixels is replaced by random values,
and one fixed bias is added to all. The adaptive similarity is fitted on variants drawn for training and compared on
variants it has not seen. Writes out/retrieval.png.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

import ahop_layers as ah

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def stored_digits(count: int) -> Tensor:
    """Real 8x8 digits that scikit-learn ships, as patterns (count, 64) in [-1, 1]."""
    return torch.tensor(load_digits().data[:count] / 8 - 1, dtype=torch.float32)


class MixedVariants:
    """Draws (index, query): noise first, then masked pixels, then the bias, as the paper's appendix has it."""

    def __init__(self, patterns: Tensor, difficulty: float, generator: torch.Generator) -> None:
        self.patterns, self.difficulty, self.generator = patterns, difficulty, generator
        self.bias = difficulty * (2.0 * torch.randint(2, patterns.shape[1:], generator=generator) - 1)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """``index (count,)`` of the patterns and ``query (count, d)``, one variant of each."""
        index = torch.randint(len(self.patterns), (count,), generator=self.generator)
        patterns = self.patterns[index]
        noisy = patterns + self.difficulty**0.5 * torch.randn(patterns.shape, generator=self.generator)
        masked = torch.rand(patterns.shape, generator=self.generator).argsort(-1) < self.difficulty * patterns.shape[1]
        replaced = 2 * torch.rand(patterns.shape, generator=self.generator) - 1
        return index, torch.where(masked, replaced, noisy) + self.bias


def fit(similarity: ah.AdaptiveSimilarity, variants: MixedVariants, steps: int) -> None:
    """Minimise the paper's loss: the negative log-probability of the pattern a query was made from."""
    optimizer = torch.optim.Adam(similarity.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with tqdm(range(steps), desc="fitting the adaptive similarity", unit="step") as progress:
        for _ in progress:
            index, query = variants.draw(128)
            loss = torch.nn.functional.cross_entropy(similarity(query, variants.patterns), index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.3f}")


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


@torch.no_grad()
def compare(
    scores: dict[str, Tensor], index: Tensor, query: Tensor, patterns: Tensor, path: Path
) -> dict[str, tuple[float, float]]:
    """Accuracy and squared error per pixel of each method, and the picture of the first queries."""
    found = {name: score.argmax(-1) for name, score in scores.items()}
    shown = slice(0, 14)
    pictures = {"query": query[shown]} | {name: patterns[best[shown]] for name, best in found.items()}
    save_picture(path, pictures | {"original": patterns[index[shown]]})
    return {
        name: ((best == index).float().mean().item(), (patterns[best] - patterns[index]).square().mean().item())
        for name, best in found.items()
    }


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=500, help="how many digits to store (default 500)")
    parser.add_argument("--difficulty", type=float, default=0.3, help="strength of noise, mask and bias, 0 to 1 (0.3)")
    parser.add_argument("--steps", type=int, default=150, help="training steps (150)")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (0)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (out)")
    arguments = parser.parse_args()

    generator = torch.Generator().manual_seed(arguments.seed)
    patterns = stored_digits(arguments.patterns)
    variants = MixedVariants(patterns, arguments.difficulty, generator)
    similarity = ah.AdaptiveSimilarity(patterns.shape[1], debias=True)  # starts as the dot product
    fit(similarity, variants, arguments.steps)

    index, query = variants.draw(2000)
    scores = {"dot product": query @ patterns.T, "adaptive": similarity(query, patterns).detach()}
    path = arguments.out / "retrieval.png"
    results = compare(scores, index, query, patterns, path)

    print(f"\n{len(patterns)} digits stored, difficulty {arguments.difficulty}, {len(index)} new queries\n")
    print(f"{'similarity':<14}{'accuracy':>10}{'error':>10}")
    for name, (accuracy, error) in results.items():
        print(f"{name:<14}{accuracy:>10.3f}{error:>10.3f}")
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
