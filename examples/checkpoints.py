"""Checkpoints of the examples on Lightning."""

import os
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        """Write beside, then move into place."""
        super().save_checkpoint(checkpoint, f"{path}.part", storage_options)
        os.replace(f"{path}.part", path)
