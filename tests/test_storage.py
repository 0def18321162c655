"""Memories on disk: state dicts as torch.save and safetensors write them, and memory-mapped patterns."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from new_tensors import LargestNewTensor

import ahop_layers as ah
from tests.samples import refuses

BLOCKS = ah.Blocks(torch.tensor([0, 1, 2, 3] * 4), normalize=True)


def make(count: int) -> ah.AssociativeMemory:
    patterns = torch.rand(count, 16) * 2 - 1
    similarity = ah.AdaptiveSimilarity(16, debias=True, blocks=BLOCKS, bases=("l1", "dot"))
    return ah.AssociativeMemory(patterns, similarity, labels=torch.arange(count) % 5)


@pytest.fixture(scope="module")
def fitted() -> ah.AssociativeMemory:
    memory = make(61)
    memory.fit(ah.variants.Mixed(0.3), by="pattern")
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
    for method in ("scores", "recall", "retrieve", "class_scores", "classify"):
        assert torch.equal(getattr(other, method)(x), getattr(memory, method)(x)), method
    assert all(map(torch.equal, other.search(x, 5), memory.search(x, 5)))
    assert torch.equal(other.search(x, 5).confidence, memory.search(x, 5).confidence)


def test_loading_with_assign_allocates_no_second_copy(tmp_path):
    """Patterns that are larger than memory can be mapped, but not allocated."""
    torch.save(make(1000).state_dict(), tmp_path / "memory.pt")
    state, other = torch.load(tmp_path / "memory.pt", weights_only=True, mmap=True), make(3)
    with LargestNewTensor() as largest:
        other.load_state_dict(state, assign=True)
    assert largest.elements < state["patterns"].numel() / 2
    assert other.patterns.data_ptr() == state["patterns"].data_ptr()


def test_mapped_patterns_are_read_chunk_by_chunk(tmp_path):
    """No tensor is nearly as large as the patterns: they need not fit into memory."""
    patterns = torch.rand(100_000, 64) * 2 - 1
    patterns.numpy().tofile(tmp_path / "patterns")
    stored = torch.from_file(str(tmp_path / "patterns"), size=patterns.numel()).view(patterns.shape)
    with LargestNewTensor() as largest:
        memory = ah.AssociativeMemory(stored, "adaptive", labels=torch.arange(100_000) % 3)
        assert memory.search(patterns[[5, 99_990]] + 0.01, 2)[1][:, 0].tolist() == [5, 99_990]
        memory.class_scores(patterns[:2])
    assert largest.elements < patterns.numel() / 2
    assert memory.patterns.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [ah.AssociativeMemory, lambda x: ah.AssociativeMemory(x.flatten(1), "adaptive")])
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


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
def test_a_file_has_the_mode_of_any_file_and_a_link_stays(tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory, path, link = ah.AssociativeMemory(torch.eye(3)), tmp_path / "a" / "memory", tmp_path / "link"
    path.parent.mkdir()
    link.symlink_to(path)
    for mask, expected in ((0o027, 0o640), (0o022, 0o640)):  # the second file replaces the first, whose mode stays
        before = os.umask(mask)
        try:
            memory.save(link)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == expected
    assert link.is_symlink()
    assert [*path.parent.iterdir()] == [path]
    assert len(ah.AssociativeMemory.load(link)) == 3


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"], ids=["long", "null", "surrogate"])
def test_bad_names_of_files_are_refused(name, tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    refuses("path must be a file", ah.AssociativeMemory(torch.eye(3)).save, tmp_path / name)
    refuses("path must be a file", ah.AssociativeMemory.load, tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_saves_to_one_path_at_the_same_time_leave_one_file(tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory, path = ah.AssociativeMemory(torch.rand(2000, 64)), tmp_path / ("m" * 255)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(memory.save, [path] * 8))
    assert [*tmp_path.iterdir()] == [path]
    assert len(ah.AssociativeMemory.load(path)) == 2000
