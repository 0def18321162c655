"""Uses of Hopfield layers in published projects: the losses of hflayers and of adaptive layers, and the time of a step.

To run: python -m benchmarks.projects [--original PATH] [--projects cloob hopular] [--steps 20]
        python -m benchmarks.projects --parts adaptive --seeds 5

Each project is trained with hflayers, with frozen adaptive layers, with learned ones, and with learned ones of few
blocks, from the same weights, on the same batches, with the same random numbers. PATH is a checkout of hopfield-layers;
without it, and if hflayers is not installed, our own plain layers take its place. hflayers projects patterns together
that are equal after normalization, so that some norms receive no gradient at first; the second difference is that to
hflayers without this. Steps of all layers alternate; times are medians of the CPU time on one thread, without the first
step.

The part ``adaptive`` trains the three examples of hopfield-layers with the dot product, with full footprints and with
blocks, and measures their accuracy on held-out bags.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.projects import adaptive
from benchmarks.projects.measure import PROJECTS, measure, project_named, report
from benchmarks.projects.project import import_original, plain_layers


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the projects and prints a table of each part."""
    parser = make_parser("projects", __doc__)
    parser.add_argument("--original", type=Path, help="checkout of hopfield-layers")
    parser.add_argument("--parts", nargs="+", choices=("steps", "adaptive"), default=["steps"], help="what to measure")
    parser.add_argument("--projects", nargs="+", choices=PROJECTS, default=PROJECTS, help="which projects to measure")
    parser.add_argument("--steps", type=int, help="number of training steps (default: by part)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of the part adaptive")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.original:
        import_original(options.original)
    if "steps" in options.parts:
        measure_steps(options)
    if "adaptive" in options.parts:
        measure_adaptive(options)


def measure_steps(options: argparse.Namespace) -> None:
    """Compares losses and the times of a step with hflayers."""
    results = ResultTable(options.results / "projects.csv", "cpu")
    steps = options.steps or 20
    for name in options.projects:
        figures = measure(project_named(name), steps)
        row = {"project": name, "steps": steps, "baseline": plain_layers().Hopfield.__module__}
        results.replace([row | {key: f"{value:.6g}" for key, value in figures.items()}], "project")
        print(f"{name}: {figures['blocks_ms'] / figures['ms']:.2f} x with {figures['blocks']} blocks", flush=True)
    print(report([row for row in results.own_rows if row["project"] in options.projects]))


def measure_adaptive(options: argparse.Namespace) -> None:
    """Compares the accuracy of similarities in the examples of hopfield-layers."""
    results = ResultTable(options.results / "projects_adaptive.csv", "cpu")
    names = [name for name in adaptive.EXAMPLES if name in options.projects]
    for name in names:
        for seed in range(options.seeds):
            rows = list(adaptive.compare(name, seed, options.steps))
            results.replace(rows, "project", "seed", "similarity")
            print(name, seed, *(f"{row['similarity']}: {row['accuracy']}" for row in rows), flush=True)
    print(adaptive.report([row for row in results.own_rows if row["project"] in names]))


if __name__ == "__main__":
    main()
