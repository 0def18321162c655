"""HubMemory: a memory with ``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` of the Hugging Face hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download

from ahop_layers.memory.memory import AssociativeMemory

FILE = "memory.safetensors"


class HubMemory(AssociativeMemory, PyTorchModelHubMixin, library_name="ahop-layers", tags=["associative-memory"]):
    """An :class:`~ahop_layers.AssociativeMemory` for the hub, in the file that its ``save`` writes.

    ``HubMemory.load`` reads any saved memory. Needs ``pip install ahop-layers[hub]``.

    >>> import tempfile, torch
    >>> memory = HubMemory(torch.eye(3), labels=["a", "b", "b"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memory.save_pretrained(folder)  # or memory.push_to_hub("name/of-the-repository")
    ...     HubMemory.from_pretrained(folder).classify(torch.eye(3))
    ['a', 'b', 'b']
    """

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(Path(save_directory) / FILE)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, **keywords: Any,
    ) -> "HubMemory":  # fmt: skip
        path: Any = Path(model_id) / FILE
        if not Path(model_id).is_dir():
            path = hf_hub_download(
                model_id, FILE, revision=revision, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only, token=token,
            )  # fmt: skip
        memory: HubMemory = cls.load(path).eval()  # type: ignore[assignment]
        return memory
