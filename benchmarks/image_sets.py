"""Image data sets as tensors in memory: the digits of scikit-learn, or a folder of your own images.

Each reader takes the folder of ``--data-dir``. ``benchmarks/images.py`` has readers of published data sets.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

DIGITS = [str(digit) for digit in range(10)]


class Images(NamedTuple):
    """``images (n, channels, height, width)`` as bytes and ``labels (n,)``."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Images":
        """Returns a copy on a device."""
        return Images(self.images.to(device), self.labels.to(device))

    def cut(self, count: int) -> tuple["Images", "Images"]:
        """Returns the first ``count`` images, and the others."""
        return Images(self.images[:count], self.labels[:count]), Images(self.images[count:], self.labels[count:])


class ImageSet(NamedTuple):
    """A data set, the default side of its patches, and whether a flipped image keeps its class."""

    train: Images
    test: Images
    classes: list[str]
    patch: int = 4
    mirror: bool = True


def digits(_: Path) -> ImageSet:
    """Reads the 8 x 8 digits of scikit-learn; the test set is the last fifth, by other writers."""
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8))[:, None]
    parts = Images(images, torch.from_numpy(bunch.target).long()).cut(len(images) * 4 // 5)
    return ImageSet(*parts, DIGITS, patch=2, mirror=False)


def folder(where: Path) -> ImageSet:
    """Reads images in ``train/<class>/`` and ``test/<class>/``, resized to 32 x 32."""
    names = sorted(path.name for path in (where / "train").glob("*") if path.is_dir())
    return ImageSet(*(read_images(by_class(where / part, names), 32) for part in ("train", "test")), names)


def by_class(home: Path, names: list[str]) -> list[tuple[Path, int]]:
    """Returns the image files in ``home/<class>/`` and their labels."""
    kinds = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
    found = [(path, label) for label, name in enumerate(names) for path in sorted((home / name).rglob("*"))]
    files = [(path, label) for path, label in found if path.suffix.lower() in kinds]
    if not files:
        raise FileNotFoundError(f"expected images ({' '.join(kinds)}) in {home}/<class>, got none")
    return files


def read_images(files: list[tuple[Path, int]], side: int) -> Images:
    """Reads labeled image files, resized to ``side`` x ``side``."""
    pixels = np.stack(read_pixels([path for path, _ in files], side))
    return Images(
        torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in files])
    )


def read_pixels(paths: list[Path], side: int | None = None) -> list[np.ndarray]:
    """Reads image files as RGB bytes, resized to ``side`` x ``side`` unless that is None."""

    def read(path: Path) -> np.ndarray:
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        return np.asarray(pixels if side is None else pixels.resize((side, side)))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(read, paths))
