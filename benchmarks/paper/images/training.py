"""Training, testing and timing of a vision transformer with plain loops."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ahop_layers as ah
from ahop_layers.memory.variants import Level
from benchmarks.images import ImageSet
from benchmarks.paper.images.attentions import Attention
from benchmarks.paper.images.model import MODELS, VisionTransformer, as_floats, augment
from benchmarks.paper.kernel_similarity import KernelSimilarity, separation_loss
from benchmarks.paper.retrieval.systems import ReferenceSimilarity
from benchmarks.paper.similarities import DotProduct

BASELINES: dict[str, dict[str, Any]] = {
    "kernel": {"similarity": KernelSimilarity, "separation": "entmax15"},
    "sparse": {"similarity": DotProduct, "separation": "sparsemax"},
}
"""Arguments of ``adapt_`` for K-Hop as in Table 1 of the paper, and for S-Hop."""


@dataclass(frozen=True)
class Setup:
    """Model and hyperparameters of a training.

    Attributes:
        model: a key of ``MODELS``.
        epochs: number of epochs.
        batch: batch size.
        attentions: attentions to compare, see :class:`Attention`.
        lr: peak learning rate.
        weight_decay: weight decay; 0 for Adam.
        warmup: fraction of the steps with an increasing learning rate.
        augment: whether to augment the training images.
        smoothing: label smoothing.
        patch: side of a patch in pixels; 0 for that of the data set.
        damaged: whether to replace a share of the values of training images, up to the largest of ``SHARES``.
    """

    model: str
    epochs: int
    batch: int
    attentions: tuple[str, ...]
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup: float = 0.0
    augment: bool = False
    smoothing: float = 0.0
    patch: int = 0
    damaged: bool = False


def build(attention: str, setup: Setup, data: ImageSet, scale: dict[str, tuple[float, ...]]) -> tuple[nn.Module, float]:
    """Builds a model with normalization constants ``scale``.

    Returns:
        The model, and the learning-rate multiplier of its similarity parameters.
    """
    chosen = Attention.read(attention)
    keywords: dict[str, Any] = {"init": chosen.init, "debias": chosen.debias, "blocks": chosen.blocks}
    image = tuple(data.train.images.shape[1:])
    model = VisionTransformer(image, len(data.classes), setup.patch or data.patch, **MODELS[setup.model], **scale)
    eager = chosen.name == "eager"

    def similarity(dim: int, num_heads: int | None) -> nn.Module:
        kind = ReferenceSimilarity if eager else ah.AdaptiveSimilarity
        return kind(dim, None if chosen.shared else num_heads, **keywords)

    if chosen.name != "dot":  # all attentions have the same initial weights, because they are converted
        changes = {"similarity": similarity} if eager or chosen.shared else BASELINES.get(chosen.name, keywords)
        ah.adapt_(model, last=chosen.last, **changes)
    return model, chosen.lr


def make_optimizer(
    model: nn.Module, lr: float | Tensor, weight_decay: float, similarity_lr: float = 1.0, **keywords: Any
) -> torch.optim.AdamW:
    """Returns AdamW; the similarities have ``similarity_lr`` times the learning rate, and no weight decay."""
    return torch.optim.AdamW(ah.parameter_groups(model, lr, lr * similarity_lr, weight_decay), **keywords)


def cosine(step: int, total: int, warmup: float) -> float:
    """Returns the learning-rate factor of a step: linear warm-up over a share of all steps, then cosine decay."""
    first = max(1, round(warmup * total))
    if step < first and warmup:
        return (step + 1) / first
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - first * bool(warmup)) / max(1, total - first))))


class Training:
    """The training of a model on images in device memory.

    Args:
        model: the model.
        similarity_lr: learning-rate multiplier of the similarity parameters.
        data: the images.
        setup: the hyperparameters.
        graphs: capture a step in a CUDA graph after three plain steps, and replay it, to remove the launch overhead.
    """

    def __init__(self, model: nn.Module, similarity_lr: float, data: ImageSet, setup: Setup, graphs: bool) -> None:
        self.data, self.setup, self.device = data, setup, data.train.images.device
        self.on_gpu = self.device.type == "cuda"
        self.before = torch.cuda.memory_allocated() if self.on_gpu else 0
        self.model = model.to(self.device).train()
        lr = torch.tensor(setup.lr, device=self.device) if self.on_gpu else setup.lr
        keywords = {"fused": True, "capturable": True} if self.on_gpu else {}
        self.optimizer = make_optimizer(self.model, lr, setup.weight_decay, similarity_lr, **keywords)
        self.peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.index = torch.zeros(setup.batch, dtype=torch.long, device=self.device)
        self.loss, self.steps = torch.zeros((), device=self.device), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if graphs and self.on_gpu else None

    def autocast(self) -> torch.autocast:
        """Returns bfloat16 autocast on a GPU. A CUDA graph must not reuse the cached casts of an earlier step."""
        return torch.autocast(self.device.type, torch.bfloat16, self.on_gpu, cache_enabled=False)

    def _step(self) -> None:
        images, labels = self.data.train.images[self.index], self.data.train.labels[self.index]
        images = augment(images, self.data.mirror) if self.setup.augment else images
        pixels = replaced(as_floats(images), (0.0, SHARES[-1])) if self.setup.damaged else as_floats(images)
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.model(pixels)
        task = cross_entropy(logits.float(), labels, label_smoothing=self.setup.smoothing)
        (task + separation_loss(self.model)).backward()
        self.optimizer.step()
        self.loss.copy_(task.detach())

    def step(self, index: Tensor, factor: float) -> None:
        """Trains on the images ``index`` with ``factor`` times the peak learning rate."""
        self.index.copy_(index)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(factor * peak)
            else:
                group["lr"] = factor * peak
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is not None:
            self._step_or_capture()
        else:
            self._step()
        self.steps += 1

    def _step_or_capture(self) -> None:
        """Runs a plain step on the stream of the capture; after three of them, captures a step and replays it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        if self.steps < 3:
            with torch.cuda.stream(self.stream):
                self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._step()
            self.graph.replay()

    def wait(self) -> None:
        """Synchronizes the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def run(self, seed: int, deadline: float) -> bool:
        """Trains all epochs. Returns False after a few steps if the training would end after ``deadline``."""
        count, batch = len(self.data.train.labels), self.setup.batch
        total, begin = self.setup.epochs * (count // batch), time.perf_counter()
        mark = begin
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(self.setup.epochs):
            order = torch.randperm(count, generator=generator).to(self.device)
            for index in order.split(batch)[: count // batch]:
                self.step(index, cosine(self.steps, total, self.setup.warmup))
                if self.steps in (10, 40):  # the first ten include compilation and capture
                    self.wait()
                    mark, before = time.perf_counter(), mark
                    if self.steps == 40 and mark + (mark - before) / 30 * (total - 40) > deadline:
                        return False
            print(f"  epoch {epoch + 1}: loss {self.loss.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
        return True


def noise(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Adds Gaussian noise with standard deviation ``strength`` to every pixel."""
    return images + strength * torch.randn(images.shape, generator=generator, device=images.device)


