"""What the parts of benchmarks/vit.py share, and its parts that measure one attention layer.

The layer has 6 heads of 64 dimensions, as in ViT-small.
"""

import argparse
import importlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import ahop_layers as ah
from benchmarks.harness.memory import clock, in_own_process, peak, reset_peak

ATTENTIONS: dict[str, dict[str, Any] | None] = {
    "dot": None,
    "4 blocks": {"blocks": 4},
    "8 blocks": {"blocks": 8},
    "full": {"blocks": None},
    "last 4": {"blocks": 4, "last": 4},
}
"""The keywords of ``adapt_``, by attention; None for the baseline."""
TIMED: dict[str, dict[str, Any] | None] = {
    "dot": None,
    "4 blocks, one base": {"blocks": 4, "bases": ("dot",)},
    "4 blocks": {"blocks": 4},
    "8 blocks, one base": {"blocks": 8, "bases": ("dot",)},
    "8 blocks": {"blocks": 8},
    "16 blocks": {"blocks": 16},
    "full": {"blocks": None},
}
"""The same for the part ``attention``."""
LAYERS = ("dot", "4 blocks", "8 blocks", "full")
KEY = ("part", "model", "settings", "attention", "pass")
FIGURES = ("images/s", "sdpa images/s", "MB", "sdpa MB", "seconds", "sdpa seconds", "kernels")
WIDTH, HEADS = 384, 6
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
"""Sequence lengths of the part ``memory``."""
CALLS = {"first call": 197, "another length": 577}
"""Sequence lengths of the part ``compile-time``."""


def make_row(*key: str, **figures: float | None) -> dict[str, str]:
    """Returns a row: the values of the columns KEY, and the figures, empty where there is none."""
    shown = {name: "" if figures.get(name) is None else f"{figures[name]:.6g}" for name in FIGURES}
    return {**dict(zip(KEY, key, strict=True)), **shown}


def import_timm() -> ModuleType:
    """Imports timm, or exits with the name of the missing package."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise SystemExit(f"benchmarks.vit: expected the package timm (pip install timm), got: {error}") from None


def autocast(device: str) -> torch.autocast:
    """Returns bfloat16 autocast on a GPU, and no autocast on a CPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def perturb_(module: nn.Module) -> None:
    """Adds seeded noise to all similarity parameters, so that the sort is not skipped."""
    generator = torch.Generator().manual_seed(0)
    for parameter in ah.similarity_parameters(module):
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


