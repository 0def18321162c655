"""association_maps returns the weights of every adaptive layer and removes its hooks."""

import copy

import pytest
import torch
from test_convert import Bags, encoder
from torch import nn

import ahop_layers as ah
from ahop_layers.separation import Separation


def test_maps_are_the_weights_of_the_forward_pass():
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    expected, hidden = {}, x
    for number, layer in enumerate(model.layers):
        weights = layer.self_attn(hidden, hidden, hidden, average_attn_weights=False)[1]
        expected[f"layers.{number}.self_attn"] = weights
        hidden = layer(hidden)
    ah.adapt_(model)
    maps = ah.association_maps(model, x)
    assert list(maps) == list(expected)
    for name, weights in expected.items():
        torch.testing.assert_close(maps[name], weights, rtol=1e-5, atol=1e-6)
        assert not maps[name].requires_grad


def test_hopfield_layers_are_named_by_the_outer_layer():
    model, x = Bags().eval(), torch.randn(3, 6, 16)
    ah.adapt_(model, where=["pool", "relate"])
    mask = torch.arange(6).expand(3, 6) > 3
    maps = ah.association_maps(model, x, mask=mask)
    assert {name: tuple(weights.shape) for name, weights in maps.items()} == {
        "relate": (3, 4, 6, 6),
        "pool": (3, 2, 2, 6),
    }
    assert (maps["pool"][..., 4:] == 0).all()


@pytest.mark.full
def test_maps_of_a_compiled_model():
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    ah.adapt_(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
    expected = ah.association_maps(model, x)
    got = ah.association_maps(compiled, x)
    assert all(torch.equal(a, b) for a, b in zip(got.values(), expected.values(), strict=True))


def test_hooks_are_removed_if_a_call_fails():
    model, x = encoder(), torch.randn(2, 5, 16)
    ah.adapt_(model)
    model.layers[1].linear1 = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ah.association_maps(model, x)
    assert not any(module._forward_hooks for module in model.modules())


def test_each_layer_has_its_own_copy_of_a_separation():
    apart, x = encoder().eval(), torch.randn(2, 5, 16)
    shared = copy.deepcopy(apart)
    ah.adapt_(apart, separation="sparsemax")
    ah.adapt_(shared, separation=Separation("sparsemax"))
    torch.testing.assert_close(*(ah.association_maps(model, x) for model in (apart, shared)), rtol=0, atol=0)


@pytest.mark.parametrize(("separation", "steps"), [("softmax", 0), ("entmax", 2)])
def test_packed_bags(separation, steps):
    pool = ah.torchmil.AdaptivePool(16, 16, 2, separation=separation, update_steps_max=steps)
    x, mask = torch.randn(3, 9, 16), torch.arange(9) < torch.tensor([[4], [9], [0]])
    maps = ah.association_maps(pool, x, mask)
    assert list(maps) == ["pooling"]
    weights = pool.pooling.pool_packed(x[mask], mask.sum(1), return_association=True)[1]
    assert weights.shape == (13, 2, 1)
    assert torch.equal(maps["pooling"], weights)
