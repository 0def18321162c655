"""Published image data sets as tensors in memory, for the image benchmark and examples/vit.py.

Each reader takes the folder of ``--data-dir`` and returns the images as bytes. docs/data.md lists the files.
"""

import gzip
import pickle
import re
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ahop_layers import AHopError
from benchmarks.image_sets import (
    DIGITS,
    Images,
    ImageSet,
    by_class,
    digits,
    folder,
    read_images,
    read_pixels,
)  # fmt: skip

MNIST_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
SOURCES = {
    "mnist": [f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}" for name in MNIST_FILES],
    "cifar10": ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"],
    "cifar100": ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"],
    "tiny-imagenet": ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"],
}


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


READERS = {read.__name__.replace("_", "-"): read for read in (digits, mnist, cifar10, cifar100, tiny_imagenet, folder)}


def load(name: str, where: Path, download: bool = False) -> ImageSet:
    """Reads a data set.

    Args:
        name: a key of ``READERS``.
        where: the folder of ``--data-dir``.
        download: download the data set first if it is missing.

    Raises:
        FileNotFoundError: the data set is missing.
        AHopError: a file is damaged, or the download failed.
    """
    try:
        try:
            return READERS[name](where)
        except FileNotFoundError:
            if not download or name not in SOURCES:
                raise
        fetch(SOURCES[name], where / "mnist" if name == "mnist" else where)
        return READERS[name](where)
    except (AHopError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged file raises the error of its format
        reason = f"{type(error).__name__}: {error}"
        raise AHopError(f"{name}: expected files as published in {where}, got damaged ones ({reason})") from None


def fetch(addresses: list[str], target: Path) -> None:
    """Downloads files into ``target`` and unpacks archives, atomically per file or folder."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        done = Path(scratch) / "done"
        done.mkdir()
        for address in addresses:
            path = Path(scratch) / address.rsplit("/", 1)[1]
            try:
                torch.hub.download_url_to_file(address, str(path))
            except Exception as error:  # of the network, the server or the disk
                raise AHopError(f"{address}: expected a file to download, got {error}") from None
            if path.name.endswith((".tar.gz", ".zip")):
                # From Python 3.11.4 on, nothing outside the folder is written, whatever the archive contains.
                safely = path.suffix != ".zip" and hasattr(tarfile, "data_filter")
                shutil.unpack_archive(path, done, **({"filter": "data"} if safely else {}))
            else:
                path.rename(done / path.name)
        for path in done.iterdir():
            path.rename(target / path.name)
