"""A robust lookup as the first layer of a network, against the same network without it and a CNN in its place.

To run: AHOP_DATA_DIR=DIR python -m benchmarks.paper.lookup [--parts faces bags] [--seeds 3] [--device cuda]

The lookup is an AdaptiveHopfieldLayer that stores clean images and compares them with an image by footprints of blocks.
Initially only the most similar blocks count, so that it is robust before it is trained.

- ``faces``: half of the faces of each person are stored, and their damaged copies are the training set; a lookup
  leaves the original out. It reads the labels of similar faces. An MLP classifies them, the pixels (``none``), the
  features of a CNN (``cnn``), or both. Each network is trained once over all fractions of a kind of damage: random
  values of single pixels, or a covered block of random brightness. ``lookup, not trained`` is the lookup alone.
- ``bags``: bags of damaged MNIST digits; label 1: the bag holds a nine. The lookup replaces each digit by the similar
  ones of 1,000 clean digits that are in no bag. Convolutions, adaptive pooling and a linear layer follow. ``cnn`` has
  three more convolutions instead of the lookup; ``cnn, pretrained`` was first trained to restore damaged copies of
  the same 1,000 digits. ``lookup, not trained`` keeps the initial weights of the lookup and trains the rest. ``repair``
  is the network of ``none``, trained on clean bags, behind a memory of the 1,000 digits that repairs the test bags.

Every row is stored immediately and is not measured again on the same device. docs/data.md lists the files.
"""

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness.command import add_data_dir, add_device, explain_missing_data, make_parser
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.paper.lookup.measure import QUICK, Size, measure, measurements
from benchmarks.paper.lookup.report import report

PARTS = ["faces", "bags"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing rows and prints the tables."""
    parser = make_parser("paper.lookup", __doc__)
    add_data_dir(parser, "faces/ and mnist/")
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    add("--seeds", type=int, default=3, help="seeds of data and training (default: %(default)s)")
    add("--quick", action="store_true", help="few steps and bags, to see that it runs")
    add_device(parser)
    add("--output", type=Path, default=RESULTS / "lookup.csv", help="CSV file (default: benchmarks/results/lookup.csv)")
    options = parser.parse_args(arguments)
    device, size = options.device, QUICK if options.quick else Size()

    results = ResultTable(options.output, device.type)
    wanted = [each for each in measurements(options.parts, options.seeds, size) if not results.has(each._asdict())]
    with explain_missing_data():
        for each in tqdm(wanted, unit="network", disable=None):
            results.add_figures(each._asdict(), measure(each, options.data_dir, size, device))
    print(report(results.own_rows))


if __name__ == "__main__":
    main()