def mask(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Replaces a fraction ``strength`` of all 4 x 4 patches by uniform values."""
    n, _, height, width = images.shape
    drawn = torch.rand(n, 1, height // 4, width // 4, generator=generator, device=images.device)
    chosen = (drawn < strength).repeat_interleave(4, -2).repeat_interleave(4, -1)
    return torch.where(chosen, torch.rand(images.shape, generator=generator, device=images.device), images)


def bias(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Adds ``strength`` times a sign per color channel; the signs are the same for all images."""
    signs = torch.tensor([1.0, -1.0, 1.0], device=images.device)[: images.shape[1], None, None]
    return images + strength * signs


def replaced(images: Tensor, strength: Level, generator: torch.Generator | None = None) -> Tensor:
    """Replaces a fraction ``strength`` of the values of each image by uniform values."""
    return ah.variants.Replaced(strength, low=0.0, high=1.0)(images.flatten(1), generator).view_as(images)


def filtered(images: Tensor, strength: float, generator: torch.Generator, side: int = 3) -> Tensor:
    """Replaces values, then applies a median filter of ``side * side`` pixels to each channel."""
    padded = torch.nn.functional.pad(replaced(images, strength, generator), (side // 2,) * 4, "replicate")
    return padded.unfold(2, side, 1).unfold(3, side, 1).flatten(-2).median(-1).values


Damage = Callable[[Tensor, float, torch.Generator], Tensor]
DAMAGES: dict[Damage, tuple[float, ...]] = {
    noise: (0.05, 0.1, 0.2, 0.3),
    mask: (0.1, 0.25, 0.5, 0.75),
    bias: (0.1, 0.2, 0.3, 0.4),
}
SHARES = (0.0, 0.1, 0.3, 0.5, 0.7)
"""Fractions of the values that are replaced where repair is measured."""
STORED, TESTED = 20_000, 2000
"""Number of patches in the memory, and of test images."""


def repaired(images: Tensor, seed: int) -> Damage:
    """Fits a memory of patches of clean images. Returns the damage that replaces values, then repairs each patch."""
    apart, side = "n c (h p) (w q) -> (n h w) (c p q)", {"p": 4, "q": 4}
    patches = rearrange(images, apart, **side)
    some = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[:STORED]
    memory = ah.AssociativeMemory(patches[some.to(patches.device)])
    memory.fit(seed=seed, progress=False)

    def apply(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
        values = memory.repair(rearrange(replaced(images, strength, generator), apart, **side)).values
        together = "(n h w) (c p q) -> n c (h p) (w q)"
        return rearrange(values, together, n=len(images), h=images.shape[2] // 4, **side)

    return apply


@torch.no_grad()
def accuracy(
    training: Training, damage: Damage | None = None, strength: float = 0.0, count: int | None = None
) -> float:
    """Returns the accuracy on ``count`` test images, by default all. Damage is the same for every model."""
    training.model.eval()
    generator, right = torch.Generator(training.device).manual_seed(0), 0
    for images, labels in zip(*(rows[:count].split(1000) for rows in training.data.test), strict=True):
        pixels = as_floats(images)
        if damage is not None:
            pixels = damage(pixels, strength, generator).clamp(0, 1)
        with training.autocast():
            right += (training.model(pixels).argmax(-1) == labels).sum().item()
    return right / len(training.data.test.labels[:count])


def repair_accuracies(training: Training, rival: Training, seed: int) -> dict[str, float]:
    """Returns the test accuracies of a model on damaged images before and after repair, and of a rival before it."""
    medians = {"median, 3 x 3": filtered, "median, 5 x 5": partial(filtered, side=5)}
    damages = {
        "as it is": replaced,
        **medians,
        "repaired": repaired(as_floats(training.data.train.images[:5000]), seed),
    }
    measured = {}
    for share in SHARES:
        measured |= {f"{name} {share}": accuracy(training, damage, share, TESTED) for name, damage in damages.items()}
        measured[f"trained with it {share}"] = accuracy(rival, replaced, share, TESTED)
    return measured


def speeds(training: Training, seconds: float = 2.0) -> dict[str, float]:
    """Measures images per second in training and inference, the best of three rounds, and peak memory in MB."""
    batch, measured = training.setup.batch, {}
    index = torch.arange(batch, device=training.device) % len(training.data.train.labels)
    images = as_floats(training.data.train.images[index])

    @torch.no_grad()
    def infer() -> None:
        with training.autocast():
            training.model(images)

    def train() -> None:
        training.step(index, 1.0)

    for name, call in (("training", train), ("inference", infer)):
        training.model.train(name == "training")
        for _ in range(5):
            call()
        training.wait()
        if training.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        rounds = []
        for _ in range(3):
            begin, calls = time.perf_counter(), 0
            while calls < 3 or time.perf_counter() - begin < seconds / 3:
                call()
                calls += 1
                if calls % 10 == 0:
                    training.wait()  # bounds the queue of launches, so that the round ends
            training.wait()
            rounds.append(calls * batch / (time.perf_counter() - begin))
        measured[f"{name} images/s"] = max(rounds)
        if training.on_gpu and training.stream is None:  # a CUDA graph keeps its memory
            measured[f"{name} MB"] = (torch.cuda.max_memory_allocated() - training.before) / 1e6
    return measured
