"""The adaptive memory of the search benchmark: footprints of pixels, contrasts, and patches of several sizes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.variants import Variant
from benchmarks.search.data import OFFSETS, Images, ReplacedPixels, contrasts
from benchmarks.search.rivals import Answer

OURS = "adaptive memory"
VIEWS = ("pixels", "near", *OFFSETS, "patches")
WIDTHS = {"near_005": 0.005, "near_02": 0.02, "near_08": 0.08}
"""Base similarity -> difference of two pixels at which it falls to 1 / e."""
SIZES = (2, 4, 8)
"""Sides of the patches."""
LEVEL = 20.0
"""Sum of the initial weights of a footprint. A similarity of the view is then 20 times its mean over the blocks."""
SCORED = 256
"""Number of queries that are scored at once."""


def near(width: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a base similarity that is 1 for equal values and 0 for all that differ by much more than ``width``.

    A wrong pixel costs the same however wrong it is, so that a tenth of the pixels is enough to tell images apart.
    """
    return lambda query, key: (query - key).abs().div(-width).exp()


for name, width in WIDTHS.items():
    ah.register_base(name, near(width))


class Settings(NamedTuple):
    """Views and training of an adaptive memory.

    Attributes:
        views: some of ``VIEWS``.
        steps, batch, lr: number of training steps, queries of a step, and largest learning rate of ``fit``.
    """

    views: tuple[str, ...]
    steps: int = 300
    batch: int = 128
    lr: float = 0.1


SETTINGS = {
    "pixels": Settings(VIEWS, steps=600),
    "occlusion": Settings((*OFFSETS, "patches")),
}
"""Kind of corruption -> settings. ``python -m benchmarks.search.tune`` compares others on held-out stored images."""


class View(nn.Module):
    """An adaptive similarity of what a function of the images returns.

    Args:
        side: height and width of an image.
        offset: compares the :func:`contrasts` of this offset, or pixels if it is None.
        bases: base similarities.
        blocks: blocks of the similarity.
    """

    def __init__(
        self,
        side: int,
        offset: tuple[int, int] | None = None,
        bases: Sequence[str] = ("l1",),
        blocks: Sequence[ah.Blocks] = (ah.Blocks(None),),
    ) -> None:
        super().__init__()
        self.side, self.offset = side, offset
        dim = self.seen(torch.zeros(1, side * side)).shape[-1]
        init = []
        for entry in blocks:
            # The last entry of a footprint is the sum over all blocks.
            init.append(torch.zeros(len(bases), entry.count(dim)))
            init[-1][:, -1] = LEVEL / entry.count(dim)
        self.score = ah.AdaptiveSimilarity(dim, bases=bases, init=init, blocks=list(blocks))

    def seen(self, rows: Tensor) -> Tensor:
        """Returns what is compared of images ``(n, side * side)``."""
        return rows if self.offset is None else contrasts(rows, self.side, self.offset)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores queries ``(L, d)`` against keys ``(S, d)``: ``(L, S)``."""
        scores: Tensor = self.score(self.seen(query), self.seen(key))
        return scores


class ImageSimilarity(nn.Module):
    """The sum of the similarities of several views of an image.

    All scores are sums of sorted similarities with learned weights, so that a learned number of the worst pixels,
    contrasts and patches has no weight.

    Args:
        stored: the stored images.
        views: ``"pixels"`` by their differences, ``"near"`` pixels, contrasts of two pixels (the keys of OFFSETS), and
            normalized ``"patches"`` of several sizes.
    """

    def __init__(self, stored: Images, views: Sequence[str]) -> None:
        super().__init__()
        side = stored.shape[0]
        self.patches = View(
            side,
            bases=("dot", "l1"),
            blocks=[ah.Blocks(ah.patches(side, side, size), normalize=True) for size in SIZES if size < side],
        )
        self.parts = nn.ModuleList([self.patches] if "patches" in views else [])
        if "pixels" in views:
            self.parts.append(View(side))
        if "near" in views:
            self.parts.append(View(side, bases=tuple(WIDTHS)))
        self.parts.extend(View(side, offset) for view in views for offset in OFFSETS.get(view, ()))
        self.to(stored.rows.device)
        self.patches.score.fix_norms_(stored.rows)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores queries ``(L, d)`` against keys ``(S, d)``: ``(L, S)``."""
        return torch.stack([part(query, key) for part in self.parts]).sum(0)


class AdaptiveClassifier:
    """Answers queries by a memory with labels.

    Args:
        stored: the stored images.
        views: the views of :class:`ImageSimilarity`.
    """

    def __init__(self, stored: Images, views: Sequence[str]) -> None:
        self.score, self.labels = ImageSimilarity(stored, views), stored.labels
        self.memory = ah.AssociativeMemory(stored.rows, self.score, labels=stored.labels)

    @torch.no_grad()
    def __call__(self, query: Tensor) -> Answer:
        """Answers queries ``(n, d)`` with the best class and its best stored image."""
        answers = [self._classify(part) for part in torch.split(query, SCORED)]
        return Answer(*(torch.cat(parts) for parts in zip(*answers, strict=True)))

    def _classify(self, query: Tensor) -> Answer:
        # The label that memory.classify returns, from scores that are computed once for label and image.
        logits = self.memory.beta * self.memory.scores(query)
        classes, of_pattern = self.labels.unique(return_inverse=True)
        members = [(of_pattern == index).nonzero()[:, 0] for index in range(len(classes))]
        best = torch.stack([logits[:, own].logsumexp(-1) for own in members], -1).argmax(-1)
        return Answer(classes[best], logits.masked_fill(of_pattern != best[:, None], -torch.inf).argmax(-1))

    @torch.no_grad()
    def agreement(self, query: Tensor, index: Tensor, size: int = 4) -> Tensor:
        """Returns the correlation of each patch of a query with that of its stored image, for each pixel: ``(n, d)``.

        Args:
            query: ``(n, d)``.
            index: ``(n,)``, a stored image for each query.
            size: side of the patches, one of SIZES.
        """
        score, dim = self.score.patches.score, query.shape[-1]
        patches = ah.patches(*[round(dim**0.5)] * 2, size)
        resolution = [entry.count(dim) for entry in score.blocks].index(int(patches.max()) + 1)
        pairs = query[:, None], self.memory.patterns[index][:, None]
        correlation = score.block_similarities(*pairs, "dot", resolution)[:, 0, 0]
        return correlation[:, patches.to(query.device)]


def adaptive(stored: Images, variant: Variant, seed: int, settings: Settings | None = None) -> AdaptiveClassifier:
    """A memory of the stored images, trained to give the class of a corrupted one from the others."""
    views, steps, batch, lr = settings or SETTINGS["pixels" if isinstance(variant, ReplacedPixels) else "occlusion"]
    classifier = AdaptiveClassifier(stored, views)
    classifier.memory.fit(variant, epochs=steps, lr=lr, batch=batch, by="label", seed=seed, progress=False)
    return classifier
