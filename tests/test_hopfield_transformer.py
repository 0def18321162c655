"""HopfieldEncoderLayer and HopfieldDecoderLayer, alone and inside the transformers of torch."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers import hopfield
from ahop_layers.hopfield.transformer import HopfieldDecoderLayer, HopfieldEncoderLayer

KINDS = [ah.AdaptiveHopfield, hopfield.Hopfield]
KINDS += [import_module("hflayers").Hopfield] if find_spec("hflayers") else []


def encoder(kind, batch_first=True, count=2):
    layer = HopfieldEncoderLayer(kind(16, num_heads=2, batch_first=batch_first), dim_feedforward=24, dropout=0.0)
    return nn.TransformerEncoder(layer, num_layers=count, enable_nested_tensor=False)


def decoder(kind, batch_first=True):
    parts = [kind(16, num_heads=2, batch_first=batch_first) for _ in range(2)]
    return nn.TransformerDecoder(HopfieldDecoderLayer(*parts, dim_feedforward=24, dropout=0.0), num_layers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_transformer_encoder_with_masks(kind):
    model, x = encoder(kind).eval(), torch.randn(3, 6, 16)
    padding = torch.arange(6).expand(3, 6) >= torch.tensor([6, 4, 5])[:, None]
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    together = model(x, mask=mask, src_key_padding_mask=padding)
    alone = model(x[1:2, :4], mask=mask[:4, :4], is_causal=True)
    torch.testing.assert_close(together[1, :4], alone[0])
    shuffled = x.clone()
    shuffled[:, 5] = 0.0
    torch.testing.assert_close(model(shuffled, mask=mask)[:, :5], model(x, mask=mask)[:, :5])
    torch.testing.assert_close(model.train()(x, mask=mask, src_key_padding_mask=padding), together)
    second = encoder(kind, batch_first=False)
    second.load_state_dict(model.state_dict())
    got = second(x.transpose(0, 1), mask=mask, src_key_padding_mask=padding)
    torch.testing.assert_close(got.transpose(0, 1), together)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_transformer_decoder(kind):
    model, target, memory = decoder(kind).eval(), torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    output = model(target, memory, tgt_mask=mask, tgt_is_causal=True)
    changed = target.clone()
    changed[:, 4] = 0.0
    torch.testing.assert_close(model(changed, memory, tgt_mask=mask)[:, :4], output[:, :4])
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[:, 5:] = True
    masked = model(target, memory, memory_key_padding_mask=padding)
    torch.testing.assert_close(masked, model(target, memory[:, :5]))


def test_gradients_reach_every_parameter():
    model = encoder(ah.AdaptiveHopfield)
    model(torch.randn(3, 6, 16)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_properties_matrices_and_a_lookup_layer_inside():
    layer = HopfieldEncoderLayer(ah.AdaptiveHopfieldLayer(16, quantity=5, num_heads=2), dim_feedforward=24)
    assert (layer.input_size, layer.output_size, layer.batch_first) == (16, 16, True)
    x = torch.randn(3, 6, 16)
    assert layer(x).shape == x.shape
    assert layer.get_association_matrix(x).shape == (3, 2, 6, 5)
    both = HopfieldDecoderLayer(ah.AdaptiveHopfield(16), ah.AdaptiveHopfield(16, num_heads=4), dim_feedforward=24)
    assert both.output_size == 16
    assert both.get_association_matrix_self(x).shape == (3, 1, 6, 6)
    assert both.get_association_matrix_cross((x[:, :2], x, x[:, :2])).shape == (3, 4, 6, 2)


def test_adapt_finds_the_layers_inside():
    model, x = encoder(hopfield.Hopfield).eval(), torch.randn(3, 6, 16)
    before = model(x)
    report = ah.adapt_(model)
    assert list(report.adapted) == ["layers.0.hopfield_association", "layers.1.hopfield_association"]
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_weights_and_outputs_are_those_of_hflayers(kind):
    original = pytest.importorskip(
        "hflayers.transformer", reason="hopfield-layers is not installed: make test-hflayers"
    )
    import hflayers

    count, ours, theirs = (1, HopfieldEncoderLayer, original.HopfieldEncoderLayer)
    if kind == "decoder":
        count, ours, theirs = (2, HopfieldDecoderLayer, original.HopfieldDecoderLayer)
    states, outputs = [], []
    x, memory = torch.randn(3, 6, 16), torch.randn(3, 4, 16)
    for layer, association in ((ours, ah.AdaptiveHopfield), (theirs, hflayers.Hopfield)):
        torch.manual_seed(5)
        built = layer(*(association(16, num_heads=2) for _ in range(count)), dim_feedforward=24).eval()
        states.append(built.state_dict())
        outputs.append(built(x) if kind == "encoder" else built(x, memory))
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())
    assert [key for key in states[0] if key in states[1]] == list(states[1])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
