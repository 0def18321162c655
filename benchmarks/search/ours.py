"""The adaptive memory of the search benchmark: footprints of pixels and of patches of several sizes."""

import torch
from torch import Tensor

import ahop_layers as ah
from ahop_layers.memory.labels import class_logsumexp, classes_of
from ahop_layers.variants import Variant
from benchmarks.search.data import Images, ReplacedPixels
from benchmarks.search.rivals import Answer

OURS = "adaptive memory"
SIZES = (2, 4, 8)
"""Sides of the patches."""
STEPS, BATCH, LR = 300, 128, 0.1


def similarity(side: int, pixels: bool) -> ah.AdaptiveSimilarity:
    """Returns an adaptive similarity of images with normalized patches of several sizes.

    The initial score is the sum of the negative L1 distances of pixels, if there are any, and of the similarities of
    all patches, with equal weights and without trimming.

    Args:
        side: height and width of an image.
        pixels: whether to add footprints of single pixels.
    """
    patches = [ah.Blocks(ah.patches(side, side, size), normalize=True) for size in SIZES if size < side]
    blocks = [*([ah.Blocks(None)] if pixels else []), *patches]
    init = []
    for entry in blocks:
        n = entry.count(side * side)
        weight = torch.zeros(2, n)
        # The last entry of a footprint is the whole sum. A normalized patch contributes at most 1 to the dot product.
        weight[:, -1] = torch.tensor([20.0 / n, 20.0 / n] if entry.normalize else [0.0, 1.0])
        init.append(weight)
    return ah.AdaptiveSimilarity(side * side, bases=("dot", "l1"), init=init, blocks=blocks)


class AdaptiveClassifier:
    """Answers queries by a memory with labels.

    Args:
        stored: the stored images.
        score: their similarity to queries.
        batch: number of queries that are scored at once.
    """

    def __init__(self, stored: Images, score: ah.AdaptiveSimilarity, batch: int) -> None:
        self.memory = ah.AssociativeMemory(stored.rows, score, labels=stored.labels)
        self.score, self.labels, self.batch = score, stored.labels, batch

    @torch.no_grad()
    def __call__(self, query: Tensor) -> Answer:
        """Answers queries ``(n, d)`` with the best class and its best stored image."""
        answers = [self._classify(part) for part in torch.split(query, self.batch)]
        return Answer(*(torch.cat(parts) for parts in zip(*answers, strict=True)))

    def _classify(self, query: Tensor) -> Answer:
        # The label that memory.classify returns, from scores that are computed once for label and image.
        scores = self.memory.scores(query)
        classes, of_pattern = classes_of(self.labels)
        best = class_logsumexp([scores], of_pattern, len(classes)).argmax(-1)
        index = scores.masked_fill(of_pattern != best[:, None], -torch.inf).argmax(-1)
        return Answer(classes[best], index)

    @torch.no_grad()
    def agreement(self, query: Tensor, index: Tensor, size: int = 4) -> Tensor:
        """Returns the correlation of each patch of a query with that of its stored image, for each pixel: ``(n, d)``.

        Args:
            query: ``(n, d)``.
            index: ``(n,)``, a stored image for each query.
            size: side of the patches, one of SIZES.
        """
        patches = ah.patches(*[round(query.shape[-1] ** 0.5)] * 2, size)
        counts = [entry.count(query.shape[-1]) for entry in self.score.blocks]
        resolution = counts.index(int(patches.max()) + 1)
        pairs = query[:, None], self.memory.patterns[index][:, None]
        correlation = self.score.block_similarities(*pairs, "dot", resolution)[:, 0, 0]
        return correlation[:, patches.to(query.device)]


def adaptive(stored: Images, variant: Variant, seed: int, steps: int = STEPS, batch: int = BATCH) -> AdaptiveClassifier:
    """A memory of the stored images, trained to give the class of a corrupted one from the others.

    Single pixels are compared only if the variant corrupts single pixels.
    """
    pixels = isinstance(variant, ReplacedPixels)
    score = similarity(stored.side, pixels).to(stored.rows.device)
    classifier = AdaptiveClassifier(stored, score, batch)
    classifier.memory.fit(variant, epochs=steps, lr=LR, batch=batch, by="label", seed=seed, progress=False)
    return classifier
