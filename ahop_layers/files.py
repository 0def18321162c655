"""Files in the safetensors format: tensors and a header of JSON, written in one step."""

import contextlib
import importlib
import json
import os
import uuid
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, and moves it to ``path`` at the end: whoever reads sees the old file or the new one."""
    library = _safetensors()
    if path.is_dir() or not path.parent.is_dir():
        raise AHopError(f"path must be a file in a folder that exists, got {str(path)!r}")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (NotImplementedError, OSError, RuntimeError, library.SafetensorError) as error:
        raise AHopError(f"path must be a file that can be written, got {str(path)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write(path: Path, key: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Writes tensors and the header ``key`` in one step."""
    with replacing(path) as part:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        _safetensors().torch.save_file(contiguous, part, metadata={key: json.dumps(header)})


def read(path: Path, key: str, writer: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors, mapped into memory, and the header ``key`` of a file that ``writer`` wrote."""
    library, rule = _safetensors(), f"path must be a file that {writer} wrote, got {str(path)!r}"
    if not path.is_file():
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
