"""How robust a learned similarity is: accuracy of search with damaged queries against one-line baselines.

To run: python -m benchmarks.robust [--table missing] [--data faces16 digits] [--splits 5] [--device cuda]

The tables:
  levels      accuracy by the level of damage, against all baselines
  missing     30 % and 60 % of the values of a query are missing; the fit knows nothing of it
  pairs       a fit from 16 to 1,024 pairs of damaged queries, against a fit from the damage itself
  ablation    L1, trimmed L1, learned weights of ranks, saturating bases, and both
  scale       all values multiplied by 0.001, 1 and 1,000
  confidence  known queries against people, or sensor rows, that are not stored (take --splits 20)

One fit covers the whole range of damage. Every baseline has one parameter for the whole range, chosen on damaged stored
patterns. Values of images are replaced by uniform ones with probability 0 to 0.9; embeddings are unit vectors with
noise and 70 % of the values erased; up to 60 % of the sensors of a table are stuck at the value of another row, spike
by 3 to 10 deviations, or are missing, and all have noise of a tenth of their deviation. Faces and MNIST are classified
by the best of the stored images (1,000 faces, 1,207 digits); of the others, the pattern itself is to be found. Pairs of
faces are made of images that are neither stored nor asked, pairs of the others of stored patterns. Baselines see each
sensor divided by its deviation, and compare known values only; the memory, with default arguments, sees the raw values.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import picture_for, row_table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.robust import measure, report
from benchmarks.robust.tasks import NAMES, Task, make_task


class Table(NamedTuple):
    """Data sets, the function that measures a split, and the one that shows the rows."""

    data: tuple[str, ...]
    measure: Callable[[Task, torch.Generator, int], measure.Figures]
    report: Callable[[Sequence[Row]], str]


TABLES = {
    "levels": Table(tuple(NAMES), measure.measure_levels, report.levels),
    "missing": Table(("faces16", "mnist", "digits", "embeddings", "sensors"), measure.measure_missing, report.missing),
    "pairs": Table(("faces16", "digits"), measure.measure_pairs, report.pairs),
    "ablation": Table(("faces16", "digits", "embeddings"), measure.measure_ablation, report.ablation),
    "scale": Table(("embeddings",), measure.measure_scale, row_table),
    "confidence": Table(("faces16", "faces32", "sensors"), measure.measure_confidence, report.confidence),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing splits and prints the table."""
    parser = make_parser("robust", __doc__)
    add = parser.add_argument
    add("--table", choices=TABLES, default="levels", help="what to measure (default: %(default)s)")
    add("--data", nargs="+", choices=NAMES, help="data sets (default: all of the table)")
    add("--splits", type=int, default=5, help="number of random splits (default: %(default)s)")
    add("--queries", type=int, help="use only so many queries per level (default: all)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--output", type=Path, help="CSV file (default: robust.csv or robust_TABLE.csv in benchmarks/results)")
    add_data_dir(parser, "faces/yale_b.npz and mnist")
    options = parser.parse_args(arguments)
    name = "robust" if options.table == "levels" else f"robust_{options.table}"
    output = options.output or RESULTS / f"{name}.csv"
    chosen, results, device = TABLES[options.table], ResultTable(output, options.device), torch.device(options.device)
    for data in options.data or chosen.data:
        for split in range(options.splits):
            key = {"data": data, "split": split}
            if results.has(key):
                continue
            began = time.perf_counter()
            with explain_missing_data():
                task = make_task(data, options.data_dir, torch.Generator().manual_seed(split))
            task = task._replace(asked=task.asked[: options.queries], target=task.target[: options.queries]).to(device)
            found = chosen.measure(task, torch.Generator(device).manual_seed(split), split)
            results.add(
                *(
                    {**key, "method": method, "level": level, "value": f"{value:.4f}"}
                    for method, values in found.items()
                    for level, value in values.items()
                )
            )
            print(f"{data}, split {split + 1} of {options.splits}: {time.perf_counter() - began:.1f} s", flush=True)
    print(chosen.report(results.own_rows))
    if options.table == "pairs":
        print(f"plot: {report.draw_pairs(results.own_rows, picture_for(output, name))}")


if __name__ == "__main__":
    main()
