"""Two memories and a link: recognize a damaged digit, follow its link, and retrieve the linked measurements.

To run: python -m examples.multimodal

A concept is a pair of real patterns from scikit-learn: a handwritten digit (64 pixels) and the cell measurements of a
tumor (30 numbers). One memory stores the digits, another the measurements. Phase 1 recognizes a damaged digit. The
recognized concept links to a damaged copy of its measurements, the trace. Phase 2 recognizes that trace among all
measurements. A concept is completed if both phases retrieve the right pattern. The damage of the two modalities
differs, and no fixed similarity suits both. Writes multimodal.png into the folder of --out: the steps for some queries,
with right and wrong answers marked.
"""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from tqdm import tqdm

import ahop_layers as ah
from ahop_layers.variants import Mixed
from examples.common.command import Parser, number
from examples.common.outputs import digit_patterns, draw_digit, draw_rows

IMAGES = Mixed(mask=0.2, noise=0.05, bias=0.6, seed=1)
TRACES = Mixed(mask=0.1, noise=0.002, bias=0.6, seed=2)
NAMES = ("M-Hop", "K2-Hop", "A-Hop")
PAIRS = [("M-Hop", "M-Hop"), ("K2-Hop", "K2-Hop"), ("K2-Hop", "A-Hop"), ("A-Hop", "K2-Hop"), ("A-Hop", "A-Hop")]
TUMORS = 569


def measurements(count: int) -> Tensor:
    """Returns cell measurements ``(count, 30)``, standardized and mapped to [-1, 1] by tanh."""
    values = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    return torch.tanh((values - values.mean(0)) / values.std(0))[:count]


def fitted(name: str, patterns: Tensor, variant: Mixed, epochs: int, lr: float = 0.05) -> ah.AssociativeMemory:
    """Returns a memory of the patterns, fitted on damaged copies of them if its preset has parameters."""
    keywords = {"debias": True} if name == "A-Hop" else {}
    memory = ah.AssociativeMemory.preset(name, patterns, **keywords)
    if name != "M-Hop":  # K2-Hop learns a matrix and needs smaller steps
        memory.fit(variant, epochs=epochs, lr=lr if name == "A-Hop" else lr / 5, batch=64, progress=False)
    return memory


def draw_pattern(axis: Axes, pattern: Tensor) -> None:
    """Draws a digit as an image, and measurements as bars."""
    if len(pattern) == 64:
        draw_digit(axis, pattern)
    else:
        axis.bar(range(len(pattern)), pattern.numpy(), color="#3a93b5")
        axis.set_ylim(-1.5, 1.5)


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("multimodal", __doc__, ["multimodal.png"])
    add = parser.add_argument
    add("--concepts", type=number(int, 1, TUMORS), metavar="N", nargs="+", default=[128, 256, 512],
        help="numbers of stored concepts")  # fmt: skip
    add("--epochs", type=number(int, 1), metavar="N", default=60, help="number of epochs")
    add("--lr", type=number(float, 0), default=0.05, help="learning rate")
    add("--queries", type=number(int, 1), metavar="N", default=500, help="number of damaged digits to look up")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], list[float]]:
    """Fits the memories, prints the table, draws the picture, and returns the accuracies."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        parser.start(options)
        generator = torch.Generator().manual_seed(options.seed)
        accuracy: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
        for count in tqdm(options.concepts, desc="fitting memories", unit="size"):
            looks, facts = digit_patterns(count), measurements(count)
            links = TRACES(facts, generator)
            index, query = IMAGES.sample(looks, options.queries, generator)
            first = {name: fitted(name, looks, IMAGES, options.epochs, options.lr) for name in NAMES}
            second = {name: fitted(name, facts, TRACES, options.epochs, options.lr) for name in NAMES}
            for pair in PAIRS:
                concept = first[pair[0]].recall(query)
                found = second[pair[1]].recall(links[concept])
                accuracy[pair].append(((concept == index) & (found == index)).double().mean().item())
        print(f"\naccuracy of completed concepts, {options.queries} damaged digits\n")
        print(f"{'phase 1':<10}{'phase 2':<10}" + "".join(f"{f'N = {count}':>10}" for count in options.concepts))
        for (one, two), values in accuracy.items():
            print(f"{one:<10}{two:<10}" + "".join(f"{value:>10.3f}" for value in values))
        shown, path = slice(0, 8), options.out / "multimodal.png"
        recognized = first["A-Hop"].recall(query[shown])  # of the last size
        found = second["A-Hop"].recall(links[recognized])
        last = f"phase 2: retrieved\naccuracy {accuracy['A-Hop', 'A-Hop'][-1]:.3f}"
        rows = {"query": query[shown], "original digit": looks[index[shown]], "phase 1: recognized": looks[recognized],
                "trace of that concept": links[recognized], "original measurements": facts[index[shown]],
                last: facts[found]}  # fmt: skip
        right = {"phase 1: recognized": recognized == index[shown], last: found == index[shown]}
        draw_rows(rows, draw_pattern, 1.1, 0.95, right, label_width=1.8).savefig(path, dpi=100)
        print(f"\npicture: {path}")
    return accuracy


if __name__ == "__main__":
    main()
