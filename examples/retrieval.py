"""Store 500 handwritten digits, damage them, and retrieve them: dot product against adaptive similarity.

To run: python -m examples.retrieval

The queries are damaged copies of the stored digits: Gaussian noise is added, a share of the pixels is replaced by
random values, and the same bias vector is added to every query. The adaptive memories are fitted on other queries than
those of the table. "Bayes limit" is the accuracy of the optimal decision.

Writes retrieval.png into the folder of --out: some queries, the stored digits they were made from, and the answer of
each memory, marked as right or wrong.
"""

from collections.abc import Sequence

import torch

import ahop_layers as ah
from ahop_layers.variants import Mixed
from benchmarks.paper.retrieval.accuracy import most_likely, retrieval_accuracy, retrieval_error
from examples.common.command import Parser, number
from examples.common.outputs import DIGITS, digit_patterns, draw_digit, draw_rows


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("retrieval", __doc__, ["retrieval.png"])
    add = parser.add_argument
    add("--patterns", type=number(int, 1, DIGITS), metavar="N", default=500, help="number of stored digits")
    add("--difficulty", type=number(float, 0, 1), default=0.3, help="strength of noise, mask and bias, from 0 to 1")
    add("--epochs", type=number(int, 1), metavar="N", default=150, help="number of epochs")
    add("--lr", type=number(float, 0), default=0.05, help="learning rate")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Fits the memories, prints the table, draws the picture, and returns the accuracies."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        parser.start(options)
        patterns = digit_patterns(options.patterns)
        variant = Mixed(*[options.difficulty] * 3, seed=options.seed)
        memories = {
            "dot product": ah.AssociativeMemory.preset("M-Hop", patterns),
            "adaptive": ah.AssociativeMemory.preset("A-Hop", patterns, debias=True),
            "with table": ah.AssociativeMemory.preset("A-Hop", patterns, debias=True, table=True),
        }
        for name, memory in memories.items():
            if name != "dot product":
                print(f"fitting: {name}")
                memory.fit(variant, epochs=options.epochs, lr=options.lr, batch=128, seed=options.seed)

        index, query = variant.sample(patterns, 1000, torch.Generator().manual_seed(options.seed + 1))
        print(f"\n{len(patterns)} digits stored, difficulty {options.difficulty}, {len(index)} test queries\n")
        print(f"{'similarity':<14}{'accuracy':>10}{'error':>10}")
        found = {}
        for name, memory in memories.items():
            found[name] = retrieval_accuracy(memory, index, query)
            print(f"{name:<14}{found[name]:>10.3f}{retrieval_error(memory, index, query):>10.3f}")
        limit = (most_likely(variant, query, patterns) == index).double().mean().item()
        print(f"{'Bayes limit':<14}{limit:>10.3f}")

        shown, path = slice(0, 12), options.out / "retrieval.png"
        rows, right = {"query": query[shown], "original": patterns[index[shown]]}, {}
        for name, memory in memories.items():
            answer, label = memory.recall(query[shown]), f"{name}\naccuracy {found[name]:.3f}"
            rows[label], right[label] = patterns[answer], answer == index[shown]
        draw_rows(rows, draw_digit, 0.8, 0.8, right).savefig(path, dpi=100)
        print(f"\npicture: {path}")
    return found


if __name__ == "__main__":
    main()
