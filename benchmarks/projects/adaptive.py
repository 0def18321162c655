"""Accuracy of learned similarities in the examples of hopfield-layers, on held-out bags, from equal weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Generator, nn

from benchmarks.harness.report import bold_best, group, spread, table
from benchmarks.harness.rows import Row
from benchmarks.projects.measure import NAMES, Training, project_named
from benchmarks.projects.mnist_bags import digit_bag
from benchmarks.projects.project import adaptive_layers, plain_layers

SYSTEMS = ("dot product", "full footprints", "blocks")
TEST_SEED = 10**6
"""Added to a seed for held-out batches."""


class Example(NamedTuple):
    """How an example is trained and tested.

    Attributes:
        batch: draws a batch, given a generator and whether it is held out.
        batches: number of different training batches.
        steps: number of training steps.
        tests: number of held-out batches.
        lr: learning rate of AdamW.
    """

    batch: Callable[[Generator, bool], Any]
    batches: int
    steps: int
    tests: int
    lr: float


def of_project(name: str) -> Callable[[Generator, bool], Any]:
    """Returns the batches of a project, which are drawn at random: held-out ones differ only in the seed."""
    return lambda generator, _: project_named(name).batch(generator)


EXAMPLES = {
    "bit_pattern": Example(of_project("bit_pattern"), batches=64, steps=1200, tests=32, lr=1e-3),
    "latch_sequence": Example(of_project("latch_sequence"), batches=64, steps=120, tests=32, lr=1e-3),
    "mnist_bags": Example(digit_bag, batches=200, steps=600, tests=200, lr=2e-4),
}


@torch.no_grad()
def accuracy(model: nn.Module, batches: Sequence[Any]) -> float:
    """Returns the fraction of batch entries whose logit has the sign of their class."""
    model.eval()
    right = [((model(data) > 0) == (label > 0.5)).float() for data, label in batches]
    return float(torch.cat(right).mean())


def compare(name: str, seed: int, steps: int | None = None) -> Iterator[dict[str, object]]:
    """Trains an example with all similarities from the same weights, on the same batches; yields a row for each."""
    example = EXAMPLES[name]
    project, steps = replace(project_named(name), lr=example.lr), steps or example.steps
    plain = Training(project, plain_layers(), seed=seed)
    systems = [adaptive_layers(None), adaptive_layers(project.blocks)]
    trainings = [plain, *(Training(project, layers, plain.initial, seed=seed) for layers in systems)]
    generator = torch.Generator().manual_seed(seed)
    batches = [example.batch(generator, False) for _ in range(min(steps, example.batches))]
    for step in range(steps):
        for training in trainings:
            training.step(batches[step % len(batches)], step)
    generator.manual_seed(TEST_SEED + seed)
    tests = [example.batch(generator, True) for _ in range(example.tests)]
    for system, training in zip(SYSTEMS, trainings, strict=True):
        yield {
            "project": name,
            "seed": seed,
            "similarity": system,
            "blocks": project.blocks if system == "blocks" else "",
            "steps": steps,
            "accuracy": f"{accuracy(training.model, tests):.4f}",
            "loss": f"{mean(training.losses[-100:]):.4f}",
        }


def report(rows: Sequence[Row]) -> str:
    """Mean and standard deviation of the held-out accuracy by example and similarity."""
    body = []
    for (name,), mine in group(rows, "project").items():
        cells = []
        for system in SYSTEMS:
            figures = [float(row["accuracy"]) for row in mine if row["similarity"] == system]
            cells.append(spread(figures))
        blocks = next(row["blocks"] for row in mine if row["blocks"])
        seeds = len({row["seed"] for row in mine})
        body.append([NAMES[name], mine[0]["steps"], seeds, *bold_best(cells), blocks])
    return table(("example", "steps", "seeds", "dot product", "full footprints", "with blocks", "blocks"), body)
