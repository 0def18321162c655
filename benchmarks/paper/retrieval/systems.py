"""Data sets and systems of the retrieval benchmark: memories, an MLP, and ablations of the similarity."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.variants import Mixed
from ahop_layers.ops import adaptive_similarity
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from benchmarks.harness.command import default_data_dir
from benchmarks.paper.networks import NETWORKS, Network
from benchmarks.paper.retrieval.accuracy import Memory
from benchmarks.paper.table import TableSimilarity
from benchmarks.paper.training import train

MNIST = Path("mnist") / "train-images-idx3-ubyte.gz"


def synthetic(count: int, dim: int, run: int) -> Tensor:
    """Draws patterns ``(count, dim)`` uniformly from [-1, 1]."""
    return torch.rand(count, dim, generator=torch.Generator().manual_seed(run)) * 2 - 1


def mnist(folder: Path, count: int, run: int) -> Tensor:
    """Reads training digits, selected by the seed ``run``, as rows of 784 pixels in [-1, 1]."""
    with gzip.open(folder / MNIST) as file:
        pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).reshape(-1, 784)
    chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(run))[:count]
    return pixels[chosen].float() / 127.5 - 1


def digit_pairs(count: int, run: int) -> tuple[Tensor, Tensor]:
    """Selects two sides of ``count`` concepts by the seed ``run``: scikit-learn's digits, ``(count, 64)`` in [-1, 1].

    The sides of a concept are two different digits. Up to 898 concepts, no digit is in both sides.
    """
    from sklearn.datasets import load_digits

    digits = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    chosen = torch.randperm(len(digits), generator=torch.Generator().manual_seed(run))
    return digits[chosen[:count]], digits[chosen[-count:]]


def data_folder(given: Path | None) -> Path | None:
    """Returns the folder with MNIST, or None if it is missing.

    Raises:
        FileNotFoundError: ``given`` is not None and has no MNIST.
    """
    if given is not None and not (given / MNIST).exists():
        raise FileNotFoundError(f"expected {given / MNIST}, got no such file; omit --data-dir to leave MNIST out")
    folder = given or default_data_dir()
    return folder if (folder / MNIST).exists() else None


class Perceptron(nn.Module):
    """The 4-layer MLP baseline, which maps a query to one score per pattern."""

    def __init__(self, patterns: Tensor, width: int = 512) -> None:
        super().__init__()
        count, dim = patterns.shape
        sizes = [dim, width, width, width]
        hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, count)).to(patterns)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (L, d)``: ``(L, N)``. Ignores ``key``: the MLP knows a pattern by its index."""
        return self.layers(query)


class AblatedSimilarity(nn.Module):
    """Ablations of the adaptive similarity ``s = sum over bases of (w U) . q`` with similarities ``q`` per dimension.

    A triangular ``U`` of ones and sorted ``q`` give the paper's formula, with ``w`` trained as in the paper. All
    variants are initialized to the dot product.

    Args:
        patterns: stored patterns, which determine the dimension, dtype and device.
        matrix: initial ``U``: triangle, identity or random.
        learn_matrix: train ``U``.
        in_order: sort ``q``.
    """

    def __init__(
        self, patterns: Tensor, matrix: str = "triangle", learn_matrix: bool = False, in_order: bool = True
    ) -> None:
        super().__init__()
        dim = patterns.shape[1]
        start = {
            "triangle": lambda: torch.ones(dim, dim).tril(),
            "identity": lambda: torch.eye(dim),
            "random": lambda: torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim)) / dim**0.5,
        }[matrix]()
        self.matrix = nn.Parameter(start, requires_grad=learn_matrix)
        self.w = nn.Parameter(torch.stack([torch.zeros(dim), torch.linalg.solve(start.T, torch.ones(dim))]))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.in_order = in_order
        self.to(patterns)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (L, d)`` against ``key (S, d)``: ``(L, S)``."""
        folded, query = self.w @ self.matrix, query - self.bias
        if self.in_order:
            return adaptive_similarity(query, key, folded - nn.functional.pad(folded[:, 1:], (0, 1)))
        # -(x - xi)^2 without the terms that are equal for all patterns.
        distance, product = folded
        return (query * (2 * distance + product)) @ key.T - key.square() @ distance


class ReferenceSimilarity(AdaptiveSimilarity):
    """The adaptive similarity as in the paper, by sort, cumulative sum and product: the baseline of the kernels."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (..., [H,] L, d)`` against ``key (..., [H,] S, d)``: ``(..., [H,] L, S)``."""
        weight = self.beta.unsqueeze(-1) * self.w
        return adaptive_similarity(self.unbiased(query), key, weight, self.bases, backend="reference")


