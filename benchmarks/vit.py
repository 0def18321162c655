"""Speed and memory of vision transformers with adaptive attention, compared with PyTorch's fused dot product.

To run: python -m benchmarks.vit [--device cuda] [--parts ...] [--models ...] [--attentions ...] [--output FILE]

Models are those of timm, with random weights and all blocks adapted, except for ``last 4``: 4 blocks of dimensions in
the last four transformer blocks only. The baseline, ``dot``, is the model as timm makes it, which calls
``scaled_dot_product_attention``. Parts:

- ``eager``: training (forward, backward, AdamW step) and inference: images per second, and peak memory of weights,
  gradients, optimizer states, activations and images.
- ``compiled``: the same for ``torch.compile`` of each model, baseline included. Without --attentions, only the pairs of
  model and attention in the documentation, because each takes a while to compile.
- ``attention``: time of one attention (6 heads of 64 dimensions, 197 tokens) without its projections, also with one
  base.
- ``memory``: peak memory of forward and backward of one attention layer (6 heads of 64 dimensions) at a constant number
  of tokens, for several sequence lengths. The memory excludes the layer and its input.
- ``compile-time``: seconds of the first forward and backward of a layer in a new process without cached kernels, of the
  first call with another sequence length, and the number of kernels that each of the two adds to empty caches.

At initialization all weights of a base are equal, and the kernels skip the sort. Seeded noise is therefore added to the
weights ``w`` and ``beta`` of both bases.

A time is measured on the clock of the caller: several steps and one synchronization, after a warm-up. All attentions of
a model take turns, so that a change of the clock rate affects all of them, and the median over the turns counts. Each
row holds the figures of the baseline in the same run. On a GPU everything runs in bfloat16 autocast, on a CPU in
float32. On a CPU only the part ``memory`` measures memory. Rows are stored after each model and replace those of the
same measurement on this device. The first three parts need timm.
"""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ahop_layers as ah
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import peak, reset_peak
from benchmarks.harness.rows import RESULTS, ResultTable
from benchmarks.vit_layers import (
    ATTENTIONS,
    KEY,
    LENGTHS,
    autocast,
    import_timm,
    make_row,
    measure_attention,
    measure_compile_time,
    measure_memory,
    perturb_,
    seconds_per_step,
)


@dataclass(frozen=True)
class Model:
    """A model of timm, the side of its images in pixels, and its batch size."""

    name: str
    image: int
    batch: int

    @property
    def settings(self) -> str:
        """The sizes, as rows show them."""
        return f"{self.image} px, batch {self.batch}"


MODELS = {
    "tiny": Model("vit_tiny_patch16_224", 224, 256),
    "small": Model("vit_small_patch16_224", 224, 256),
    "base": Model("vit_base_patch16_224", 224, 128),
    "small-384": Model("vit_small_patch16_384", 384, 64),
}
COMPILED = {"tiny": ("4 blocks",), "small": ("4 blocks", "8 blocks"), "base": ("4 blocks",), "small-384": ("4 blocks",)}
"""The attentions that the part ``compiled`` measures by default, by model."""
LAYER_PARTS = {"attention": measure_attention, "memory": measure_memory, "compile-time": measure_compile_time}
PARTS = ("eager", "compiled", *LAYER_PARTS)
PASSES = ("training", "inference")


class Candidate:
    """A model with one attention: its steps of training and inference, and their peak memory.

    Args:
        model: which model.
        attention: a key of ATTENTIONS.
        device: cpu or cuda.
        compiled: whether to compile the model.
        batch: images and labels.
        passes: the passes to prepare.
    """

    def __init__(
        self,
        model: Model,
        attention: str,
        device: str,
        compiled: bool,
        batch: tuple[Tensor, Tensor],
        passes: Sequence[str] = PASSES,
    ) -> None:
        self.device, (self.images, self.labels) = device, batch
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        torch.manual_seed(0)
        network = import_timm().create_model(model.name, img_size=model.image)
        keywords = ATTENTIONS[attention]
        if keywords is not None:
            ah.adapt_(network, **keywords)
            perturb_(network)
        self.model = network.to(device)
        self.run = torch.compile(network) if compiled else network
        self.before = before - sum(each.nbytes for each in batch)  # the images count as memory of every candidate
        self.optimizer: torch.optim.Optimizer | None = None
        steps = {"inference": self.infer, "training": self.train}  # inference first, without optimizer states
        self.steps = {name: step for name, step in steps.items() if name in passes}
        self.memory = {name: self._peak(name) for name in self.steps}

    @torch.no_grad()
    def infer(self) -> None:
        """Computes the logits of the images."""
        if self.model.training:
            self.model.eval()
        with autocast(self.device):
            self.run(self.images)

    def train(self) -> None:
        """Takes a step of AdamW."""
        if not self.model.training:
            self.model.train()
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.device == "cuda")
        self.optimizer.zero_grad()
        with autocast(self.device):
            logits = self.run(self.images)
        cross_entropy(logits.float(), self.labels).backward()
        self.optimizer.step()

    def _peak(self, name: str) -> float | None:
        """Returns the megabytes of the third step, or None on a CPU: the first ones compile and add states."""
        for _ in range(2):
            self.steps[name]()
        if self.device != "cuda":
            return None
        reset_peak(self.device)
        self.steps[name]()
        return (peak(self.device) - self.before) / 1e6


