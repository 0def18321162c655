"""Files in the safetensors format: tensors and a header of JSON, written in one step."""

import contextlib
import importlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ahop_layers.errors import AHopError


def as_path(path: Any) -> Path:
    """Returns ``path`` as a path; raises unless it is a string or a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise AHopError(f"path must be a string or a path, got {type(path).__name__}")
    return Path(path)


def write(path: Path, key: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Writes tensors and the header ``key`` in one step: whoever reads sees the old file or the new one.

    A link stays, and its target is replaced. A file keeps its mode, and the mode of a new one follows the umask.
    """
    library = _safetensors()
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise AHopError(f"path must be a file in a folder that exists, got {str(path)!r}")
    try:
        target = Path(os.path.realpath(path))
        with _hidden_folder(target) as folder:
            part, empty = folder / "part", folder / "empty"
            empty.touch()
            like = target if target.exists() else empty
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            library.torch.save_file(contiguous, part, metadata={key: json.dumps(header)})
            shutil.copymode(like, part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
    except (NotImplementedError, OSError, RuntimeError, ValueError, library.SafetensorError) as error:
        raise AHopError(f"path must be a file that can be written, got {str(path)!r}: {error}") from error


@contextlib.contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """Makes a folder beside ``path`` for the time of a save, and removes the folders of killed saves to ``path``."""
    prefix = f".ahop-{zlib.crc32(os.fsencode(path.name)):08x}-"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows and some network drives have no such locks
            fcntl: Any = importlib.import_module("fcntl")
            lock = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another save uses the folder
                for left in path.parent.glob(f"{prefix}*"):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                fcntl.flock(lock, fcntl.LOCK_SH)
        folder = tempfile.mkdtemp(prefix=prefix, dir=path.parent)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Path(folder)


def read(path: Path, key: str, writer: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors, mapped into memory, and the header ``key`` of a file that ``writer`` wrote."""
    library, rule = _safetensors(), f"path must be a file that {writer} wrote, got {str(path)!r}"
    if not os.path.isfile(path):
        raise AHopError(rule)
    try:
        with library.safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[key])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (library.SafetensorError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise AHopError(f"{rule}: {error}") from error
    if not isinstance(header, dict):
        raise AHopError(f"{rule}: the header must be an object, got {type(header).__name__}")
    return tensors, header


def _safetensors() -> Any:
    try:
        library = importlib.import_module("safetensors")
        importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise AHopError("a file needs safetensors: pip install safetensors, or ahop-layers[save], got none") from error
    return library