@dataclass(frozen=True)
class System:
    """A memory to measure.

    Attributes:
        build: makes the memory of some patterns: a memory of the package, which is solved for, or a network.
        lr: learning rate; 0 for a memory that is not trained.
        samples: number of fixed training queries; 0 to draw new queries.
    """

    build: Callable[[Tensor], Memory]
    lr: float = 0.0
    samples: int = 0

    def fitted(self, patterns: Tensor, variant: Mixed, steps: int, batch: int, run: int) -> Memory:
        """Returns the memory of these patterns, solved for or after ``steps`` training steps."""
        torch.manual_seed(run)
        memory = self.build(patterns)
        if isinstance(memory, AssociativeMemory):
            data: Any = variant
            if self.samples:
                data = variant.sample(patterns, self.samples, torch.Generator(patterns.device).manual_seed(run))
            memory.fit(data, seed=run)
        elif self.lr:
            train(memory, variant, steps, self.lr, batch, run)
        return memory


def _solved(samples: int = 0, **options: Any) -> System:
    def build(patterns: Tensor) -> AssociativeMemory:
        return AssociativeMemory(patterns, AdaptiveSimilarity(patterns.shape[1], **options).to(patterns))

    return System(build, samples=samples)


def _similarity(kind: Callable[..., nn.Module], lr: float, **options: Any) -> System:
    return System(lambda patterns: Network(patterns, kind(patterns, **options)), lr)


SYSTEMS = {
    "M-Hop": System(NETWORKS["M-Hop"]),
    "U-Hop": System(NETWORKS["U-Hop"]),
    "K-Hop": System(NETWORKS["K-Hop"], lr=0.001),
    "K2-Hop": System(NETWORKS["K2-Hop"], lr=0.001),
    "MLP": _similarity(Perceptron, lr=0.001),
    "default": System(AssociativeMemory),
    "A-Hop": _solved(),
    "A-Hop, debias": _solved(debias=True),
    "A-Hop, debias, table": System(NETWORKS["A-Hop, debias, table"], lr=0.05),
    "table alone, debias": _similarity(TableSimilarity, lr=0.05, debias=True),
    "unsorted": _similarity(AblatedSimilarity, lr=0.02, matrix="identity", in_order=False),
    "unsorted, U": _similarity(AblatedSimilarity, lr=0.02, in_order=False),
    "sorted, U fixed triangle": _similarity(AblatedSimilarity, lr=0.02),
    "sorted, U fixed identity": _similarity(AblatedSimilarity, lr=0.02, matrix="identity"),
    "sorted, U fixed random": _similarity(AblatedSimilarity, lr=0.02, matrix="random"),
    "sorted, U learned triangle": _similarity(AblatedSimilarity, lr=0.005, learn_matrix=True),
    "sorted, U learned identity": _similarity(AblatedSimilarity, lr=0.005, matrix="identity", learn_matrix=True),
    "sorted, U learned random": _similarity(AblatedSimilarity, lr=0.005, matrix="random", learn_matrix=True),
    "dot only": _solved(debias=True, bases=("dot",)),
    "dis only": _solved(debias=True, bases=("dis",), init="dis"),
    "dis, dot, 512 samples": _solved(samples=512, debias=True),
}
