"""Checkpoints of the examples that train with Lightning."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ahop_layers import AHopError
from examples.common.outputs import write_atomic


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes checkpoints atomically."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Serializes in memory first: torch.save itself does not report a full disk as an OSError."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomic(Path(path), buffer.getbuffer())


def check_checkpoint(path: Path, resume: bool = False) -> None:
    """Raises unless a file holds a checkpoint of Lightning. Tensors are only mapped into memory.

    Args:
        path: the file.
        resume: whether the checkpoint must also hold the state of the training. Without that, Lightning would start
            at the first epoch.

    Raises:
        AHopError: the file is missing, damaged or incomplete.
    """
    if not path.exists():
        raise AHopError(f"expected a checkpoint, got {path}, which does not exist")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # each kind of damage raises its own type
        raise AHopError(f"expected a checkpoint, got {path}, which cannot be read ({type(error).__name__})") from None
    held = found if isinstance(found, dict) else {}
    missing = [name for name in ("state_dict", "hyper_parameters") if name not in held]
    missing += [name for name in ("loops", "optimizer_states", "lr_schedulers") if resume and not held.get(name)]
    if missing:
        raise AHopError(f"expected a checkpoint, got {path} without {', '.join(missing)}")


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turns any error of restoring a checkpoint, such as other shapes or missing keys, into an ``AHopError``."""
    try:
        yield
    except (AHopError, OSError):
        raise
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()[:2]  # torch lists every tensor that does not fit
        reason = " ".join(line.strip() for line in lines)
        raise AHopError(f"expected a checkpoint of this model, got {path}, which does not fit: {reason}") from None
