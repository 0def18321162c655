"""The demonstration: what adaptive similarity does in a memory, in a vision transformer and in bags, in a few minutes.

To run: make demo   (or: python examples/demo.py)

1. Store digits, corrupt them, get them back: dot product against adaptive similarity.
2. Train a small vision transformer with dot-product attention, replace its attention by one call that leaves its
   outputs as they are, train it a little more, and compare with the one that kept the dot product.
3. Tell bags of digits that hold a nine from bags that do not, by the same pooling with either similarity.

Ends with one table and the list of pictures.
"""

import argparse
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from examples import mil, vit
from examples.common.outputs import output_folder

HERE = Path(__file__).parent
Row = tuple[str, str, str]


def retrieval(out: Path, quick: bool) -> list[Row]:
    """Run examples/retrieval.py as it stands and take the accuracies from its table."""
    size = ["--patterns", "60", "--steps", "25"] if quick else []
    command = [sys.executable, str(HERE / "retrieval.py"), "--out", str(out), *size]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(shown)
    found = dict(re.findall(r"^(dot product|adaptive) +(\d\.\d+)", shown, flags=re.MULTILINE))
    return [("corrupted digits found again", found["dot product"], found["adaptive"])]


def transformer(out: Path, quick: bool) -> list[Row]:
    """Train with the dot product; then train on, once as it is and once converted, for the same number of epochs."""

    def train(folder: str, attention: str, epochs: int, *more: str) -> dict[str, float]:
        print(f"==> vision transformer, {attention} attention, {epochs} epochs", flush=True)
        common = ["--model", "tiny", "--accelerator", "cpu", "--out", str(out / "vit" / folder)]
        common += ["--batch-size", "128" if quick else "32"]
        return vit.main([*common, "--attention", attention, "--epochs", str(epochs), *more])

    first = train("dot", "dot", 1 if quick else 15, "--lr", "3e-3")
    on = ["--convert", str(out / "vit" / "dot" / "best.ckpt"), "--lr", "1e-3"]
    dot, adaptive = (train(f"{name}-tuned", name, 1 if quick else 6, *on) for name in ("dot", "adaptive"))
    return [
        ("digits recognised, first training", f"{first['test_accuracy']:.3f}", "(same model)"),
        ("largest change of an output when converted", "", f"{adaptive['logit_change']:.1e}"),
        ("digits recognised, trained on", f"{dot['test_accuracy']:.3f}", f"{adaptive['test_accuracy']:.3f}"),
    ]


def bags(out: Path, quick: bool) -> list[Row]:
    """Is there a nine in the bag? The same pooling with the dot product and with the adaptive similarity."""
    common = ["--accelerator", "cpu", *(["--fast-dev-run"] if quick else ["--epochs", "5"])]
    scores = {}
    for name in ("dot", "adaptive"):
        print(f"==> bags of digits, {name} pooling", flush=True)
        scores[name] = mil.main([*common, "--pooling", name, "--out", str(out / "mil" / name)])["test_auc"]
    return [("bags with a nine told apart (AUC)", f"{scores['dot']:.3f}", f"{scores['adaptive']:.3f}")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_folder, default="out", help="folder for everything that is written (out)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")  # advice for larger machines and data sets

    rows = [row for part in (retrieval, transformer, bags) for row in part(options.out, options.quick)]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'':{width}}  {'dot product':>12}  {'adaptive':>12}")
    for name, dot, adaptive in rows:
        print(f"{name:{width}}  {dot:>12}  {adaptive:>12}")
    print("\npictures:", *sorted(str(path) for path in options.out.rglob("*.png")), sep="\n  ")


if __name__ == "__main__":
    main()
