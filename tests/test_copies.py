"""adapt_ on copies of hflayers under other module names."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import ahop_layers as ah
from ahop_layers import hopfield
from ahop_layers.convert.registry import CONVERTERS
from tests.samples import refuses


@pytest.fixture(autouse=True)
def _converters_are_unchanged():
    before = dict(CONVERTERS)
    yield
    assert before == CONVERTERS


class Core(nn.Module):
    """A core as a project might carry it: attributes and parameters of hflayers, another computation."""

    def __init__(self, size, num_heads, separate):
        super().__init__()
        self.embed_dim = self.kdim = self.vdim = self.out_dim = size
        self.num_heads, self.head_dim, self.pattern_dim = num_heads, size // num_heads, size // num_heads
        self.query_as_static = self.key_as_static = self.value_as_static = self.value_as_connected = False
        self.normalize_pattern = self.normalize_pattern_affine = self.add_zero_attn = False
        self.dropout, self.separate = 0.1, separate
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v"):
            self.register_parameter(name, None)
        self.p_norm_weight = self.p_norm_bias = None
        self.in_proj_weight = nn.Parameter(torch.randn(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, stored, state, projection, scaling):
        parts = zip((state, stored, projection), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        projected = (functional.linear(*part) for part in parts)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        weights = self.separate(scaling * q @ k.mT)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class ProjectHopfield(nn.Module):
    def __init__(self, size, num_heads=2, separate=lambda scores: scores.softmax(-1)):
        super().__init__()
        self.association_core, self.association_activation = Core(size, num_heads, separate), None
        self.norm_stored_pattern, self.norm_state_pattern = nn.LayerNorm(size), nn.LayerNorm(size)
        self.norm_pattern_projection = nn.LayerNorm(size)
        self.batch_first, self.input_size, self.scaling = True, size, 0.4
        self.update_steps_max, self.update_steps_eps = 0, 1e-4

    def both(self, input):
        patterns = (input,) * 3 if isinstance(input, torch.Tensor) else input
        norms = self.norm_stored_pattern, self.norm_state_pattern, self.norm_pattern_projection
        normal = (norm(pattern) for norm, pattern in zip(norms, patterns, strict=True))
        return self.association_core(*normal, self.scaling)

    def forward(self, input, stored_pattern_padding_mask=None, association_mask=None):
        return self.both(input)[0]

    def get_association_matrix(self, input, stored_pattern_padding_mask=None, association_mask=None):
        return self.both(input)[1].detach()


class ProjectPooling(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.hopfield, self.pooling_weights = ProjectHopfield(size), nn.Parameter(torch.randn(1, 2, size))
        self._quantity = 2

    def forward(self, input, stored_pattern_padding_mask=None, association_mask=None):
        return self.hopfield((input, self.pooling_weights.expand(len(input), -1, -1), input)).flatten(1)


def sparsemax(scores):
    return ah.Separation("sparsemax")(scores)


@pytest.mark.parametrize(("separate", "name"), [(lambda s: s.softmax(-1), "softmax"), (sparsemax, "sparsemax")])
def test_a_copy_is_recognized_and_keeps_its_outputs(separate, name):
    model, x = nn.Sequential(ProjectHopfield(8, separate=separate)).eval(), torch.randn(3, 5, 8)
    before = model(x)
    model.train()[0].norm_state_pattern.eval()
    modes = {name: part.training for name, part in model.named_modules()}
    report = ah.adapt_(model)
    assert report.adapted == {"0": "ProjectHopfield"}
    assert {name: part.training for name, part in model.named_modules() if name in modes} == modes
    assert model[0].association_core.separation.training
    layer = model[0]
    assert isinstance(layer, ah.AdaptiveHopfield)
    assert layer.association_core.separation.name == name
    torch.testing.assert_close(model.eval()(x), before, atol=1e-5, rtol=1e-5)
    assert ah.revert_(model) == ["0"]
    assert type(layer) is ProjectHopfield
    torch.testing.assert_close(model(x), before)


def test_a_separation_that_is_given_is_used():
    model = nn.Sequential(ProjectHopfield(8, separate=sparsemax))
    ah.adapt_(model, separation="entmax15", blocks=2)
    core = model[0].association_core
    assert core.separation.name == "entmax15"
    assert core.similarity.w.shape == (2, 2, 2)


def test_a_pooling_layer_is_recognized_with_the_layer_inside():
    model, x = nn.Sequential(ProjectPooling(8)).eval(), torch.randn(3, 5, 8)
    before = model(x)
    assert ah.adapt_(model, dry_run=True).adapted == ah.adapt_(model).adapted == {"0": "ProjectPooling"}
    assert isinstance(model[0], ah.AdaptiveHopfieldPooling)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)


def test_a_copy_that_computes_something_else_is_refused_unless_told():
    model, x = nn.Sequential(ProjectHopfield(8, separate=lambda scores: scores.sigmoid())), torch.randn(3, 5, 8)
    before = model.eval()(x)
    refuses(r"0: .*ProjectHopfield has the parts of a Hopfield layer, but", ah.adapt_, model)
    assert type(model[0]) is ProjectHopfield
    torch.testing.assert_close(model(x), before)
    assert all(part.training is False for part in model.modules())
    for dry_run in (True, False):
        report = ah.adapt_(model, like=hopfield.Hopfield, where="0", dry_run=dry_run)
        assert report.adapted == {"0": "ProjectHopfield"}
    with pytest.raises(ah.AHopError, match="has the parts of a Hopfield layer, but"):  # another model is checked
        ah.adapt_(nn.Sequential(ProjectHopfield(8, separate=lambda scores: scores.sigmoid())))


def test_like_describes_only_modules_with_its_parts():
    """Other modules that ``where`` chooses stay what they are, in this call and in later ones."""
    sigmoid = ProjectHopfield(8, separate=lambda scores: scores.sigmoid())
    model = nn.Sequential(nn.Linear(8, 8), sigmoid, nn.MultiheadAttention(8, 2))
    refuses("blocks must divide", ah.adapt_, model, like=hopfield.Hopfield, where="*", blocks=3)
    report = ah.adapt_(model, like=hopfield.Hopfield, where="*")
    assert report.adapted == {"1": "ProjectHopfield", "2": "MultiheadAttention"}
    refuses("got Linear with none", ah.adapt_, nn.Linear(8, 8), like=hopfield.Hopfield, where="*")
    assert ah.adapt_(nn.Sequential(nn.MultiheadAttention(8, 2))).adapted == {"0": "MultiheadAttention"}


def test_like_needs_a_hopfield_class_and_where():
    model = nn.Sequential(ProjectHopfield(8))
    with pytest.raises(ah.AHopError, match=r"like must be Hopfield, HopfieldLayer or HopfieldPooling, got .*Linear"):
        ah.adapt_(model, like=nn.Linear, where="0")
    refuses("like needs where", ah.adapt_, model, like=hopfield.Hopfield)


def test_other_modules_are_not_copies():
    class Other(ProjectHopfield):
        def forward(self, x, mode="dense"):
            return self.both(x)[0]

    refuses("expected a model with attention to adapt", ah.adapt_, nn.Sequential(Other(8)))


@pytest.mark.parametrize(("name", "arguments"), [
    ("Hopfield", {"num_heads": 2, "update_steps_max": 2, "pattern_size": 3}),
    ("HopfieldLayer", {}),
    ("HopfieldPooling", {"batch_first": False}),
])  # fmt: skip
def test_the_source_of_hflayers_under_another_name(name, arguments):
    original = pytest.importorskip("hflayers", reason="hopfield-layers is not installed: make test-hflayers")
    spec = importlib.util.spec_from_file_location(
        "project_modules", Path(original.__file__), submodule_search_locations=[str(Path(original.__file__).parent)]
    )
    copy = sys.modules["project_modules"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(copy)
        model, x = nn.Sequential(getattr(copy, name)(8, **arguments)).eval(), torch.randn(3, 5, 8)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        before = model(x)
        assert ah.adapt_(model).adapted == {"0": name}
        torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-4)
        ah.revert_(model)
        torch.testing.assert_close(model(x), before)
    finally:
        for module in [module for module in sys.modules if module.partition(".")[0] == "project_modules"]:
            del sys.modules[module]
