"""Downloads public data sets for examples/vit.py."""

import http.client
import shutil
import tempfile
import urllib.request
from pathlib import Path

from ahop_layers import AHopError

MNIST_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
SOURCES = {
    "mnist": [f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}" for name in MNIST_FILES],
    "cifar10": ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"],
    "cifar100": ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"],
    "tiny-imagenet": ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"],
}


def fetch(addresses: list[str], target: Path) -> None:
    """Downloads files into ``target`` and unpacks archives, atomically per file or folder."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        done = Path(scratch) / "done"
        done.mkdir()
        for address in addresses:
            loaded = Path(scratch) / address.rsplit("/", 1)[1]
            print(f"downloading {address}", flush=True)
            try:
                with urllib.request.urlopen(address) as source, loaded.open("wb") as file:
                    shutil.copyfileobj(source, file)
            except (OSError, http.client.HTTPException) as error:
                raise AHopError(f"{address}: expected a file to download, got {error}") from None
            if loaded.name.endswith((".tar.gz", ".zip")):
                shutil.unpack_archive(loaded, done, filter=None if loaded.suffix == ".zip" else "data")
            else:
                loaded.rename(done / loaded.name)
        for path in done.iterdir():
            path.rename(target / path.name)
