"""Search with damaged queries on real images: how often a method finds the class of a corrupted image.

To run: python -m benchmarks.search [--data faces digits fashion] [--only METHOD ...] [--splits 5] [--device cuda]

Half of the images of each class are stored, the others are asked, in five seeded splits. Queries have a fraction of
their pixels replaced by random values, or a square block covered by another image. Every method that learns is trained
once for all levels of a kind of corruption, on corrupted copies of the stored images. Accuracy is the fraction of
queries whose predicted class is right.

The methods are the nearest stored image by Euclidean, cosine, L1 and trimmed L1 distance, sparse representation with an
error term (Wright et al. 2009), a convolutional network, and an adaptive memory with footprints of several resolutions.

Every measured row is stored immediately and is not measured again on the same device, so an interrupted run resumes.
Faces and Fashion-MNIST are read from ``--data-dir``, AHOP_DATA_DIR or data (see docs/data.md); without ``--data``, the
sets that are not there are left out.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import picture_for
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.search import report
from benchmarks.search.data import LEVELS, SETS, available, load
from benchmarks.search.measure import METHODS, answers, measure_missing, rows_of, wanted


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("search", __doc__)
    add = parser.add_argument
    add("--data", nargs="+", choices=SETS, help="data sets (default: all whose files are there)")
    add("--kinds", nargs="+", choices=LEVELS, default=list(LEVELS), help="kinds of corruption (default: all)")
    add("--only", nargs="+", choices=METHODS, default=list(METHODS), help="methods (default: all)")
    add("--splits", type=int, default=5, help="number of splits (default: 5)")
    add("--levels", nargs="+", type=float, help="fractions of the image that are corrupted (default: all)")
    add("--picture", type=float, metavar="LEVEL", help="also draw queries of this level and the answer of each method")
    add("--device", default="auto", help="cpu, cuda, or auto: cuda if available (default: auto)")
    add_data_dir(parser, "faces/ and fashion-mnist/")
    add("--output", type=Path, default=RESULTS / "search.csv", help="results (default: benchmarks/results/search.csv)")
    options = parser.parse_args(arguments)
    known = {level for kind in options.kinds for level in LEVELS[kind]}
    if unknown := sorted(set(options.levels or ()) - known):
        parser.error(f"argument --levels: expected some of {sorted(known)}, got {unknown}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measures the missing rows, prints the tables, and draws the curves and the answers."""
    options = parse(arguments)
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    sets = options.data or available(options.data_dir)
    with explain_missing_data():
        for name in sets:
            load(name, options.data_dir)
    levels_of = wanted(sets, options.kinds, options.splits, options.only, options.levels)
    results = ResultTable(options.output, device.type)
    measure_missing(levels_of, options.data_dir, device, results)
    rows = rows_of(levels_of, results.own_rows)
    print(report.accuracy_table(rows), end="\n\n")
    curves = picture_for(options.output, "search")
    print(f"plot: {report.draw_curves(rows, curves)}")
    for kind in options.kinds if options.picture is not None else ():
        shown = answers(sets[0], kind, options.picture, options.only, options.data_dir, device)
        path = curves.with_name(f"{curves.stem}_{kind}.png")
        print(f"picture: {report.draw_answers(shown, path)}")


if __name__ == "__main__":
    main()
