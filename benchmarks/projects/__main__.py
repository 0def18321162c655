"""Uses of Hopfield layers in published projects: the losses of hflayers and of adaptive layers, and the time of a step.

To run: python -m benchmarks.projects [--projects cloob hopular] [--steps 20]

Each project is trained with hflayers, with frozen adaptive layers, with learned ones, and with learned ones of few
blocks, from the same weights, on the same batches, with the same random numbers. Without hflayers, our own plain layers
take its place. hflayers projects patterns together that are equal after normalization, so that some norms receive no
gradient at first; the second difference is that to hflayers without this. Steps of all layers alternate; times are
medians of the CPU time on one thread, without the first step.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.projects.measure import PROJECTS, measure, project_named, report
from benchmarks.projects.project import plain_layers


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the projects and prints the table."""
    parser = make_parser("projects", __doc__)
    parser.add_argument("--projects", nargs="+", choices=PROJECTS, default=PROJECTS, help="which projects to measure")
    parser.add_argument("--steps", type=int, default=20, help="number of training steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = ResultTable(options.results / "projects.csv", "cpu")
    for name in options.projects:
        figures = measure(project_named(name), options.steps)
        row = {"project": name, "steps": options.steps, "baseline": plain_layers().Hopfield.__module__}
        results.replace([row | {key: f"{value:.6g}" for key, value in figures.items()}], "project")
        print(f"{name}: {figures['blocks_ms'] / figures['ms']:.2f} x with {figures['blocks']} blocks", flush=True)
    print(report([row for row in results.own_rows if row["project"] in options.projects]))


if __name__ == "__main__":
    main()
