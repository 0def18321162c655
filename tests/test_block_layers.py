"""Blocks in attention layers, adapted models and memories."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import ahop_layers as ah

NUMBERS = torch.tensor([0, 1, 1, 2, 0, 0, 2, 2])
BLOCKS = {"1": 1, "4": 4, "unequal": NUMBERS}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_an_adapted_model_computes_the_same(blocks):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 5, 16)
    expected = model(x)
    report = ah.adapt_(model, blocks=blocks)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    similarity = model.layers[0].self_attn.similarity
    assert report.new_parameters == 2 * sum(parameter.numel() for parameter in similarity.parameters())
    assert repr(similarity) == repr(ah.AdaptiveSimilarity(8, 2, blocks=blocks))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))
    ah.revert_(model)
    assert torch.equal(model(x), expected)


def test_scores_of_normalized_blocks_do_not_depend_on_how_patterns_are_sliced(monkeypatch):
    patterns, query = torch.randn(40, 8) * torch.linspace(0.1, 10, 40)[:, None], torch.randn(5, 8)
    memory = ah.AssociativeMemory(patterns, ah.AdaptiveSimilarity(8, blocks=ah.Blocks(2, normalize=True)))
    expected = memory.scores(query)
    assert memory.similarity.norm > 0
    monkeypatch.setattr("ahop_layers.memory.search.CHUNK_ELEMENTS", 24)
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
    monkeypatch.setattr("ahop_layers.memory.search.CHUNK_ELEMENTS", 24)
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
    parts = {"similarity": memory.similarity, "mixture": memory.mixture}
    learned = {f"{part}.{name}" for part, module in parts.items() for name in module.state_dict()}
    assert set(memory.state_dict()) == {"patterns", "beta", "calibration", "foreign", "fit_counts", *learned}
    for stored in (memory.patterns, memory.state_dict()["patterns"]):
        assert torch.equal(stored, patterns)
    scores = memory.similarity(query, patterns)
    torch.testing.assert_close(memory.retrieve(query), scores.softmax(-1) @ patterns)
    assert torch.equal(memory.recall(query), scores.argmax(-1))


def test_the_prepared_copy_is_kept_with_the_patterns():
    memory = trained_memory(INTERLEAVED)

    def copies():
        return memory._scorer()._prepared()

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
    assert copies() is None  # consecutive blocks need no copy


def test_large_memories_and_learned_patterns_have_no_copy(monkeypatch):
    memory = trained_memory(INTERLEAVED)
    monkeypatch.setattr("ahop_layers.memory.search.PREPARED_ELEMENTS", 30 * 8 - 1)
    assert memory._scorer()._prepared() is None
    check_scores(memory)
    monkeypatch.setattr("ahop_layers.memory.search.PREPARED_ELEMENTS", 30 * 8)
    assert memory._scorer()._prepared() is not None
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
