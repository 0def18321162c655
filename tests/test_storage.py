"""Memories on disk: state dicts as torch.save and safetensors write them, and memory-mapped patterns."""

import pytest
import torch
from new_tensors import LargestNewTensor

import ahop_layers as ah

BLOCKS = ah.Blocks(torch.tensor([0, 1, 2, 3] * 4), normalize=True)


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


@pytest.mark.parametrize("kind", ["torch, mapped", "safetensors", "safetensors, model"])
def test_a_fitted_memory_is_saved_and_loaded(kind, fitted, tmp_path):
    memory, other, path = fitted, make(3), str(tmp_path / "memory")
    safetensors = pytest.importorskip("safetensors.torch")
    if kind == "torch, mapped":
        torch.save(memory.state_dict(), path)
        other.load_state_dict(torch.load(path, weights_only=True, mmap=True), assign=True)
    elif kind == "safetensors":
        safetensors.save_file(memory.state_dict(), path)
        other.load_state_dict(safetensors.load_file(path))
    else:
        safetensors.save_model(memory, path)
        safetensors.load_model(other, path)
    x = torch.randn(7, 16)
    assert other.beta == memory.beta != 1
    for method in ("scores", "recall", "retrieve", "class_scores", "classify", "energy"):
        assert torch.equal(getattr(other, method)(x), getattr(memory, method)(x)), method
    for shortlist in (None, 20):
        assert all(map(torch.equal, other.search(x, 5, shortlist), memory.search(x, 5, shortlist)))


def test_loading_with_assign_allocates_no_second_copy(tmp_path):
    """Patterns that are larger than memory can be mapped, but not allocated."""
    torch.save(make(1000).state_dict(), tmp_path / "memory.pt")
    state, other = torch.load(tmp_path / "memory.pt", weights_only=True, mmap=True), make(3)
    with LargestNewTensor() as largest:
        other.load_state_dict(state, assign=True)
    assert largest.elements < state["patterns"].numel() / 2
    assert other.patterns.data_ptr() == state["patterns"].data_ptr()


def test_mapped_patterns_are_read_block_by_block(tmp_path):
    """No tensor is nearly as large as the patterns: they need not fit into memory."""
    patterns = torch.rand(100_000, 64) * 2 - 1
    patterns.numpy().tofile(tmp_path / "patterns")
    stored = torch.from_file(str(tmp_path / "patterns"), size=patterns.numel()).view(patterns.shape)
    with LargestNewTensor() as largest:
        memory = ah.AssociativeMemory.preset("A-Hop", stored, init="uniform", labels=torch.arange(100_000) % 3)
        for shortlist in (None, 100):
            assert memory.search(patterns[[5, 99_990]] + 0.01, 2, shortlist)[1][:, 0].tolist() == [5, 99_990]
        memory.class_scores(patterns[:2])
    assert largest.elements < patterns.numel() / 2
    assert memory.patterns.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [ah.AssociativeMemory, lambda x: ah.AssociativeMemory.preset("A-Hop", x.flatten(1))])
def test_a_file_keeps_the_weights_of_half_precision_memories(make, dtype, tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory = make((255 * torch.rand(20, 6, 6)).to(dtype))
    for parameter in memory.similarity.parameters():
        parameter.data.mul_(1 + 1e-3 * torch.rand_like(parameter))
    memory.save(tmp_path / "memory.safetensors")
    loaded = ah.AssociativeMemory.load(tmp_path / "memory.safetensors")
    assert torch.equal(loaded.scores(memory.patterns), memory.scores(memory.patterns))


def test_a_file_is_loaded_beside_one_with_a_similar_name(tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    for name in ("faces", "faces-out-of-domain"):
        ah.AssociativeMemory(torch.eye(3)).save(tmp_path / f"{name}.safetensors")
    assert len(ah.AssociativeMemory.load(tmp_path / "faces.safetensors")) == 3
