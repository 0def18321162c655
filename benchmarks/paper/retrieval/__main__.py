"""Memory retrieval as in the figure and the tables of the paper: how often a memory finds the pattern behind a query.

To run: python -m benchmarks.paper.retrieval [--table figure|accuracy|ablations|multimodal|timing|all] [--quick]

Every run draws new patterns and new signs of the bias. Queries are mixed variants, drawn as in the appendix of the
paper: noise of variance d_noise is added, then a fraction d_mask of the dimensions is replaced by uniform values, then
a bias of magnitude d_bias with fixed random signs is added. Accuracy is the fraction of queries whose pattern is the
one nearest to the readout. Error is the mean squared error per dimension. Both are measured on queries that were not
used for training.

The Bayes limit is the accuracy of the exact maximum-a-posteriori decision, with a known bias, and with a bias whose
signs must be inferred from the single query. Sorted similarities do not depend on the order of the dimensions, so A-Hop
without de-biasing cannot exceed the second limit. A figure of the paper that does exceed it cannot come from queries
that were drawn and scored in this way.

The multimodal table links two memories: a damaged digit finds its concept in the first one, and a damaged copy of
the concept's other side is then looked up in the second one. The paper does not describe the data of this table. Here
both sides are digits of scikit-learn.

Every measured row is stored immediately and is not measured again on the same device, so an interrupted run resumes.
MNIST is read from ``--data-dir``, AHOP_DATA_DIR or data (see docs/data.md). Without it, its columns are left out.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.command import add_device, explain_missing_data, make_parser
from benchmarks.harness.report import picture_for
from benchmarks.harness.rows import RESULTS, ResultTable, rows_with
from benchmarks.paper.retrieval import multimodal, report
from benchmarks.paper.retrieval.measure import QUICK, Size, measure_missing, measurements, timings
from benchmarks.paper.retrieval.systems import data_folder

TABLES = ("figure", "accuracy", "ablations", "multimodal", "timing")


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.retrieval", __doc__)
    add = parser.add_argument
    add("--table", default="all", choices=[*TABLES, "all"], help="what to measure (default: all)")
    add("--runs", type=int, help="runs of each row (default: 5, with --quick 1)")
    add("--quick", action="store_true", help="small version with few patterns and steps, without MNIST")
    add_device(parser)
    add("--data-dir", type=Path, help="folder with mnist/ (default: AHOP_DATA_DIR, else data)")
    add("--output", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    return parser.parse_args()


def main() -> None:
    """Measures the missing rows, prints the tables, and draws the figure."""
    options = parse()
    device, size = options.device, QUICK if options.quick else Size()
    size = size if options.runs is None else size._replace(runs=options.runs)
    with explain_missing_data():
        folder = None if options.quick else data_folder(options.data_dir)
    tables = TABLES if options.table == "all" else (options.table,)
    suffix = "_quick" if options.quick else ""

    by_table = {table: measurements(table, size, folder is not None) for table in tables if table in report.TABLES}
    results = ResultTable(options.output / f"retrieval{suffix}.csv", device.type)
    measure_missing([each for wanted in by_table.values() for each in wanted], size, folder, device, results)
    for table, wanted in by_table.items():
        print(report.TABLES[table](rows_with(map(asdict, wanted), results.own_rows)), end="\n\n")
    if "multimodal" in tables:
        pairs = multimodal.measurements(size)
        linked = ResultTable(options.output / f"multimodal{suffix}.csv", device.type)
        multimodal.measure_missing(pairs, size, device, linked)
        print(report.pair_table(rows_with(map(asdict, pairs), linked.own_rows)), end="\n\n")
    if "timing" in tables:
        times = ResultTable(options.output / f"retrieval_timing{suffix}.csv", device.type)
        times.replace(timings(size, device))
        print(report.timing_table(times.own_rows))
    if "figure" in tables:
        rows = rows_with(map(asdict, by_table["figure"]), results.own_rows)
        print(f"plot: {report.draw(rows, picture_for(results.path, 'retrieval'))}")


if __name__ == "__main__":
    main()
