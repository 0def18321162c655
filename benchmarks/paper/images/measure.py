"""Image classification: dot product (M-Hop), kernel (K-Hop), sparse (S-Hop) and adaptive (A-Hop) on equal terms.

To run: python -m benchmarks.paper.images paper|working|throughput|report [--help]

- ``paper``: the paper's experiment: 3 blocks of width 512, Adam, no augmentation, at several learning rates. The
  accuracy after the last epoch.
- ``working``: a small ViT with augmentation, tested on clean images and on the paper's variants of them: pixel noise,
  masked patches, a constant bias of the colours, each at several strengths.
- ``throughput``: images a second and peak memory of a small ViT in training and inference.
- ``report``: tables of all rows, and the picture of accuracy against strength.

For one seed every attention starts from the same weights and sees the same batches. No training looks at test images,
and all rates are shown: which is an attention's best is known only afterwards. An attention may carry changes, such as
``adaptive:debias``, ``adaptive:init=dis,last=1``, ``adaptive:shared`` (one set of weights for all heads) or
``adaptive:lr=0.1`` (for the similarities). ``eager`` is the adaptive attention computed as the paper writes it. Rows go
to a CSV file as they come; a training that has its rows is not repeated, and with ``--minutes`` none is begun that
would not end in time. docs/data.md says which files are read.
"""

import argparse
import gc
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ahop_layers import AHopError
from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.report import picture_for
from benchmarks.harness.rows import RESULTS, Rows
from benchmarks.paper.images.attentions import Attention
from benchmarks.paper.images.report import draw, report
from benchmarks.paper.images.training import CORRUPTIONS, Setup, Training, accuracy, build, speeds

# isort: split
from examples.vision.batches import channel_scale
from examples.vision.data import READERS, ImageSet, load
from examples.vision.model import ATTENTIONS, MODELS

SETUPS = {
    "paper": Setup("paper", 25, 128, ATTENTIONS),
    "working": Setup("small", 40, 256, ("dot", "adaptive"), 1e-3, 0.05, 0.1, augment=True, smoothing=0.1),
    "throughput": Setup("small", 1, 256, (*ATTENTIONS, "eager")),
}
RATES = (1e-3, 3e-4, 1e-4)
"""The learning rates that every attention of the paper's experiment is given; the paper names the first."""


def measure(
    options: argparse.Namespace, setup: Setup, attention: str, seed: int, data: ImageSet, deadline: float
) -> dict[str, float] | None:
    """The figures of one model; None if there is no time for it."""
    gc.collect()  # the model before this one must not count as this one's memory
    torch.manual_seed(seed)
    training = Training(*build(attention, setup, data, channel_scale(data.train.images)), data, setup, options.graphs)
    if options.setup == "throughput":
        return speeds(training, options.seconds)
    if not training.run(seed, deadline):
        return None
    measured = {"accuracy": accuracy(training)}
    if options.setup == "working":
        for corruption, strengths in CORRUPTIONS.items():
            for strength in strengths:
                measured[f"{corruption.__name__} {strength}"] = accuracy(training, corruption, strength)
    return measured


def run(options: argparse.Namespace, setup: Setup, data: ImageSet, rows: Rows) -> None:
    """Measure what the rows do not hold yet; all rates and attentions of a seed before the next seed."""
    deadline = time.perf_counter() + 60 * options.minutes
    data = data._replace(train=data.train.to(options.device), test=data.test.to(options.device))
    common = f"{options.data}, {setup.model}, patch {setup.patch or data.patch}, batch {setup.batch}"
    for seed, rate, attention in itertools.product(range(options.seeds), options.lr, setup.attentions):
        if options.setup == "throughput":
            settings = f"{common}, {'recorded' if options.graphs else 'plain'}"
        else:
            settings = f"{common}, {setup.epochs} epochs, lr {rate:g}"
        key = {"setup": options.setup, "settings": settings, "attention": attention, "seed": str(seed)}
        if rows.holds(key):
            continue
        print(f"{attention}, seed {seed}: {settings}", flush=True)
        late = time.perf_counter() > deadline
        measured = None if late else measure(options, replace(setup, lr=rate), attention, seed, data, deadline)
        if measured is None:
            print(f"  left out: it would not end within {options.minutes:g} minutes; the same command goes on here")
            return
        rows.add(key, measured)
        print("  " + ", ".join(f"{name} {value:.5g}" for name, value in measured.items()), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="setup", required=True)
    for name in (*SETUPS, "report"):
        add = commands.add_parser(name).add_argument
        add("--output", type=Path, default=RESULTS / "images.csv", help="the rows (benchmarks/results/images.csv)")
        add("--picture", type=Path, help="of accuracy against strength (docs/pictures; for another output, beside it)")
        if name == "report":
            continue
        home = os.environ.get("AHOP_DATA_DIR", "data")
        setup = SETUPS[name]
        add("--data", choices=READERS, default="cifar10", help="the data set (cifar10)")
        add("--data-dir", type=Path, default=Path(home), help="where data sets lie (AHOP_DATA_DIR, else data)")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu (what there is)")
        add("--graphs", action="store_true", help="record the launches of a step and replay them (CUDA)")
        add("--seeds", type=int, default=1 if name == "throughput" else 3, help="how many, from 0 on")
        add("--minutes", type=float, default=float("inf"), help="begin no training that would not end in time")
        add("--seconds", type=float, default=2.0, help="how long to time each pass (2)")
        add("--attentions", nargs="+", default=setup.attentions, help=" ".join(setup.attentions))
        add("--model", choices=MODELS, default=setup.model, help=f"its size ({setup.model})")
        add("--epochs", type=int, default=setup.epochs, help=f"({setup.epochs})")
        add("--batch", type=int, default=setup.batch, help=f"({setup.batch})")
        add("--patch", type=int, default=0, help="side of a patch in pixels (4 for CIFAR)")
        rates = RATES if name == "paper" else (setup.lr,)
        shown = " ".join(f"{rate:g}" for rate in rates)
        add("--lr", type=float, nargs="+", default=rates, help=f"largest learning rates, one after the other ({shown})")
    options = parser.parse_args(arguments)
    if options.setup != "report":
        if options.graphs and not options.device.startswith("cuda"):
            parser.error(f"--graphs records what a GPU is told: expected --device cuda, got {options.device}")
        try:
            for attention in options.attentions:
                Attention.read(attention)
        except AHopError as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = parse(arguments)
    rows = Rows(options.output)
    if options.setup != "report":
        chosen = {name: getattr(options, name) for name in ("model", "epochs", "batch", "patch")}
        setup = replace(SETUPS[options.setup], attentions=tuple(options.attentions), **chosen)
        rows.about(options.device)
        with explain_missing_data():
            data = load(options.data, options.data_dir)
        run(options, setup, data, rows)
    shown = SETUPS if options.setup == "report" else (options.setup,)
    print(report(rows.rows, shown))
    picture = options.picture or picture_for(options.output, "images")
    if "working" in shown and draw(rows.rows, picture):
        print(f"\npicture: {picture}")


if __name__ == "__main__":
    main()
