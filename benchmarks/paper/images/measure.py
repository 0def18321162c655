"""The measurements of the image benchmark, one model at a time."""

import argparse
import gc
import itertools
import time
from dataclasses import replace

import torch

from benchmarks.harness.rows import ResultTable
from benchmarks.images import ImageSet
from benchmarks.paper.images.model import channel_scale
from benchmarks.paper.images.training import DAMAGES, Setup, Training, accuracy, build, repair_accuracies, speeds

ATTENTIONS = ("dot", "adaptive", "kernel", "sparse")
BLOCKS = ("adaptive:blocks=4", "adaptive:blocks=8")
SETUPS = {
    "paper": Setup("paper", 25, 128, ATTENTIONS),
    "working": Setup("small", 40, 256, ("dot", "adaptive", *BLOCKS), 1e-3, 0.05, 0.1, augment=True, smoothing=0.1),
    "throughput": Setup("small", 1, 256, (*ATTENTIONS, "eager")),
}
SETUPS["repair"] = replace(SETUPS["working"], attentions=("dot",))
RATES = (1e-3, 3e-4, 1e-4)
"""The learning rates of every attention in the experiment of the paper, which uses the first."""


def make(attention: str, setup: Setup, data: ImageSet, graphs: bool) -> Training:
    """Builds a model and its training."""
    return Training(*build(attention, setup, data, channel_scale(data.train.images)), data, setup, graphs)


def measure(
    options: argparse.Namespace, setup: Setup, attention: str, seed: int, data: ImageSet, deadline: float
) -> dict[str, float] | None:
    """Measures one model. Returns None if there is no time to train it."""
    gc.collect()  # frees the memory of the previous model
    torch.manual_seed(seed)
    training = make(attention, setup, data, options.graphs)
    if options.setup == "throughput":
        return speeds(training, options.seconds)
    if not training.run(seed, deadline):
        return None
    measured = {"accuracy": accuracy(training)}
    if options.setup == "working":
        for damage, strengths in DAMAGES.items():
            for strength in strengths:
                measured[f"{damage.__name__} {strength}"] = accuracy(training, damage, strength)
    if options.setup == "repair":
        torch.manual_seed(seed)
        rival = make(attention, replace(setup, damaged=True), data, options.graphs)
        if not rival.run(seed, deadline):
            return None
        measured |= repair_accuracies(training, rival, seed)
    return measured


def run(options: argparse.Namespace, setup: Setup, data: ImageSet, results: ResultTable) -> None:
    """Measures what the results do not have yet: all learning rates and attentions of a seed before the next seed."""
    deadline = time.perf_counter() + 60 * options.minutes
    data = data._replace(train=data.train.to(options.device), test=data.test.to(options.device))
    common = f"{options.data}, {setup.model}, patch {setup.patch or data.patch}, batch {setup.batch}"
    for seed, rate, attention in itertools.product(range(options.seeds), options.lr, setup.attentions):
        if options.setup == "throughput":
            settings = f"{common}, {'recorded' if options.graphs else 'plain'}"
        else:
            settings = f"{common}, {setup.epochs} epochs, lr {rate:g}"
        key = {"setup": options.setup, "settings": settings, "attention": attention, "seed": str(seed)}
        if results.has(key):
            continue
        print(f"{attention}, seed {seed}: {settings}", flush=True)
        late = time.perf_counter() > deadline
        measured = None if late else measure(options, replace(setup, lr=rate), attention, seed, data, deadline)
        if measured is None:
            print(f"  skipped: it would not end within {options.minutes:g} minutes; the same command resumes here")
            return
        results.add_figures(key, measured)
        print("  " + ", ".join(f"{name} {value:.5g}" for name, value in measured.items()), flush=True)
