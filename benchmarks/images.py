"""Image data sets as tensors in memory, for the image benchmark.

Each reader takes the folder of ``--data-dir`` and returns the images as bytes. docs/data.md lists the files.
"""

import gzip
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from ahop_layers import AHopError

MNIST_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
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


def mnist(where: Path) -> ImageSet:
    """Reads the four gzipped IDX files of MNIST in ``mnist/`` or ``MNIST/raw/``, the folder of torchvision."""
    home = find([where / "mnist", where / "MNIST" / "raw"], MNIST_FILES)
    images, labels, test_images, test_labels = (_read_idx(home / name) for name in MNIST_FILES)
    train, test = Images(images[:, None], labels.long()), Images(test_images[:, None], test_labels.long())
    return ImageSet(train, test, DIGITS, mirror=False)


def _read_idx(path: Path) -> Tensor:
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)  # byte 3 is the number of dimensions
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


def cifar10(where: Path) -> ImageSet:
    """Reads CIFAR-10: strips of 500 images as lossless WebP in ``cifar10/``, or ``cifar-10-batches-py/``."""
    strips = [f"{part}_{number:03}.webp" for part, count in (("train", 100), ("test", 20)) for number in range(count)]
    batches = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    homes = [where / "cifar10", where / "cifar-10-batches-py"]
    home = find(homes, ["labels.npz", *strips], ["batches.meta", *batches])
    if home == homes[0]:
        pixels = np.concatenate(read_pixels([home / name for name in strips])).reshape(-1, 32, 32, 3)
        known = np.load(home / "labels.npz")
        labels = torch.from_numpy(np.concatenate([known["train"], known["test"]])).long()
        names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
        return ImageSet(*Images(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels).cut(50_000), names)
    parts = [_cifar_batch(home / name, b"labels") for name in batches]
    train = Images(*(torch.cat(rows) for rows in zip(*parts[:5], strict=True)))
    return ImageSet(train, parts[5], [name.decode() for name in load_plain(home / "batches.meta")[b"label_names"]])


def cifar100(where: Path) -> ImageSet:
    """Reads CIFAR-100 in ``cifar-100-python/``."""
    home = find([where / "cifar-100-python"], ["train", "test", "meta"])
    parts = (_cifar_batch(home / part, b"fine_labels") for part in ("train", "test"))
    return ImageSet(*parts, [name.decode() for name in load_plain(home / "meta")[b"fine_label_names"]])


def _cifar_batch(path: Path, key: bytes) -> Images:
    batch = load_plain(path)
    return Images(torch.from_numpy(batch[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(batch[key]))


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays, lists and strings, and refuses everything that could run code."""

    allowed = ("numpy.ndarray", "numpy.dtype", "numpy.multiarray._reconstruct", "_codecs.encode")

    def find_class(self, module: str, name: str) -> Any:
        if re.sub(r"\._?core", "", f"{module}.{name}") not in self.allowed:  # NumPy 2 renamed core to _core
            raise pickle.UnpicklingError(f"expected only arrays, lists and strings, got {module}.{name}")
        return super().find_class(module, name)


def load_plain(path: Path) -> Any:
    """Reads a pickle file that holds only data; raises ``UnpicklingError`` for anything else."""
    with path.open("rb") as file:
        return _PlainUnpickler(file, encoding="bytes").load()


def tiny_imagenet(where: Path) -> ImageSet:
    """Reads Tiny ImageNet in ``tiny-imagenet-200/``; its validation images are the test set."""
    home = find([where / "tiny-imagenet-200"], ["wnids.txt", "train", "val/val_annotations.txt"])
    names = sorted((home / "wnids.txt").read_text(encoding="utf-8").split())
    lines = (home / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    test = [(home / "val" / "images" / row[0], names.index(row[1])) for row in rows]
    return ImageSet(read_images(by_class(home / "train", names), 64), read_images(test, 64), names, patch=8)


def find(homes: list[Path], *layouts: list[str]) -> Path:
    """Returns the first folder that holds all files of its layout; raises ``FileNotFoundError`` if there is none.

    Args:
        homes: folders to look in.
        layouts: file names, one list for all folders or one for each.
    """
    expected = list(zip(homes, layouts if len(layouts) > 1 else layouts * len(homes), strict=True))
    for home, names in expected:
        if all((home / name).exists() for name in names):
            return home
    wanted = " or ".join(f"{home} with {', '.join(names[:4])}{' ...' * (len(names) > 4)}" for home, names in expected)
    raise FileNotFoundError(f"expected the data in {wanted}, got none of them; see --data-dir")


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


READERS = {read.__name__.replace("_", "-"): read for read in (digits, mnist, cifar10, cifar100, tiny_imagenet)}


def load(name: str, where: Path) -> ImageSet:
    """Reads a data set by its name in ``READERS``, from the folder of ``--data-dir``.

    Raises:
        FileNotFoundError: the data set is missing.
        AHopError: a file is damaged.
    """
    try:
        return READERS[name](where)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged file raises the error of its format
        reason = f"{type(error).__name__}: {error}"
        raise AHopError(f"{name}: expected files as published in {where}, got damaged ones ({reason})") from None