def seconds_per_step(steps: dict[str, Callable[[], None]], device: str, turns: int, least: float) -> dict[str, float]:
    """Returns the median seconds of each step over several turns, each of at least two steps and ``least`` seconds."""

    def take(step: Callable[[], None], count: int) -> float:
        begin = clock(device)
        for _ in range(count):
            step()
        return (clock(device) - begin) / count

    counts = {}
    for name, step in steps.items():
        take(step, 1)
        counts[name] = max(2, math.ceil(least / take(step, 2)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            times[name].append(take(step, counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def bare_attention(keywords: dict[str, Any] | None, device: str) -> nn.Module:
    """Returns timm's attention without projections, which takes ``(N, L, 3 * WIDTH)``: query, key and value."""
    layer = import_timm().layers.Attention(WIDTH, num_heads=HEADS)
    if keywords is not None:
        ah.adapt_(layer, **keywords)
        perturb_(layer)
    layer.qkv = layer.proj = nn.Identity()
    return layer.to(device)


def measure_attention(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yields the rows of attention without projections: milliseconds of forward, and of forward and backward."""
    torch.manual_seed(0)
    shape = (options.batch or 1024, 197, 3 * WIDTH)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    x = torch.randn(shape, device=options.device, dtype=dtype, requires_grad=True)
    names = [name for name in TIMED if not options.attentions or name in ("dot", *options.attentions)]
    found = {name: bare_attention(TIMED[name], options.device) for name in names}

    def step(layer: nn.Module, backward: bool) -> None:
        with torch.set_grad_enabled(backward), autocast(options.device):
            output = layer(x)
        if backward:
            output.backward(output.detach())
            layer.zero_grad()
            x.grad = None

    for label, backward in (("forward", False), ("forward + backward", True)):
        steps = {name: partial(step, layer, backward) for name, layer in found.items()}
        times = seconds_per_step(steps, options.device, options.turns, options.seconds)
        for name, seconds in times.items():
            key = ("attention", "layer", f"{shape[0]} x {HEADS} x {shape[1]} x {WIDTH // HEADS}", name, label)
            yield make_row(*key, **{"seconds": seconds, "sdpa seconds": times["dot"]})
            relative = seconds / times["dot"]
            print(f"{'attention':9} {name:19} {label:19} {1e3 * seconds:9.3f} ms ({relative:.2f})", flush=True)


def make_layer(attention: str, device: str) -> nn.Module:
    """Returns one attention layer."""
    torch.manual_seed(0)
    keywords = ATTENTIONS[attention]
    if keywords is None:
        return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    layer = ah.AdaptiveAttention(WIDTH, HEADS, batch_first=True, device=device, **keywords)
    perturb_(layer)
    return layer


def forward_and_backward(layer: nn.Module, x: Tensor) -> None:
    """Computes an output without attention weights, and all gradients."""
    with autocast(x.device.type):
        output, _ = layer(x, x, x, need_weights=False)
    output.float().square().mean().backward()
    layer.zero_grad()
    x.grad = None


def layer_megabytes(attention: str, device: str, tokens: int, length: int) -> float:
    """Returns the peak memory of forward and backward of a layer in addition to the layer and its input."""
    layer = make_layer(attention, device)
    x = torch.randn(tokens // length, length, WIDTH, device=device, requires_grad=True)
    forward_and_backward(layer, torch.randn(1, 8, WIDTH, device=device, requires_grad=True))  # loads the kernels
    before = reset_peak(device)
    forward_and_backward(layer, x)
    return (peak(device) - before) / 1e6


def measure_memory(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yields the rows of one layer at a constant number of tokens, by attention and sequence length."""
    for attention in options.attentions or LAYERS:
        for length in options.lengths:
            arguments = (attention, options.device, options.tokens, length)
            on_gpu = options.device == "cuda"
            used = layer_megabytes(*arguments) if on_gpu else in_own_process(layer_megabytes, *arguments)
            settings = f"{options.tokens} tokens, length {length}"
            yield make_row("memory", "layer", settings, attention, "training", MB=used)
            print(f"{'memory':9} {attention:9} {settings:28} {used:10,.1f} MB", flush=True)


def compile_seconds(attention: str, device: str, lengths: Sequence[int]) -> list[tuple[float, int]]:
    """Returns the seconds of the first forward and backward with each length, and the kernels that it compiles.

    To be called in a new process. The kernels are the files that a call adds to the empty cache of this package; what
    CUDA compiled before is not used.
    """
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(AHOP_CACHE_DIR=cache, CUDA_CACHE_DISABLE="1")
        found = []
        inputs = [torch.randn(8, length, WIDTH, device=device, requires_grad=True) for length in lengths]
        for x in inputs:
            forward_and_backward(make_layer("dot", device), x)  # initializes the device and its libraries
        layer = make_layer(attention, device)
        for x in inputs:
            before, begin = len(list(Path(cache).iterdir())), clock(device)
            forward_and_backward(layer, x)
            found.append((clock(device) - begin, len(list(Path(cache).iterdir())) - before))
        return found


def measure_compile_time(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yields the rows of the first call of a layer, and of the first call with another length."""
    for attention in options.attentions or LAYERS:
        found = in_own_process(compile_seconds, attention, options.device, list(CALLS.values()))
        for (label, length), (seconds, kernels) in zip(CALLS.items(), found, strict=True):
            key = ("compile-time", "layer", f"length {length}", attention, label)
            yield make_row(*key, seconds=seconds, kernels=kernels)
            print(f"{'compile':9} {attention:9} {label:14} {seconds:7.2f} s, {kernels} kernels compiled", flush=True)
