"""Multiple-instance learning on Tiger, Fox, Elephant and UCSB: a fair comparison of Hopfield poolings.

To run: AHOP_DATA_DIR=DIR python -m benchmarks.paper.mil run [--processes 14] [--minutes 18]
        python -m benchmarks.paper.mil report

- ``nested``: test AUC of ten-fold cross-validation, with the published folds if there are any. Hyperparameters and the
  number of epochs are selected on three inner folds of the training bags. Then three networks with different seeds are
  trained on all training bags, and their logits are averaged. They are tested on clean and on damaged test bags.
- ``damaged``: training and test bags are damaged; the first setting, without a search.

Damage is a variant of the paper, drawn for each instance, on standardized features: a fraction of the features
is replaced by random values, noise is added, or a constant bias is added. The poolings are M-Hop (``dot``), S-Hop
(``sparse``), K-Hop (``kernel``), A-Hop (``adaptive``; ``adaptive x10`` has a ten times larger learning rate of the
similarities), ``gated`` attention, and ``uniform`` weights: the pooling of M-Hop with equal weights for all instances.
All use the same folds, seeds and hyperparameter ranges.

A row is the mean over the folds of one repeat. Rows are stored as soon as they are complete and are not measured again.
After ``--minutes`` no new fold is started; the same command resumes. docs/data.md lists the files.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.command import add_data_dir, make_parser
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.paper.mil.measure import DATA, POOLINGS, run
from benchmarks.paper.mil.report import PARTS, report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.mil", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure missing rows, then report")
    for command in (measure, commands.add_parser("report", help="print the tables")):
        add = command.add_argument
        add("--output", type=Path, default=RESULTS / "mil.csv", help="CSV file (default: benchmarks/results/mil.csv)")
    add_data_dir(measure, "mil/")
    add = measure.add_argument
    add("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="what to measure (default: all)")
    add("--data", nargs="+", choices=DATA, default=DATA, help="data sets (default: all)")
    add("--poolings", nargs="+", choices=POOLINGS, default=POOLINGS, help="poolings (default: all)")
    add("--folds", type=int, default=10, help="outer folds (default: %(default)s)")
    add("--repeats", type=int, default=5, help="repeats with different folds and seeds (default: %(default)s)")
    processes = max(1, (os.cpu_count() or 2) - 1)
    add("--processes", type=int, default=processes, help="parallel processes (default: number of CPUs minus one)")
    add("--minutes", type=float, default=float("inf"), help="start no new fold after this time (default: no limit)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    options = parse(arguments)
    torch.set_num_threads(1)
    measured = options.command == "run"
    results = ResultTable(options.output, "cpu" if measured else None)
    if measured:
        run(options, results)
    print(report(results.rows))


if __name__ == "__main__":
    main()
