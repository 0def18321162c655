"""Memories on disk: state dicts as torch.save and safetensors write them, and memory-mapped patterns."""

from pathlib import Path

import numpy as np
import pytest
import torch
from new_tensors import LargestNewTensor

import ahop_layers as ah

BLOCKS = [ah.Blocks(torch.tensor([0, 1, 2, 3] * 4), normalize=True), None]


def make(count: int) -> ah.AssociativeMemory:
    patterns = torch.rand(count, 16) * 2 - 1
    return ah.AssociativeMemory.preset(
        "A-Hop", patterns, labels=torch.arange(count) % 5, prior=True, debias=True, blocks=BLOCKS, bases=("l1", "dot")
    )


@pytest.fixture(scope="module")
def fitted() -> ah.AssociativeMemory:
    memory = make(61)
    memory.fit(ah.variants.Mixed(0.3), epochs=3, batch=256, progress=False, by="pattern")
    return memory


@pytest.mark.parametrize("kind", ["torch", "torch, mapped", "safetensors", "safetensors, model"])
def test_a_fitted_memory_is_saved_and_loaded(kind, fitted, tmp_path):
    memory, other, path = fitted, make(3), tmp_path / "memory"
    if kind.startswith("torch"):
        torch.save(memory.state_dict(), path)
        mapped = kind.endswith("mapped")
        other.load_state_dict(torch.load(path, weights_only=True, mmap=mapped), assign=mapped)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        if kind.endswith("model"):
            safetensors.save_model(memory, str(path))
            safetensors.load_model(other, str(path))
        else:
            safetensors.save_file(memory.state_dict(), path)
            other.load_state_dict(safetensors.load_file(path))
    x = torch.randn(7, 16)
    assert other.beta == memory.beta != 1
    for method in ("scores", "recall", "retrieve", "class_scores", "classify", "energy"):
        assert torch.equal(getattr(other, method)(x), getattr(memory, method)(x)), method
    for shortlist in (None, 20):
        assert all(map(torch.equal, other.search(x, 5, shortlist), memory.search(x, 5, shortlist)))


def test_loading_with_assign_allocates_no_second_copy(tmp_path, monkeypatch):
    """Patterns that are larger than memory can be mapped, but not allocated."""
    torch.save(make(61).state_dict(), tmp_path / "memory.pt")
    state, other = torch.load(tmp_path / "memory.pt", weights_only=True, mmap=True), make(3)
    allocated = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **kw: allocated.append(args[1]) or new_empty(*args, **kw)
    )
    other.load_state_dict(state, assign=True)
    assert (torch.Size([61, 16]),) not in allocated
    assert other.patterns.data_ptr() == state["patterns"].data_ptr()


def mapped(kind: str, path: Path, patterns: torch.Tensor) -> torch.Tensor:
    if kind == "torch":
        patterns.numpy().tofile(path)
        return torch.from_file(str(path), size=patterns.numel()).view(patterns.shape)
    np.save(path, patterns.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_mapped_patterns_are_read_block_by_block(kind, tmp_path):
    """No tensor is nearly as large as the patterns: they need not fit into memory."""
    patterns = torch.rand(100_000, 64) * 2 - 1
    stored = mapped(kind, tmp_path / "patterns.npy", patterns)
    with LargestNewTensor() as largest:
        memory = ah.AssociativeMemory.preset("A-Hop", stored, init="uniform", labels=torch.arange(100_000) % 3)
        for shortlist in (None, 100):
            assert memory.search(patterns[[5, 99_990]] + 0.01, 2, shortlist)[1][:, 0].tolist() == [5, 99_990]
        memory.class_scores(patterns[:2])
    assert largest.elements < patterns.numel() / 2
    assert memory.patterns.data_ptr() == stored.data_ptr()
