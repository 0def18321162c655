"""Tabular classification on the five data sets of the paper: memories and tree ensembles with equal tuning effort.

To run: python -m benchmarks.paper.tabular [--sets adult heart] [--models A-Hop] [--trials 10] [--processes 2]
                                           [--minutes 30] [--rows 5000] [--device cuda] [--report] [--quick]

Each data set has one training and one test part: the published ones of Adult, and a random fifth for the test of the
others. Each model is tuned by 5-fold cross-validation on the training part with the same number of random trials. The
best parameters are fitted to the whole training part in five runs with different seeds of the model. The table shows
mean and standard deviation on the test part of the accuracy, or of the area under the ROC curve if fewer than a fifth
of the rows are positive (Bank, Purchase).

Data is read from --data-dir or AHOP_DATA_DIR; docs/data.md lists the files. Every trial and run is stored as soon as it
is complete, in benchmarks/results/tabular.csv, and the same command resumes. --quick is a small trial on a data set
that ships with scikit-learn. It stores nothing unless --output is given.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

import torch

from benchmarks.harness.command import add_data_dir, make_parser
from benchmarks.harness.report import group
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.paper.tabular.data import SETS
from benchmarks.paper.tabular.measure import run
from benchmarks.paper.tabular.models import MODELS, available
from benchmarks.paper.tabular.report import report


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.tabular", __doc__)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets (default: all five)")
    add("--models", nargs="+", choices=MODELS, default=None, help="models (default: all that are installed)")
    add(
        "--trials",
        type=int,
        default=10,
        help="random parameter settings of each model, 0 for its defaults (default: %(default)s)",
    )
    add("--runs", type=int, default=5, help="runs of the best setting (default: %(default)s)")
    add("--rows", type=int, default=None, help="number of training rows (default: all)")
    add_data_dir(parser, "tabular/")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="device of the memories (default: cuda if available)")
    add("--processes", type=int, default=1, help="parallel processes, each with one thread (default: %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="start nothing new after this time (default: no limit)")
    add("--report", action="store_true", help="only print the tables of the stored results")
    add("--output", type=Path, default=None, help="CSV file (default: benchmarks/results/tabular.csv)")
    add("--quick", action="store_true", help="small trial without data files")
    options = parser.parse_args()
    options.models = available(options.models or MODELS)
    if options.quick:
        options.sets, options.trials, options.runs = ["tumors"], 2, 2
    return options


def main() -> None:
    """Measures and reports."""
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.quick and options.output is None:
            options.output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tabular.csv"
        results = ResultTable(options.output or RESULTS / "tabular.csv", None if options.report else options.device)
        if not options.report:
            run(options, results)
        for (settings,), rows in group(results.rows, "settings").items():
            print(f"Test results, {settings}.\n\n{report(rows)}\n")


if __name__ == "__main__":
    main()
