"""Training of a project with hflayers and with adaptive layers from the same weights, and the table of results."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import ahop_layers as ah
from benchmarks.harness.report import table
from benchmarks.harness.rows import Row
from benchmarks.projects.project import Project, adaptive_layers, plain_layers

NAMES = {
    "bit_pattern": "hopfield-layers, bit patterns",
    "latch_sequence": "hopfield-layers, latch sequences",
    "mnist_bags": "hopfield-layers, MNIST bags",
    "cloob": "CLOOB",
    "static": "static patterns",
    "hopular": "Hopular",
    "mhnfs": "MHNfs",
    "l2m": "L2M",
    "basecaller": "Hopfield basecaller",
    "hopcpt": "HopCPT",
    "cpp_bag": "cpp_bag",
    "hop_vae": "Hop-VAE",
    "hyper_pcm": "HyperPCM",
    "denoising": "Hopfield-integrated-test",
}
PROJECTS = tuple(NAMES)


def project_named(name: str) -> Project:
    """Returns a project by the name of its module."""
    return import_module(f"benchmarks.projects.{name}").PROJECT


class Training:
    """A model in training: one step at a time, with its losses and times."""

    def __init__(
        self, project: Project, layers: Any, state: dict[str, Any] | None = None, frozen: bool = False, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.project, self.model = project, project.build(layers)
        if state is not None:
            self.model.load_state_dict(state, strict=True)
        if frozen:
            for parameter in ah.similarity_parameters(self.model):
                parameter.requires_grad_(False)
        self.initial = {key: value.clone() for key, value in self.model.state_dict().items()}
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=project.lr)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, batch: Any, seed: int) -> None:
        """Trains one step, with the random numbers of a seed."""
        torch.manual_seed(seed)
        start = time.process_time()
        self.optimizer.zero_grad()
        loss = self.project.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.times.append(time.process_time() - start)
        self.losses.append(loss.item())

    def difference(self, other: "Training") -> float:
        """Returns the largest difference of two losses of the same step."""
        return max(abs(mine - its) for mine, its in zip(self.losses, other.losses, strict=True))


@contextmanager
def separate_projections() -> Iterator[None]:
    """Lets hflayers project patterns separately, also if they are equal."""
    with patch("torch.equal", lambda *_: False):
        yield


def measure(project: Project, steps: int) -> dict[str, float | int]:
    """Trains a project with all layers; returns losses, differences and the milliseconds of a step."""
    plain = Training(project, plain_layers())
    apart = Training(project, plain_layers(), plain.initial)
    frozen = Training(project, adaptive_layers(None), plain.initial, frozen=True)
    full = Training(project, adaptive_layers(None), plain.initial)
    blocks = Training(project, adaptive_layers(project.blocks), plain.initial)
    for step in range(steps):
        batch = project.batch(torch.Generator().manual_seed(step))
        for training in (plain, frozen, full, blocks):
            training.step(batch, step)
        with separate_projections():
            apart.step(batch, step)
    milliseconds = [1e3 * median(training.times[1:] or training.times) for training in (plain, full, blocks)]
    return {
        "first_loss": plain.losses[0],
        "loss": plain.losses[-1],
        "frozen_loss": frozen.losses[-1],
        "learned_loss": blocks.losses[-1],
        "difference": frozen.difference(plain),
        "difference_apart": frozen.difference(apart),
        "blocks": project.blocks,
        "ms": milliseconds[0],
        "full_ms": milliseconds[1],
        "blocks_ms": milliseconds[2],
    }


def report(rows: Sequence[Row]) -> str:
    """Losses, differences and times of each project."""
    header = ("project", "use", "loss, hflayers", "frozen", "largest difference", "norms apart", "CPU ms, hflayers",
              "full footprints", "blocks", "with blocks")  # fmt: skip
    body = []
    for row in rows:
        ms, full, blocks = (float(row[name]) for name in ("ms", "full_ms", "blocks_ms"))
        losses = [f"{float(row[name]):.5f}" for name in ("loss", "frozen_loss")]
        differences = [f"{float(row[name]):.0e}" for name in ("difference", "difference_apart")]
        times = [f"{ms:.3g}", f"{full / ms:.2f} x", row["blocks"], f"{blocks / ms:.2f} x"]
        body.append([NAMES[row["project"]], project_named(row["project"]).usage, *losses, *differences, *times])
    return table(header, body)
