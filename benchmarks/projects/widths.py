"""Time of a step by the width of static patterns and the number of blocks, relative to hflayers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.harness.report import table
from benchmarks.harness.rows import Row
from benchmarks.projects import cloob
from benchmarks.projects.measure import Training
from benchmarks.projects.project import adaptive_layers, plain_layers

WIDTHS = (16, 64, 256, 1024)
BLOCKS = (4, 8, 16)
FULL_WIDTH = 256
"""Full footprints of wider patterns take seconds per step and are not measured."""


def measure(width: int, steps: int) -> dict[str, str]:
    """Trains CLOOB's model with patterns of a width; returns the ratios of the times of a step to that of hflayers."""
    project = replace(cloob.PROJECT, build=partial(cloob.Pairs, dim=width))
    plain = Training(project, plain_layers())
    kinds = {f"{blocks} blocks": blocks for blocks in BLOCKS} | ({"full": None} if width <= FULL_WIDTH else {})
    others = {name: Training(project, adaptive_layers(blocks), plain.initial) for name, blocks in kinds.items()}
    for step in range(steps):
        batch = project.batch(torch.Generator().manual_seed(step))
        for training in (plain, *others.values()):
            training.step(batch, step)
    times = {name: median(training.times[1:] or training.times) for name, training in others.items()}
    base = median(plain.times[1:] or plain.times)
    return {"ms": f"{1e3 * base:.4g}"} | {name: f"{time / base:.4g}" for name, time in times.items()}


def report(rows: Sequence[Row]) -> str:
    """The times of a step by width and number of blocks."""
    names = [*(f"{blocks} blocks" for blocks in BLOCKS), "full"]
    header = ("width", "CPU ms, hflayers", *names[:-1], "full footprints")
    body = [
        [
            row["width"],
            f"{float(row['ms']):.3g}",
            *(f"{float(row[name]):.2f} x" if row.get(name) else "" for name in names),
        ]
        for row in rows
    ]
    return table(header, body)
