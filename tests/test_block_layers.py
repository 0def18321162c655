"""Blocks in attention layers, adapted models and memories."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import ahop_layers as ah

NUMBERS = torch.tensor([0, 1, 1, 2, 0, 0, 2, 2])


def test_scores_of_normalized_blocks_do_not_depend_on_how_patterns_are_sliced(monkeypatch):
    patterns, query = torch.randn(40, 8) * torch.linspace(0.1, 10, 40)[:, None], torch.randn(5, 8)
    memory = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(8, blocks=ah.Blocks(2, normalize=True)))
    expected = memory.scores(query)
    assert memory.similarity.norm > 0
    monkeypatch.setattr("ahop_layers.memory.state.CHUNK_ELEMENTS", 24)
    torch.testing.assert_close(memory.scores(query), expected)  # a sum of a row may depend on the number of rows
    monkeypatch.setattr("ahop_layers.similarity.blocks.SLICE_ELEMENTS", 24)
    again = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(8, blocks=ah.Blocks(2, normalize=True)))
    torch.testing.assert_close(again.similarity.norm, memory.similarity.norm)


INTERLEAVED = torch.tensor([0, 1, 2, 3] * 2)
ARRANGED = {"permuted": INTERLEAVED, "unequal": NUMBERS, "normalized": ah.Blocks(NUMBERS, normalize=True)}


def trained_memory(blocks, **keywords):
    memory = ah.AssociativeMemory(torch.randn(30, 8), ah.AdaptiveSimilarity(8, blocks=blocks, **keywords))
    with torch.no_grad():
        for parameter in memory.similarity.parameters():
            parameter.normal_()
    return memory


def check_scores(memory):
    """The scores of a memory equal those of its similarity alone, also in a second call."""
    query = torch.randn(5, 8).to(memory.patterns)
    for _ in range(2):
        torch.testing.assert_close(memory.scores(query), memory.similarity(query, memory.patterns))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGED)
def test_a_memory_scores_its_present_patterns(name, monkeypatch):
    monkeypatch.setattr("ahop_layers.memory.state.CHUNK_ELEMENTS", 24)
    memory = trained_memory(ARRANGED[name])
    check_scores(memory)
    memory.add(torch.randn(7, 8))
    check_scores(memory)
    memory.remove([0, 3])
    check_scores(memory)
    memory.patterns[2] = 5.0
    check_scores(memory)
    memory.fit(ah.variants.Noisy(0.5))
    other = trained_memory(ARRANGED[name])
    other.load_state_dict(memory.state_dict())
    for each in (memory, other, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), memory.double()):
        check_scores(each)
    memory.similarity = ah.AdaptiveSimilarity(8, blocks=NUMBERS.flip(0)).double()
    check_scores(memory)


@pytest.mark.parametrize("blocks", ARRANGED.values(), ids=ARRANGED)
def test_users_see_patterns_in_their_own_order(blocks):
    memory, query = trained_memory(blocks), torch.randn(5, 8)
    patterns = memory.patterns.clone()
    memory.scores(patterns)
    learned = {f"similarity.{name}" for name in memory.similarity.state_dict()}
    own = {
        "patterns",
        "beta",
        "calibration",
        "foreign",
        "fit_counts",
        "shortlist",
        "mixture.gate",
        "mixture.least",
        "mixture.spread",
    }
    assert set(memory.state_dict()) == own | learned
    for stored in (memory.patterns, memory.state_dict()["patterns"]):
        assert torch.equal(stored, patterns)
    scores = memory.similarity(query, patterns)
    torch.testing.assert_close(memory.retrieve(query), scores.softmax(-1) @ patterns)
    assert torch.equal(memory.recall(query), scores.argmax(-1))


def test_the_prepared_copy_is_kept_with_the_patterns():
    memory = trained_memory(INTERLEAVED)

    def copies():
        return memory._read().prepared

    (first,) = copies()
    assert torch.equal(first, memory.patterns[:, [0, 4, 1, 5, 2, 6, 3, 7]])
    assert copies()[0] is first
    kept = weakref.ref(first)
    del first
    assert kept() is not None
    memory.patterns[0] = 1.0
    assert torch.equal(copies()[0][0], torch.ones(8))
    assert kept() is None
    kept = weakref.ref(copies()[0])
    memory.double()  # replaces the patterns
    assert kept() is None
    memory.similarity.load_state_dict(memory.similarity.state_dict() | {"block_numbers": torch.arange(8) // 2})
    assert not copies()  # consecutive blocks need no copy


def test_large_memories_and_learned_patterns_have_no_copy(monkeypatch):
    memory = trained_memory(INTERLEAVED)
    monkeypatch.setattr("ahop_layers.memory.state.PREPARED_ELEMENTS", 30 * 8 - 1)
    assert not memory._read().prepared
    check_scores(memory)
    monkeypatch.setattr("ahop_layers.memory.state.PREPARED_ELEMENTS", 30 * 8)
    memory = trained_memory(INTERLEAVED)
    assert memory._read().prepared
    memory.patterns.requires_grad_()
    memory.scores(torch.randn(2, 8)).sum().backward()
    assert memory.patterns.grad.any()


def test_a_memory_can_be_fitted_after_a_call_in_inference_mode():
    memory = trained_memory(INTERLEAVED)
    with torch.inference_mode():
        memory.recall(torch.randn(2, 8))
    assert memory.fit(ah.variants.Noisy(0.5)).queries > 0
    with torch.inference_mode():
        check_scores(ah.AssociativeMemory(torch.randn(9, 8), ah.AdaptiveSimilarity(8, blocks=INTERLEAVED)))


@pytest.mark.full
def test_a_compiled_memory():
    torch.compiler.reset()
    memory, query = trained_memory(INTERLEAVED), torch.randn(5, 8)
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), memory(query))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("blocks", ARRANGED.values(), ids=ARRANGED)
def test_a_memory_moves_to_another_device_with_its_blocks(blocks):
    memory = trained_memory(blocks)
    check_scores(memory)
    check_scores(memory.cuda())
    check_scores(memory.cpu())


AUTO = [(15, 15), (16, 4), (17, 17), (18, 6), (25, 5), (28, 4), (49, 7), (64, 4)]


@pytest.mark.parametrize(("dim", "n"), AUTO)
def test_the_default_of_layers_is_the_smallest_number_of_blocks_from_4_to_8(dim, n):
    static = {"stored_pattern_as_static": True, "state_pattern_as_static": True, "input_size": dim}
    layers = (ah.AdaptiveHopfield(2 * dim, num_heads=2), ah.AdaptiveHopfieldLayer(**static, hidden_size=dim),
              ah.torchmil.AdaptivePool(8, 2 * dim, num_heads=2).pooling, ah.AdaptiveAttention(2 * dim, 2))  # fmt: skip
    expected = repr(ah.AdaptiveSimilarity(dim, blocks=None if n == dim else n))
    for layer in layers:
        (similarity,) = {similarity for similarity in layer.modules() if isinstance(similarity, ah.AdaptiveSimilarity)}
        assert similarity.w.shape[-1] == n
        assert repr(similarity).replace(f"num_heads={similarity.num_heads}", "num_heads=None") == expected
    model = nn.MultiheadAttention(2 * dim, 2)
    for dry_run in (True, False):
        shown = str(ah.adapt_(model, dry_run=dry_run))
        assert shown.endswith(f"MultiheadAttention, {n} blocks" if n < dim else "MultiheadAttention")
    assert ah.AdaptiveSimilarity(dim).w.shape[-1] == dim


@pytest.mark.parametrize("n", [1, 4, 8, None])
def test_a_default_layer_takes_the_number_of_blocks_of_a_state_dict(n):
    source, x = ah.AdaptiveHopfield(32, num_heads=2, blocks=n), torch.randn(2, 3, 32)
    with torch.no_grad():
        source.association_core.similarity.w.normal_()
    layer = ah.AdaptiveHopfield(32, num_heads=2)
    parameters = list(layer.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    layer(x).sum().backward()  # a gradient of the old size must not remain
    layer.load_state_dict(source.state_dict())
    assert all(one is other for one, other in zip(layer.parameters(), parameters, strict=True))
    torch.testing.assert_close(layer(x), source(x))
    assert repr(layer.association_core.similarity) == repr(source.association_core.similarity)
    before = layer.association_core.similarity.w.detach().clone()
    layer(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.association_core.similarity.w, before)


def test_a_state_dict_that_fails_leaves_the_number_of_blocks():
    layer, x = ah.AdaptiveHopfield(32, num_heads=2), torch.randn(2, 3, 32)
    expected, shown = layer(x), repr(layer)
    state = ah.AdaptiveHopfield(32, num_heads=2, blocks=8).state_dict()
    state["association_core.out_proj.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(state)
    assert (repr(layer), torch.equal(layer(x), expected)) == (shown, True)
    state = layer.state_dict() | {"association_core.similarity.w": torch.ones(2, 2, 5)}
    with pytest.raises(ah.AHopError, match=r"must have 4 blocks, as the similarity, got .* with 5"):
        layer.load_state_dict(state)


def test_initial_weights_and_a_similarity_replace_the_default_number_of_blocks():
    weights = torch.randn(2, 2, 16)
    similarity = ah.AdaptiveAttention(32, 2, init=weights).similarity
    assert torch.equal(similarity.w, weights)
    assert isinstance(ah.AdaptiveAttention(32, 2, similarity=nn.Identity()).similarity, nn.Identity)
    fixed = ah.AdaptiveSimilarity(16, 2, blocks=8).state_dict()
    with pytest.raises(ah.AHopError, match="must have 16 blocks"):
        similarity.load_state_dict(fixed)
