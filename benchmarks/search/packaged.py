"""A memory of images as it comes from the package, and the same without learning and without sorting."""

import torch
from torch import Tensor

import ahop_layers as ah
from ahop_layers.memory.variants import Variant
from benchmarks.search.data import Images
from benchmarks.search.rivals import Answer, Training

OURS = "adaptive memory"


class MemoryClassifier:
    """Answers queries by a memory of images with labels, as it comes from the package.

    Args:
        stored: the stored images.
        shifts: see :class:`~ahop_layers.ImageSimilarity`.
    """

    def __init__(self, stored: Images, shifts: int = 0) -> None:
        height, width = stored.shape
        images = stored.rows.unflatten(-1, stored.shape)
        similarity = ah.ImageSimilarity(height, width, shifts=shifts).to(images.device) if shifts else "auto"
        self.memory = ah.AssociativeMemory(images, similarity, labels=stored.labels)
        self.classes, self.of_pattern = stored.labels.unique(return_inverse=True)

    @torch.no_grad()
    def __call__(self, query: Tensor) -> Answer:
        """Answers queries ``(n, d)`` with the class that ``memory.classify`` returns, and its best stored image."""
        logits = self.memory.beta * self.memory.scores(query)  # once, for the class and the image
        members = [logits[:, self.of_pattern == index] for index in range(len(self.classes))]
        best = torch.stack([each.logsumexp(-1) for each in members], -1).argmax(-1)
        own = logits.masked_fill(self.of_pattern != best[:, None], -torch.inf)
        return Answer(self.classes[best], own.argmax(-1))


def learned(stored: Images, variant: Variant, seed: int) -> MemoryClassifier:
    """A memory that is fitted to the damage."""
    classifier = MemoryClassifier(stored)
    classifier.memory.fit(variant, seed=seed)
    return classifier


def untrained(stored: Images, variant: Variant, seed: int) -> MemoryClassifier:
    """A memory without a fit: a fixed share of the patches counts."""
    return MemoryClassifier(stored)


def untrained_shifted(stored: Images, variant: Variant, seed: int) -> MemoryClassifier:
    """A memory without a fit that takes the best of nine shifts by one pixel."""
    return MemoryClassifier(stored, shifts=1)


def unsorted(stored: Images, variant: Variant, seed: int) -> MemoryClassifier:
    """A memory without a fit in which all patches count."""
    classifier = MemoryClassifier(stored)
    similarity = classifier.memory.similarity
    with torch.no_grad():
        for part in similarity.patches:
            part.w.zero_()[:, -1] = 1 / (part.w.shape[-1] * len(similarity.patches))
    return classifier


OWN: dict[str, Training] = {"not sorted": unsorted, "fixed trimming": untrained, OURS: learned}
"""What sorting and learning bring: all patches, the best 30 % of them, and learned weights."""
