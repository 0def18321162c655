"""Images, seeded splits into stored and asked images, and the two kinds of damage."""

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ahop_layers.memory.variants import Level, Missing, Variant
from benchmarks.damages import random_block

FACES = Path("faces") / "yale_b.npz"
IDX = {"digits": Path("mnist"), "fashion": Path("fashion-mnist")}
"""Data set -> its folder, with the training images and labels of MNIST or Fashion-MNIST."""
IDX_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
SETS = ("faces", *IDX)

MAX_IMAGES = 2414
"""Largest number of images of a split, that of the faces. Of larger sets, each split uses a random subset."""

LEVELS = {"pixels": (0.0, 0.3, 0.5, 0.7, 0.8), "occlusion": (0.1, 0.3, 0.5, 0.7)}
"""Kind of damage -> fractions of the image that are damaged in the queries."""

TRAINING_LEVELS = (0.0, 0.9)
"""Range of the levels in the training queries, from which each query draws its own."""


OFFSETS = ((0, 1), (1, 0))
"""Distances in rows and columns of the two pixels of a contrast."""
DARK = 0.02
"""Added to the brightness of two pixels before their difference is divided by it."""


class Images(NamedTuple):
    """Gray images with values from 0 to 1, flattened to rows, and their classes."""

    rows: Tensor
    labels: Tensor
    shape: tuple[int, int]

    def subset(self, index: Tensor) -> "Images":
        """Returns the images with these indices."""
        return self._replace(rows=self.rows[index], labels=self.labels[index])

    def to(self, device: torch.device) -> "Images":
        """Moves images and labels to a device."""
        return self._replace(rows=self.rows.to(device), labels=self.labels.to(device))


class Split(NamedTuple):
    """Stored images, and the images whose damaged copies are the queries."""

    stored: Images
    asked: Images


@dataclass(frozen=True)
class ReplacedPixels(Variant):
    """Replaces a fraction of the pixels by values drawn uniformly from 0 to the largest value of the image.

    Wright et al. (2009) damage faces in this way.

    Args:
        share: fraction of the pixels, a level.
    """

    share: Level

    def __call__(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``: ``(n, d)``."""
        replaced = Missing(self.share)(origin, generator).isnan()
        values = torch.empty_like(origin).uniform_(generator=generator) * origin.amax(-1, keepdim=True)
        return torch.where(replaced, values, origin)


@dataclass(frozen=True, eq=False)
class ForeignBlock(Variant):
    """Covers a square block with the same part of another image, turned upside down.

    Args:
        share: fraction of the area of the image, a level.
        others: the images ``(N, height * width)`` from which the other image is drawn.
        shape: height and width of an image.
    """

    share: Level
    others: Tensor
    shape: tuple[int, int]

    def __call__(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``: ``(n, d)``."""
        inside = random_block(origin, self.share, self.shape, generator)
        place = torch.randint(len(self.others), (len(origin),), generator=generator, device=origin.device)
        turned = self.others[place].unflatten(-1, self.shape).flip(-2).flatten(-2)
        return torch.where(inside, turned, origin)


def damage(kind: str, level: Level, images: Images) -> Variant:
    """Returns a kind of damage. Foreign blocks come from ``images``."""
    if kind == "pixels":
        return ReplacedPixels(level)
    return ForeignBlock(level, images.rows, images.shape)


def queries(split: Split, kind: str, level: float, seed: int) -> Tensor:
    """Returns one damaged copy of each asked image. The random numbers are equal on all devices."""
    asked = split.asked.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(1000 * seed + round(100 * level))
    return damage(kind, level, asked)(asked.rows, generator).to(split.asked.rows.device)


def files(name: str, folder: Path) -> list[Path]:
    """Returns the files of a data set."""
    return [folder / FACES] if name == "faces" else [folder / IDX[name] / file for file in IDX_FILES]


def available(folder: Path) -> list[str]:
    """Returns the names of the data sets whose files are in ``folder``."""
    return [name for name in SETS if all(file.exists() for file in files(name, folder))]


def load(name: str, folder: Path) -> Images:
    """Loads a data set.

    Raises:
        FileNotFoundError: one of its files is missing.
    """
    paths = files(name, folder)
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"expected the data set {name} in {path}, got no such file")
    if name == "faces":
        with np.load(paths[0]) as arrays:
            pixels, labels = arrays["images"], arrays["labels"]
    else:
        content = [gzip.decompress(path.read_bytes()) for path in paths]
        pixels = np.frombuffer(content[0], np.uint8, offset=16).reshape(-1, 28, 28)
        labels = np.frombuffer(content[1], np.uint8, offset=8)
    rows = torch.from_numpy(pixels.astype(np.float32) / np.float32(255)).flatten(1)
    return Images(rows, torch.from_numpy(labels.astype(np.int64)), pixels.shape[1:])


def split_halves(images: Images, seed: int) -> Split:
    """Splits the images of each class at random: the first half is stored, the rest is asked."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images.labels), generator=generator)[:MAX_IMAGES]
    stored, asked = [], []
    for label in images.labels[order].unique():
        own = order[images.labels[order] == label]
        stored.append(own[: len(own) // 2])
        asked.append(own[len(own) // 2 :])
    return Split(images.subset(torch.cat(stored)), images.subset(torch.cat(asked)))


def contrasts(rows: Tensor, side: int, offset: tuple[int, int]) -> Tensor:
    """Returns the contrast of each two pixels at a fixed distance. It does not depend on the brightness of the image.

    Args:
        rows: images ``(n, side * side)``.
        side: height and width of an image.
        offset: distance in rows, at least 0, and in columns.

    Returns:
        ``(n, pairs)``, the difference of two pixels divided by their sum: from -1 to 1.
    """
    down, right = offset
    image = rows.unflatten(-1, (side, side))
    height, width = side - down, side - abs(right)
    first = image[..., :height, max(0, -right) :][..., :width]
    second = image[..., down:, max(0, right) :][..., :width]
    return ((second - first) / (first + second + 2 * DARK)).flatten(-2)