def measure_model(options: argparse.Namespace, name: str, attentions: Sequence[str], part: str) -> list[dict[str, str]]:
    """Returns the rows of one model, eager or compiled."""
    size, device, compiled = MODELS[name], options.device, part == "compiled"
    size = replace(size, batch=options.batch or size.batch, image=options.image or size.image)
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = 64  # all candidates run the same code object
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size.batch, 3, size.image, size.image, generator=generator).to(device)
    labels = torch.randint(1000, (size.batch,), generator=generator).to(device)
    names = list(dict.fromkeys(("dot", *attentions)))
    if device == "cuda":
        Candidate(size, "dot", device, False, (images, labels))  # allocates the workspaces of cuBLAS
    found = {}
    for attention in names:
        gc.collect()
        found[attention] = Candidate(size, attention, device, compiled, (images, labels), options.passes)
    rows = []
    for label in options.passes:
        steps = {attention: candidate.steps[label] for attention, candidate in found.items()}
        times = seconds_per_step(steps, device, options.turns, options.seconds)
        for attention, seconds in times.items():
            speed, baseline = size.batch / seconds, size.batch / times["dot"]
            mine, theirs = (found[each].memory[label] for each in (attention, "dot"))
            figures = {"images/s": speed, "sdpa images/s": baseline, "MB": mine, "sdpa MB": theirs}
            rows.append(make_row(part, name, size.settings, attention, label, **figures))
            memory = f"{mine:10,.0f} MB ({mine / theirs:.3f})" if mine and theirs else ""
            shares = f"{speed:10,.1f} images/s ({speed / baseline:.3f}){memory}"
            print(f"{part:9} {name:10} {label:10} {attention:9} {shares}", flush=True)
    return rows


def measure(options: argparse.Namespace) -> Iterator[list[dict[str, str]]]:
    """Yields the rows of each model and part."""
    for part in (part for part in PARTS[:2] if part in options.parts):
        for name in options.models:
            chosen = options.attentions or (tuple(ATTENTIONS) if part == "eager" else COMPILED.get(name, ()))
            if chosen:
                yield measure_model(options, name, chosen, part)
                gc.collect()
    for part, rows in LAYER_PARTS.items():
        if part in options.parts:
            yield from ([row] for row in rows(options))
            gc.collect()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("vit", __doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device to measure (default: %(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all parts)")
    add("--models", nargs="+", choices=MODELS, default=tuple(MODELS), help="models to measure (default: all)")
    names = ", ".join(ATTENTIONS)
    text = f"attentions to compare with dot, of {names} (default: the attentions of the documentation)"
    add("--attentions", nargs="+", choices=ATTENTIONS, metavar="NAME", help=text)
    add("--passes", nargs="+", choices=PASSES, default=PASSES, help="passes to measure (default: both)")
    add("--batch", type=int, help="batch size (default: by model)")
    add("--image", type=int, help="side of an image in pixels, a multiple of 16 (default: by model)")
    add("--turns", type=int, default=5, help="turns of each attention (default: %(default)s)")
    add("--seconds", type=float, default=0.25, help="least time of a turn in seconds (default: %(default)s)")
    add("--tokens", type=int, default=16_384, help="tokens of the part memory (default: %(default)s)")
    add("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths of the part memory")
    add("--output", type=Path, default=RESULTS / "vit.csv", help="CSV file (default: benchmarks/results/vit.csv)")
    options = parser.parse_args(arguments)
    parts = [part for part in LAYER_PARTS if part in options.parts]
    if parts and "last 4" in (options.attentions or ()):
        parser.error(f"--attentions: expected attentions of one layer for the parts {', '.join(parts)}, got last 4")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and stores the rows after each model."""
    options = parse(arguments)
    if {"eager", "compiled", "attention"} & set(options.parts):
        import_timm()
    results = ResultTable(options.output, options.device)
    print(f"{results.origin['device']}, torch {results.origin['torch']}; in brackets: relative to dot in this run")
    begin = time.perf_counter()
    for rows in measure(options):
        results.replace(rows, *KEY)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
