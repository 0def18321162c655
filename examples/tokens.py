"""Find digits behind a cover by the tokens of a vision transformer: matched one by one, the covered ones are ignored.

To run: python -m examples.tokens

A small vision transformer is trained on clean digits. A memory stores its tokens of these digits, and each token is a
block. A query is a digit that the transformer has not seen, of which a rectangle is covered. The table has the accuracy
of the transformer itself, of the nearest stored digit by its embedding, which is the mean of the tokens of the last
layer, and by tokens that are matched one by one: the sum of all correlations, the sum of the best 12 of 16, and learned
weights of their ranks, from covered digits that are neither stored nor asked.

Attention spreads a cover to all tokens, so that tokens of a late layer agree nowhere. By default they are those that
the first layer gets; --layer 2 takes those of the last layer.

Writes tokens.png into the folder of --out.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import ahop_layers as ah
from examples.common.command import Parser, number
from examples.common.outputs import DIGITS, digit_patterns, draw_digit, draw_rows, spread

PATCH, TOKENS, WIDTH, DEPTH = 2, 16, 32, 2
KEPT = {"not sorted": TOKENS, "best 12": 12, "learned ranks": TOKENS}  # tokens whose weight is 1 before a fit
LEVELS = (0.0, 0.2, 0.4, 0.6)
SHOWN, STORED, SPARE = 0.4, 800, 400

Find = Callable[[Tensor], Tensor]


class TinyViT(nn.Module):
    """A vision transformer for images of 8 x 8 pixels, with a token for each patch of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **options) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def tokens(self, images: Tensor, layer: int = DEPTH) -> Tensor:
        """Returns the tokens ``(N, 16, 32)`` of images ``(N, 64)`` after so many layers."""
        tokens: Tensor = self.embed(images.unflatten(-1, (1, 8, 8))).flatten(2).mT + self.position
        for block in self.layers[:layer]:
            tokens = block(tokens)
        return tokens

    def embedding(self, images: Tensor) -> Tensor:
        """Returns the mean of the tokens of the last layer ``(N, 32)``."""
        embedding: Tensor = self.norm(self.tokens(images)).mean(1)
        return embedding

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits ``(N, 10)``."""
        logits: Tensor = self.head(self.embedding(images))
        return logits


def train(images: Tensor, labels: Tensor, epochs: int) -> TinyViT:
    """Trains a transformer on clean images."""
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def matched(tokens: Tensor, labels: Tensor, kept: int) -> ah.AssociativeMemory:
    """Returns a memory that sums the correlations of the best ``kept`` of the tokens ``(N, 16 * 32)``."""
    blocks = ah.Blocks(TOKENS, normalize=True)
    similarity = ah.AdaptiveSimilarity(TOKENS * WIDTH, bases=("dot",), init="dot", blocks=blocks)
    similarity.set_ranks_([(torch.arange(TOKENS) < kept).float()[None]])
    return ah.AssociativeMemory(tokens, similarity, labels=labels)


def methods(
    model: TinyViT, layer: int, images: Tensor, labels: Tensor, spare: Tensor, of_spare: Tensor
) -> dict[str, Find]:
    """Returns functions that find the class of covered images ``(n, 64)``."""

    def tokens(rows: Tensor) -> Tensor:
        return model.tokens(rows, layer).flatten(1)

    memories = {name: matched(tokens(images), labels, kept) for name, kept in KEPT.items()}
    memories["learned ranks"].fit((of_spare, tokens(spare)), by="label", seed=0)
    stored = normalize(model.embedding(images), dim=-1)
    found: dict[str, Find] = {
        "transformer": lambda query: model(query).argmax(-1),
        "embedding": lambda query: labels[(model.embedding(query) @ stored.mT).argmax(-1)],
    }
    return found | {name: partial(nearest_class, memory, labels, tokens) for name, memory in memories.items()}


def nearest_class(memory: ah.AssociativeMemory, labels: Tensor, tokens: Find, query: Tensor) -> Tensor:
    """Returns the class ``(n,)`` of the stored image whose tokens are most similar to those of each query."""
    return labels[memory.recall(tokens(query))]


def compare(options: argparse.Namespace) -> tuple[dict[str, dict[float, list[float]]], Figure]:
    """Returns the accuracies of each method by level, one for each seed, and the picture of the last seed."""
    accuracies: dict[str, dict[float, list[float]]] = {}
    digits, classes = digit_patterns(), torch.tensor(load_digits().target)
    for seed in range(options.seed, options.seed + options.seeds):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randperm(DIGITS, generator=generator).split([STORED, SPARE, DIGITS - STORED - SPARE])
        (stored, labels), (spare, of_spare), (asked, target) = ((digits[part], classes[part]) for part in parts)
        cover = ah.variants.Covered((0.0, max(LEVELS)), 8, 8).bind(stored)(spare, generator)
        found = methods(train(stored, labels, options.epochs), options.layer, stored, labels, cover, of_spare)
        queries = {level: ah.variants.Covered(level, 8, 8).bind(spare)(asked, generator) for level in LEVELS}
        for level, query in queries.items():
            for name, find in found.items():
                accuracy = (find(query) == target).double().mean().item()
                accuracies.setdefault(name, {}).setdefault(level, []).append(accuracy)
    rows, right = {"original": asked[:14], "query": queries[SHOWN][:14]}, {}
    for name in ("embedding", "not sorted", "learned ranks"):
        answer = found[name](queries[SHOWN][:14])
        label = f"{name}\naccuracy {accuracies[name][SHOWN][-1]:.0%}"
        first = (labels == answer[:, None]).int().argmax(1)
        rows[label], right[label] = stored[first], answer == target[:14]
    figure = draw_rows(rows, draw_digit, 0.8, 0.85, right)
    figure.suptitle(f"{SHOWN:.0%} of the image covered; an answer is shown by a stored digit of its class", fontsize=10)
    return accuracies, figure


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("tokens", __doc__, ["tokens.png"])
    add = parser.add_argument
    layers = "number of layers that the matched tokens passed"
    add("--layer", type=number(int, 0, DEPTH), metavar="N", default=0, help=layers)
    add("--epochs", type=number(int, 1), metavar="N", default=40, help="epochs of the transformer")
    add("--seeds", type=number(int, 1), metavar="N", default=3, help="number of seeds, from --seed on")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[float, list[float]]]:
    """Trains a transformer for each seed, prints the table, draws the picture, and returns the accuracies."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        parser.start(options)
        accuracies, figure = compare(options)
        print(f"\n{STORED} digits stored, {DIGITS - STORED - SPARE} covered queries, {options.seeds} seeds\n")
        print(f"{'area covered':<14}" + "".join(f"{name:>18}" for name in accuracies))
        for level in LEVELS:
            print(f"{level:<14.0%}" + "".join(f"{spread(values[level]):>18}" for values in accuracies.values()))
        figure.savefig(options.out / "tokens.png", dpi=100)
        print(f"\npicture: {options.out / 'tokens.png'}")
    return accuracies


if __name__ == "__main__":
    main()
