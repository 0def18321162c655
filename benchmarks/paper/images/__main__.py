"""Image classification: a fair comparison of dot-product (M-Hop), kernel (K-Hop), sparse (S-Hop) and A-Hop attention.

To run: python -m benchmarks.paper.images paper|working|repair|throughput|report [--help]

- ``paper``: the experiment of the paper with several learning rates: 3 blocks of width 512, Adam, no augmentation. It
  measures the test accuracy after the last epoch.
- ``working``: a small ViT with augmentation, tested on clean images and on the variants of the paper: pixel noise,
  masked patches, and a constant bias of the colors, each with several strengths.
- ``repair``: the same ViT with dot-product attention, trained on clean images, tested on images with replaced values:
  as they are, after a median filter, and after repair by a memory of 20,000 clean patches of 4 x 4 pixels. Its rival is
  trained with such damage.
- ``throughput``: images per second and peak memory of a small ViT in training and inference.
- ``report``: tables of all rows.

For each seed, all attentions start from the same weights and see the same batches. Training never uses test images. The
tables show all learning rates: the best one of an attention is known only from the test images.

An attention can have options, such as ``adaptive:blocks=4`` (4 blocks per head are sorted), ``adaptive:debias``,
``adaptive:init=dis,last=1``, ``adaptive:shared`` (one set of weights for all heads) or ``adaptive:lr=0.1``
(learning-rate multiplier of the similarity parameters). ``eager`` is the adaptive attention as the paper writes it.

Rows are stored as soon as they are measured and are not measured again. With ``--minutes``, no training starts that
would end later. docs/data.md lists the files.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ahop_layers import AHopError
from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.images import READERS, load
from benchmarks.paper.images.attentions import Attention
from benchmarks.paper.images.measure import RATES, SETUPS, run
from benchmarks.paper.images.report import report
from benchmarks.paper.images.training import MODELS


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.images", __doc__)
    commands = parser.add_subparsers(dest="setup", required=True)
    for name in (*SETUPS, "report"):
        command = commands.add_parser(name)
        add = command.add_argument
        add(
            "--output",
            type=Path,
            default=RESULTS / "images.csv",
            help="CSV file (default: benchmarks/results/images.csv)",
        )
        if name == "report":
            continue
        setup = SETUPS[name]
        rates = RATES if name == "paper" else (setup.lr,)
        seeds = 1 if name == "throughput" else 3
        device = "cuda" if torch.cuda.is_available() else "cpu"
        add_data_dir(command, "the data sets")
        add("--data", choices=READERS, default="cifar10", help="data set (default: %(default)s)")
        add("--device", default=device, help="cuda or cpu (default: cuda if available)")
        add("--graphs", action="store_true", help="capture the training step in a CUDA graph and replay it")
        add("--seeds", type=int, default=seeds, help="number of seeds (default: %(default)s)")
        add(
            "--minutes", type=float, default=float("inf"), help="start no training that would end later (default: none)"
        )
        add("--seconds", type=float, default=2.0, help="time of each throughput measurement (default: %(default)s)")
        add(
            "--attentions",
            nargs="+",
            default=setup.attentions,
            help=f"attentions to compare (default: {' '.join(setup.attentions)})",
        )
        add("--model", choices=MODELS, default=setup.model, help="size of the model (default: %(default)s)")
        add("--epochs", type=int, default=setup.epochs, help="number of epochs (default: %(default)s)")
        add("--batch", type=int, default=setup.batch, help="batch size (default: %(default)s)")
        add("--patch", type=int, default=0, help="side of a patch in pixels (default: by data set)")
        shown = " ".join(f"{rate:g}" for rate in rates)
        add("--lr", type=float, nargs="+", default=rates, help=f"peak learning rates (default: {shown})")
    options = parser.parse_args(arguments)
    if options.setup != "report":
        if options.graphs and not options.device.startswith("cuda"):
            parser.error(f"--graphs captures CUDA graphs: expected --device cuda, got {options.device}")
        try:
            for attention in options.attentions:
                Attention.read(attention)
        except AHopError as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    options = parse(arguments)
    measured = options.setup != "report"
    results = ResultTable(options.output, options.device if measured else None)
    if measured:
        chosen = {name: getattr(options, name) for name in ("model", "epochs", "batch", "patch")}
        setup = replace(SETUPS[options.setup], attentions=tuple(options.attentions), **chosen)
        with explain_missing_data():
            data = load(options.data, options.data_dir)
        run(options, setup, data, results)
    shown = (options.setup,) if measured else SETUPS
    print(report(results.rows, shown))


if __name__ == "__main__":
    main()
