"""Time and memory of a training step of Hopfield layers, compared with the original hopfield-layers.

To run: python -m benchmarks.hflayers --original PATH [--device cuda] [--layers ...] [--precisions ...] [--systems ...]

PATH is a checkout of https://github.com/ml-jku/hopfield-layers. A step is forward and backward, with the gradients of
the input and of all parameters. All systems start from the weights of hflayers; its layers are new, so that it projects
equal patterns together, its fastest case. Seeded noise is added to the weights of the similarities: at initialization
they are equal, and the kernels skip the sort. Systems are

- ``hflayers``: the baseline, always measured;
- ``plain``: the layers of :mod:`ahop_layers.hopfield`;
- ``adaptive``: adaptive layers with default arguments;
- ``4 blocks`` and ``full footprints``: adaptive layers with ``blocks=4`` and ``blocks=None``.

A time is measured on the clock of the caller: several steps and one synchronization. All systems take turns in one
process, and the median over the turns counts. Memory is the peak of one step in addition to the layer and its input; on
a CPU it is measured in a process of its own for each system. ``TF32`` is float32 with
``torch.backends.cuda.matmul.allow_tf32``, and ``bfloat16`` is autocast. A CPU has an eighth of the batch and, without
--precisions, float32 only. Rows are stored after each layer and replace earlier rows of the same measurement here.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers import hopfield
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import in_own_process, peak, reset_peak
from benchmarks.harness.report import group, number, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.projects.project import NO_NORMS, STATIC, import_original
from benchmarks.vit_layers import perturb_, seconds_per_step


class Layer(NamedTuple):
    """A layer, the keywords of its constructor, and the batch and length of its input."""

    kind: str
    keywords: dict[str, Any]
    batch: int
    length: int

    def shape(self, device: str) -> tuple[int, int, int]:
        """Returns the shape of the input."""
        return self.batch if device == "cuda" else self.batch // 8, self.length, self.keywords["input_size"]


WIDE = {"input_size": 512, "num_heads": 8}
STORED = {"input_size": 256, "num_heads": 8, "quantity": 1000}
ALL_STATIC = {"input_size": 64, "disable_out_projection": True, **STATIC, **NO_NORMS}
LAYERS = {
    "heads-16": Layer("Hopfield", {"input_size": 64, "num_heads": 4}, 64, 128),
    "heads-64": Layer("Hopfield", WIDE, 32, 256),
    "long": Layer("Hopfield", WIDE, 8, 1024),
    "stored": Layer("HopfieldLayer", STORED, 32, 128),
    "pooling": Layer("HopfieldPooling", WIDE, 16, 1024),
    "static": Layer("Hopfield", ALL_STATIC, 16, 512),
    "steps": Layer("Hopfield", {"input_size": 64, "num_heads": 4, "update_steps_max": 3}, 64, 128),
}
NAMES = {
    "heads-16": "`Hopfield`, 4 heads of 16",
    "heads-64": "`Hopfield`, 8 heads of 64",
    "long": "`Hopfield`, 8 heads of 64",
    "stored": "`HopfieldLayer`, 1,000 stored patterns, 8 heads of 32",
    "pooling": "`HopfieldPooling`, 8 heads of 64",
    "static": "`Hopfield`, all patterns static, 64 dimensions",
    "steps": "`Hopfield`, 4 heads of 16, 3 update steps",
}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "adaptive": ("Adaptive", {}),
    "4 blocks": ("Adaptive", {"blocks": 4}),
    "full footprints": ("Adaptive", {"blocks": None}),
}
PRECISIONS = ("float32", "TF32", "bfloat16")
KEY = ("layer", "input", "precision", "system")


def build(name: str, system: str, device: str, original: Path) -> nn.Module:
    """Returns a layer of one system, with the weights that hflayers draws from seed 0."""
    torch.manual_seed(0)
    kind, keywords, *_ = LAYERS[name]
    theirs: nn.Module = getattr(import_original(original), kind)(**keywords)
    if system == "hflayers":
        return theirs.to(device)
    prefix, more = SYSTEMS[system]
    layer: nn.Module = getattr(hopfield, prefix + kind)(**keywords, **more)
    layer.load_state_dict(theirs.state_dict(), strict=True)
    perturb_(layer)
    return layer.to(device)


def step(layer: nn.Module, x: Tensor, precision: str) -> None:
    """Computes an output and all gradients."""
    layer.zero_grad()
    x.grad = None
    torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        output = layer(x)
    output.backward(output.detach())


def megabytes(layer: nn.Module, x: Tensor, precision: str) -> float:
    """Returns the peak memory of a step in addition to the layer and its input."""
    layer.zero_grad()
    x.grad = None
    before = reset_peak(x.device.type)
    step(layer, x, precision)
    return (peak(x.device.type) - before) / 1e6


def cpu_megabytes(name: str, system: str, precision: str, original: Path) -> float:
    """Returns the same on a CPU, to be called in a new process."""
    layer, shape = build(name, system, "cpu", original), LAYERS[name].shape("cpu")
    step(layer, torch.randn(1, 8, shape[2], requires_grad=True), precision)  # loads the kernels
    return megabytes(layer, torch.randn(shape, requires_grad=True), precision)


def measure(options: argparse.Namespace, name: str, precision: str) -> list[dict[str, object]]:
    """Returns the rows of one layer in one precision."""
    device, shape = options.device, LAYERS[name].shape(options.device)
    x = torch.randn(shape, device=device, requires_grad=True)
    systems = list(dict.fromkeys(("hflayers", *options.systems)))
    layers = {system: build(name, system, device, options.original) for system in systems}
    steps: dict[str, Callable[[], None]] = {key: partial(step, layer, x, precision) for key, layer in layers.items()}
    times = seconds_per_step(steps, device, options.turns, options.seconds)
    if device == "cuda":
        memory = {system: megabytes(layer, x, precision) for system, layer in layers.items()}
    else:
        given = (precision, options.original)
        memory = {system: in_own_process(cpu_megabytes, name, system, *given) for system in systems}
    rows: list[dict[str, object]] = []
    for system in systems[1:]:
        figures = {"ms": 1e3 * times[system], "hflayers ms": 1e3 * times["hflayers"]}
        figures |= {"MB": memory[system], "hflayers MB": memory["hflayers"]}
        key = (name, f"{shape[0]} x {shape[1]:,}", precision, system)
        rows.append(dict(zip(KEY, key, strict=True)) | {each: f"{value:.4g}" for each, value in figures.items()})
        ratios = [f"{figures[unit] / figures[f'hflayers {unit}']:.2f} x {unit}" for unit in ("ms", "MB")]
        print(f"{name:9} {precision:9} {system:16} {figures['ms']:9.3f} ms  {'  '.join(ratios)}", flush=True)
    return rows


def report(rows: Sequence[Row]) -> str:
    """Times and memory of hflayers, and of each measured system relative to them."""
    units, systems = ("ms", "MB"), [each for each in SYSTEMS if any(row["system"] == each for row in rows)]
    header = [f"hflayers, {unit}" if each == "hflayers" else each for unit in units for each in ("hflayers", *systems)]
    body = []
    for (name, given, precision), mine in group(rows, "layer", "input", "precision").items():
        found, cells = {row["system"]: row for row in mine}, []
        for unit in units:
            ratios = {each: float(row[unit]) / float(row[f"hflayers {unit}"]) for each, row in found.items()}
            cells += [number(mine[0][f"hflayers {unit}"])]
            cells += [f"{ratios[each]:.2f}" if each in ratios else "" for each in systems]
        body.append([NAMES[name], given, precision, *cells])
    return table(["layer", "input", "precision", *header], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and stores the rows after each layer and precision."""
    parser = make_parser("hflayers", __doc__)
    add = parser.add_argument
    add("--original", type=Path, required=True, help="checkout of hopfield-layers")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device to measure (default: %(default)s)")
    add("--layers", nargs="+", choices=LAYERS, default=tuple(LAYERS), help="layers to measure (default: all)")
    add("--precisions", nargs="+", choices=PRECISIONS, help="precisions (default: all on a GPU, float32 on a CPU)")
    add("--systems", nargs="+", choices=SYSTEMS, default=tuple(SYSTEMS), help="systems to measure (default: all)")
    add("--turns", type=int, default=5, help="turns of each system (default: %(default)s)")
    add("--seconds", type=float, default=0.1, help="least time of a turn in seconds (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "hflayers.csv", help="default: benchmarks/results/hflayers.csv")
    options = parser.parse_args(arguments)
    results, begin = ResultTable(options.output, options.device), time.perf_counter()
    print(f"{results.origin['device']}, torch {torch.__version__}; ratios to hflayers in this run")
    for precision in options.precisions or PRECISIONS[: None if options.device == "cuda" else 1]:
        for name in options.layers:
            results.replace(measure(options, name, precision), *KEY)
            gc.collect()
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
