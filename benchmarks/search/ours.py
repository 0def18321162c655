"""The adaptive memory of the search benchmark: footprints of pixels and of patches of several sizes."""

import torch
from torch import Tensor

import ahop_layers as ah
from ahop_layers.variants import Variant
from benchmarks.search.data import Images, ReplacedPixels
from benchmarks.search.rivals import Answer, Classifier

OURS = "adaptive memory"
SIZES = (2, 4, 8)
"""Sides of the patches."""
STEPS, BATCH = 300, 128


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


def adaptive(stored: Images, variant: Variant, seed: int, steps: int = STEPS, batch: int = BATCH) -> Classifier:
    """A memory of the stored images, trained to give the class of a corrupted one from the others.

    Single pixels are compared only if the variant corrupts single pixels.
    """
    pixels = isinstance(variant, ReplacedPixels)
    score = similarity(stored.side, pixels).to(stored.rows.device)
    memory = ah.AssociativeMemory(stored.rows, score, labels=stored.labels)
    rate = 0.3 if pixels else 0.1
    memory.fit(variant, epochs=steps, lr=rate, batch=batch, by="label", seed=seed, progress=False)

    @torch.no_grad()
    def classify(query: Tensor) -> Answer:
        labels, indices = [], []
        for part in torch.split(query, batch):
            label = memory.classify(part)
            other = stored.labels != label[:, None]
            labels.append(label)
            indices.append(memory.scores(part).masked_fill(other, -torch.inf).argmax(-1))
        return Answer(torch.cat(labels), torch.cat(indices))

    return classify
