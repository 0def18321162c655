"""Search with damaged queries on real images: how often a method finds the class of a damaged image.

To run: python -m benchmarks.search [--data faces digits fashion] [--damage pixels occlusion] [--device cuda]
        python -m benchmarks.search --data ar --file AR_42_30.mat [--device cuda]

Half of the images of each class are stored, the others are asked, in five seeded splits. Queries have a fraction of
their pixels replaced by random values, or a square block covered by another image. Every method that learns is trained
once for all levels of a kind of damage, on damaged copies of the stored images. Accuracy is the fraction of
queries whose predicted class is right.

The methods are the nearest stored image by Euclidean, cosine, L1 and trimmed L1 distance, sparse representation with an
error term (Wright et al. 2009), robust coding (Yang et al. 2013), a convolutional network, and a memory of images as it
comes from the package: with all patches, with a fixed share of them, and with learned weights.

AR, faces behind sunglasses and scarves, has protocols with published results: see benchmarks/search/ar.py.

Every measured row is stored immediately and is not measured again on the same device, so an interrupted run resumes.
Images are read from ``--data-dir``, AHOP_DATA_DIR or data (see docs/data.md); without ``--data``, the sets that are not
there are left out.
"""

import argparse
import itertools
from pathlib import Path

from benchmarks.harness.command import add_data_dir, add_device, explain_missing_data, make_parser
from benchmarks.harness.report import picture_for
from benchmarks.harness.rows import RESULTS, ResultTable, rows_with
from benchmarks.search import ar, report
from benchmarks.search.data import LEVELS, SETS, available, load
from benchmarks.search.measure import answers, measure_missing, wanted
from benchmarks.search.packaged import OWN
from benchmarks.search.rivals import RIVALS


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("search", __doc__)
    add = parser.add_argument
    rivals = f"methods beside the adaptive memory, some of {', '.join(map(repr, RIVALS))} (default: all)"
    add("--data", nargs="+", choices=(*SETS, "ar"), help="data sets (default: all whose files are there)")
    add("--damage", nargs="+", choices=LEVELS, default=list(LEVELS), help="kinds of damage (default: all)")
    add("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS), metavar="NAME", help=rivals)
    add("--file", type=Path, help="the file of AR, of 42 x 30 pixels")
    add("--splits", type=int, default=5, help="number of splits (default: 5)")
    add("--levels", nargs="+", type=float, help="fractions of the image that are damaged (default: all)")
    add("--picture", type=float, metavar="LEVEL", help="also draw queries of this level and what each method answers")
    add_device(parser)
    add_data_dir(parser, "faces/, mnist/ and fashion-mnist/")
    add("--output", type=Path, default=RESULTS / "search.csv", help="results (default: benchmarks/results/search.csv)")
    options = parser.parse_args(arguments)
    if "ar" in (options.data or ()) and (options.data != ["ar"] or options.file is None):
        parser.error("argument --data: ar needs --file, and no other data set")
    known = {level for kind in options.damage for level in LEVELS[kind]}
    if unknown := sorted(set(options.levels or ()) - known):
        parser.error(f"argument --levels: expected some of {sorted(known)}, got {unknown}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measures the missing rows, prints the tables, and draws the curves and the answers."""
    options = parse(arguments)
    device = options.device
    methods = [*options.rivals, *OWN]
    if options.data == ["ar"]:
        results = ResultTable(options.output.with_name("ar.csv"), device.type)
        print(ar.accuracy_table(ar.measure(options.file, device, results, ar.SEEDS, list(ar.METHODS))))
        return
    with explain_missing_data():
        sets = options.data or available(options.data_dir)
        for name in sets:
            load(name, options.data_dir)
    levels_of = wanted(sets, options.damage, options.splits, methods, options.levels)
    results = ResultTable(options.output, device.type)
    measure_missing(levels_of, options.data_dir, device, results)
    rows = rows_with((each.row(level) for each in levels_of for level in levels_of[each]), results.own_rows)
    print(report.accuracy_table(rows), end="\n\n")
    curves = picture_for(options.output, "search")
    print(f"plot: {report.draw_curves(rows, curves)}")
    for name, kind in itertools.product(sets, options.damage) if options.picture is not None else ():
        drawn = [method for method in methods if method != "not sorted"]
        shown = answers(name, kind, options.picture, drawn, options.data_dir, device)
        print(f"picture: {report.draw_answers(shown, curves.with_name(f'{curves.stem}_{name}_{kind}.png'))}")


if __name__ == "__main__":
    main()
