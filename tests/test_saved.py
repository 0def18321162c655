"""Similarities are saved without the rest of a model, and loaded into a model that they fit."""

import sys

import pytest
import torch
from test_call import Two
from test_hopfield import WITHOUT_PARAMETERS
from torch import nn

import ahop_layers as ah
from tests.samples import perturb, refuses

save_file = pytest.importorskip("safetensors.torch").save_file


def encoder(layers=2):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def test_the_default_number_of_blocks_is_replaced(tmp_path):
    first, second = encoder(), encoder()
    second.load_state_dict(first.state_dict())
    ah.adapt_(first, blocks=2)
    perturb(first, 1.0)
    ah.adapt_(second)
    ah.save_similarities(first, tmp_path / "similarities.safetensors")
    ah.load_similarities(second, tmp_path / "similarities.safetensors")
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(second(x), first(x))
    ah.revert_(second, discard=True)
    ah.adapt_(second, bases=("l1", "dot"))
    shown = repr(second)
    with pytest.raises(ah.AHopError, match=r"must be .*l1.* as in the model"):
        ah.load_similarities(second, tmp_path / "similarities.safetensors")
    assert repr(second) == shown


@pytest.mark.parametrize(("make", "options"), [
    (encoder, {"blocks": 4}),
    (encoder, {"blocks": torch.tensor([0, 1] * 4), "debias": True, "separation": "entmax"}),
    (encoder, {"blocks": ah.Blocks(2, normalize=True)}),
    (lambda: ah.AssociativeMemory(torch.randn(5, 16), "adaptive"), None),
    (lambda: nn.Sequential(ah.AdaptiveHopfield(16, num_heads=2), ah.AdaptiveHopfieldPooling(16)), None),
    (lambda: nn.Sequential(Two()), {"example": torch.randn(2, 3, 16)}),
])  # fmt: skip
def test_saved_similarities_are_loaded(make, options, tmp_path):
    first, path = make(), tmp_path / "similarities.safetensors"
    second = make()
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        if options is not None:
            ah.adapt_(model, **options)
    perturb(first, 1.0)
    if options is not None and options.get("separation") == "entmax":
        with torch.no_grad():
            first.layers[0].self_attn.separation.alpha_logit.fill_(1.0)
    ah.save_similarities(first, path)
    assert path.stat().st_size < 6000
    ah.load_similarities(second, path)
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_dtypes_are_those_of_the_model(tmp_path):
    model, other = encoder(), encoder().double()
    for each in (model, other):
        ah.adapt_(each)
    perturb(model, 1.0)
    ah.save_similarities(model, tmp_path / "a")
    ah.load_similarities(other, tmp_path / "a")
    assert torch.equal(other.layers[0].self_attn.similarity.w, model.layers[0].self_attn.similarity.w.double())


def test_a_model_that_is_not_adapted_is_refused(tmp_path):
    model = encoder()
    for function in (ah.save_similarities, ah.load_similarities):
        refuses("call adapt_ first, got TransformerEncoder without any", function, model, tmp_path / "a")
        refuses("model must be a module, got int", function, 5, tmp_path / "a")


@pytest.mark.parametrize(("make", "options", "message"), [
    (encoder, {"blocks": 2}, r"self_attn\.similarity must be .*'blocks': '2'.* got .*'blocks': '4'"),
    (encoder, {"bases": ("dot",), "blocks": 4}, r"'bases': \['dot'\].* got .*'bases': \['dis', 'dot'\]"),
    (lambda: encoder(3), {"blocks": 4}, r"got layers\.2\.self_attn\.similarity in the model only"),
    (lambda: encoder(1), {"blocks": 4}, r"got layers\.1\.self_attn\.similarity in the file only"),
    (encoder, {"blocks": 4, "separation": "entmax"}, "separation in the model only"),
    (encoder, {"blocks": 4, "debias": True}, r"bias must have the shape \(2, 8\), got none"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_and_unchanged(make, options, message, tmp_path):
    saved, model = encoder(), make()
    ah.adapt_(saved, blocks=4)
    perturb(saved, 1.0)
    ah.save_similarities(saved, tmp_path / "a")
    ah.adapt_(model, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refuses(message, ah.load_similarities, model, tmp_path / "a")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_class_of_layer_is_refused(tmp_path):
    class Other(nn.MultiheadAttention):
        pass

    first, second = nn.ModuleList([nn.MultiheadAttention(16, 2)]), nn.ModuleList([Other(16, 2)])
    for model in (first, second):
        ah.adapt_(model)
    ah.save_similarities(first, tmp_path / "a")
    refuses(
        r"'layer': .*Other.* got .*'layer': 'torch.*MultiheadAttention", ah.load_similarities, second, tmp_path / "a"
    )


def test_unknown_shapes_are_refused(tmp_path):
    with pytest.raises(ah.AHopError, match="call the model once first"):
        ah.save_similarities(ah.AdaptiveHopfield(**WITHOUT_PARAMETERS), tmp_path / "a")


def test_safetensors_is_optional(tmp_path, monkeypatch):
    model = encoder()
    ah.adapt_(model)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refuses("needs safetensors: pip install safetensors", ah.save_similarities, model, tmp_path / "a")
