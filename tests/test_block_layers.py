"""Blocks in attention layers and adapted models."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ahop_layers as ah

NUMBERS = torch.tensor([0, 1, 1, 2, 0, 0, 2, 2])
EVERY = [1, 4, NUMBERS, [None, 2], ah.Blocks(2, normalize=True), [4, ah.Blocks(NUMBERS, normalize=True)]]
NAMES = ["1", "4", "unequal", "several", "normalized", "several normalized"]
WARM = [(name, blocks) for name, blocks in zip(NAMES, EVERY, strict=True) if name != "normalized"]


def encoder(width=16, layers=2):
    layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False).eval()


@pytest.mark.parametrize(("name", "blocks"), WARM, ids=[name for name, _ in WARM])
def test_attention_starts_as_the_original(name, blocks):
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = ah.AdaptiveAttention(16, 2, batch_first=True, blocks=blocks)
    ours.load_state_dict(theirs.state_dict())  # the similarity keeps its initial values
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", EVERY, ids=NAMES)
def test_attention_trains_copies_and_loads(blocks):
    layer = ah.AdaptiveAttention(16, 2, batch_first=True, blocks=blocks, debias=True)
    x = torch.randn(3, 5, 16)
    layer(x, x, x)[0].square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    with torch.no_grad():
        for parameter in layer.similarity.parameters():
            parameter.normal_()
    other = ah.AdaptiveAttention(16, 2, batch_first=True, blocks=blocks, debias=True)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x, x, x)[0], layer(x, x, x)[0])
    assert copy.deepcopy(layer).half()(*[x.half()] * 3)[0].isfinite().all()


def test_attention_blocks_are_those_of_one_head():
    assert ah.AdaptiveAttention(16, 2, blocks=4).similarity.w.shape == (2, 2, 4)
    with pytest.raises(ah.AHopError, match="blocks must divide d = 8: expected one of 1, 2, 4, 8, got 16"):
        ah.AdaptiveAttention(16, 2, blocks=16)
    with pytest.raises(ah.AHopError, match="each of the 8 dimensions, got 16"):
        ah.AdaptiveAttention(16, 2, blocks=torch.arange(16))


@pytest.mark.parametrize(("name", "blocks"), WARM, ids=[name for name, _ in WARM])
def test_an_adapted_model_computes_the_same(name, blocks):
    model, x = encoder(), torch.randn(3, 5, 16)
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


@pytest.mark.parametrize("blocks", [3, [2, 3], torch.arange(6), "4"], ids=str)
def test_blocks_that_do_not_fit_leave_a_model_unchanged(blocks):
    model = encoder(layers=3)
    classes, names, x = [type(module) for module in model.modules()], list(model.state_dict()), torch.randn(3, 5, 16)
    expected, hooks = model(x), [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ah.AHopError, match=r"layers\.0\.self_attn: .*blocks"):
        ah.adapt_(model, blocks=blocks)
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == names
    assert [vars(module).keys() for module in model.modules()] == [attributes.keys() for attributes in hooks]
    assert torch.equal(model(x), expected)


def test_a_later_layer_with_another_head_dimension_leaves_a_model_unchanged():
    model = nn.ModuleList([nn.MultiheadAttention(16, 2), nn.MultiheadAttention(12, 2)])
    with pytest.raises(ah.AHopError, match="1: blocks must divide d = 6: expected one of 1, 2, 3, 6, got 4"):
        ah.adapt_(model, blocks=4)
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2
    assert not ah.similarity_parameters(model)


def test_only_similarities_train_with_freeze_rest():
    model = encoder()
    ah.adapt_(model, blocks=[4, ah.Blocks(2, normalize=True)], freeze_rest=True)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {f"layers.{i}.self_attn.similarity.{kind}_{r}" for i in (0, 1) for kind in ("w", "beta") for r in (0, 1)}
    assert trainable == names
    groups = ah.parameter_groups(model, lr=0.1)
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in ah.similarity_parameters(model)}


@pytest.mark.slow
def test_compiled_attention():
    torch.compiler.reset()
    layer = ah.AdaptiveAttention(16, 2, batch_first=True, blocks=[4, ah.Blocks(NUMBERS, normalize=True)])
    x = torch.randn(3, 5, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x), layer(x, x, x))


@pytest.mark.parametrize("name", ["Hopfield", "HopfieldLayer", "HopfieldPooling"])
@pytest.mark.parametrize("blocks", [1, 4, NUMBERS, [None, 2]], ids=["1", "4", "unequal", "several"])
def test_hopfield_layers_start_as_the_original(name, blocks):
    options = {} if name == "Hopfield" else {"quantity": 3}
    plain = getattr(ah.hopfield, f"Own{name}")(16, num_heads=2, **options)
    built = getattr(ah, f"Adaptive{name}")(16, num_heads=2, **options, blocks=blocks)
    built.load_state_dict(plain.state_dict())
    x = torch.randn(3, 5, 16)
    expected = plain(x)
    torch.testing.assert_close(built(x), expected, rtol=1e-5, atol=1e-6)
    ah.adapt_(plain, blocks=blocks)
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-6)
    assert all(
        torch.equal(a, b) for a, b in zip(ah.similarity_parameters(plain), ah.similarity_parameters(built), strict=True)
    )


def test_blocks_of_static_patterns_are_those_of_a_pattern():
    static = {f"{name}_as_static": True for name in ("stored_pattern", "state_pattern", "pattern_projection")}
    layer = ah.AdaptiveHopfield(12, num_heads=1, **static, disable_out_projection=True, blocks=3)
    assert layer.association_core.similarity.w.shape == (1, 2, 3)
    assert layer(torch.randn(2, 5, 12)).shape == (2, 5, 12)


def test_packed_bags_with_blocks_equal_padded_ones():
    pooling = ah.AdaptiveHopfieldPooling(16, num_heads=2, blocks=4)
    with torch.no_grad():
        for parameter in ah.similarity_parameters(pooling):
            parameter.normal_()
    bags = torch.randn(2, 5, 16)
    packed = pooling.pool_packed(bags.flatten(0, 1), [5, 5])
    torch.testing.assert_close(packed, pooling(bags), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [4, NUMBERS, [None, 2]], ids=["4", "unequal", "several"])
@pytest.mark.parametrize("table", [False, True])
def test_a_memory_starts_as_the_dot_product(blocks, table):
    patterns, query = torch.randn(20, 8), torch.randn(5, 8)
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, blocks=blocks, table=table)
    torch.testing.assert_close(memory.scores(query), query @ patterns.T, rtol=1e-5, atol=1e-5)
    losses = memory.fit(ah.variants.Noisy(0.5), epochs=3, batch=16, progress=False)
    assert losses.isfinite().all()


def test_scores_of_normalized_blocks_do_not_depend_on_how_patterns_are_sliced(monkeypatch):
    patterns, query = torch.randn(40, 8) * torch.linspace(0.1, 10, 40)[:, None], torch.randn(5, 8)
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, blocks=ah.Blocks(2, normalize=True))
    expected = memory.scores(query)
    assert memory.similarity.norm_0 > 0
    monkeypatch.setattr("ahop_layers.memory.memory.BLOCK_ELEMENTS", 24)
    assert torch.equal(memory.scores(query), expected)
    monkeypatch.setattr("ahop_layers.blocks.SLICE_ELEMENTS", 24)
    again = ah.AssociativeMemory.preset("A-Hop", patterns, blocks=ah.Blocks(2, normalize=True))
    torch.testing.assert_close(again.similarity.norm_0, memory.similarity.norm_0)
