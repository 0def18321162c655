"""Checkpoints of the examples on Lightning."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ahop_layers import AHopError


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        """Write beside, then move into place."""
        super().save_checkpoint(checkpoint, f"{path}.part", storage_options)
        os.replace(f"{path}.part", path)


def check_checkpoint(path: Path) -> None:
    """Raise unless a checkpoint of these examples can be read from the file; its tensors are only mapped."""
    if not path.exists():
        raise AHopError(f"expected a checkpoint, got {path} that does not exist")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # each kind of damage has its own
        raise AHopError(
            f"expected a whole checkpoint, got {path} that cannot be read ({type(error).__name__})"
        ) from None
    if not isinstance(found, dict) or not {"state_dict", "hyper_parameters"} <= set(found):
        raise AHopError(f"expected a whole checkpoint, got {path} without state_dict and hyper_parameters")
