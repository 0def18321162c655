"""The demonstration: adaptive similarity in a memory, in a vision transformer and in bags, in a few minutes.

To run: make demo   (or: python -m examples.demo)

1. Store digits, corrupt them, and retrieve them: dot product against adaptive similarity.
2. Train a small vision transformer with dot-product attention. Convert its attention by one call, with 4 blocks in
   each head, which leaves the outputs unchanged. Fine-tune the converted model, and the original one for comparison.
3. Classify bags of digits, those with a nine and those without: the same pooling with either similarity.

Ends with a table and the list of pictures.
"""

import argparse
import warnings
from collections.abc import Sequence
from types import ModuleType

from examples import mil, retrieval, vit
from examples.common import cli

Row = tuple[str, str, str]


def run(example: ModuleType, options: argparse.Namespace, folder: str, *arguments: str) -> dict[str, float]:
    """Runs an example in a folder of its own, and returns its results."""
    print(f"==> {folder}: {' '.join(arguments)}", flush=True)
    shared = ["--seed", str(options.seed), "--out", str(options.out / folder), *["--overwrite"] * options.overwrite]
    return example.main([*arguments, *shared])


def retrieve(options: argparse.Namespace) -> list[Row]:
    """Compares memories of digits."""
    size = ["--patterns", "60", "--epochs", "25"] if options.quick else []
    found = run(retrieval, options, "retrieval", *size)
    return [("retrieval accuracy, corrupted digits", f"{found['dot product']:.3f}", f"{found['adaptive']:.3f}")]


def transform(options: argparse.Namespace) -> list[Row]:
    """Trains with the dot product, then fine-tunes the original and the converted model for the same epochs."""
    common = ["--model", "tiny", "--accelerator", "cpu", "--blocks", "4"]
    common += ["--batch-size", "128" if options.quick else "32"]

    def train(folder: str, attention: str, epochs: int, *more: str) -> dict[str, float]:
        changes = ["--attention", attention, "--epochs", str(1 if options.quick else epochs), *more]
        return run(vit, options, f"vit/{folder}", *common, *changes)

    first = train("dot", "dot", 15, "--lr", "3e-3")
    tune = ["--lr", "1e-3", "--convert", str(options.out / "vit" / "dot" / "best.ckpt")]
    dot, adaptive = (train(f"{name}-tuned", name, 6, *tune) for name in ("dot", "adaptive"))
    return [
        ("ViT test accuracy before conversion", f"{first['test_accuracy']:.3f}", "(same model)"),
        ("largest change of a logit by conversion", "", f"{adaptive['logit_change']:.1e}"),
        ("ViT test accuracy after fine-tuning", f"{dot['test_accuracy']:.3f}", f"{adaptive['test_accuracy']:.3f}"),
    ]


def classify_bags(options: argparse.Namespace) -> list[Row]:
    """Compares poolings of bags of digits, with and without a nine."""
    size = ["--fast-dev-run"] if options.quick else ["--epochs", "5"]
    dot, adaptive = (
        run(mil, options, f"mil/{name}", "--accelerator", "cpu", "--pooling", name, *size)["test_auc"]
        for name in ("dot", "adaptive")
    )
    return [("test AUC, bags with a nine", f"{dot:.3f}", f"{adaptive:.3f}")]


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser("demo", __doc__, "out/demo")
    parser.option("--quick", action="store_true", help="run a few steps of everything")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all parts and prints the table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")  # advice for larger machines and data sets
    with parser.one_line_errors():
        parser.start(options)
        rows = [row for part in (retrieve, transform, classify_bags) for row in part(options)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'dot product':>12}  {'adaptive':>12}")
    for name, dot, adaptive in rows:
        print(f"{name:{width}}  {dot:>12}  {adaptive:>12}")
    print("\npictures:", *sorted(str(path) for path in options.out.rglob("*.png")), sep="\n  ")


if __name__ == "__main__":
    main()
