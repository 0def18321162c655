"""ahop_layers.hflayers: the names, internals, initial weights and state dicts of hopfield-layers."""

import inspect
import pickle
import warnings
from contextlib import suppress
from copy import copy, deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from test_hopfield import NO_NORM, WITHOUT_PARAMETERS

import ahop_layers as ah
from ahop_layers import AdaptiveHopfield, AdaptiveHopfieldLayer, hopfield
from ahop_layers.hflayers import functional, transformer
from ahop_layers.hflayers.auxiliary.data import BitPatternSet
from ahop_layers.hopfield.adaptive import is_dot_product
from tests.samples import refuses

NAMES = ("Hopfield", "HopfieldLayer", "HopfieldPooling")
OWN, ADAPTIVE = ({name: getattr(hopfield, prefix + name) for name in NAMES} for prefix in ("", "Adaptive"))


@pytest.fixture
def original():
    return pytest.importorskip("hflayers", reason="hopfield-layers is not installed: make test-hflayers")


@pytest.fixture(params=[OWN, ADAPTIVE], ids=["own", "adaptive"])
def layers(request):
    return request.param


def test_the_core_has_the_switches_of_hflayers(layers):
    switches = [
        (core.disable_out_projection, core.static_execution)
        for core in (layers["Hopfield"](8).association_core, layers["Hopfield"](**WITHOUT_PARAMETERS).association_core)
    ]
    assert switches == [(False, False), (True, True)]
    layer = layers["Hopfield"](16, pattern_projection_as_connected=True, **WITHOUT_PARAMETERS)
    assert (layer.association_core.static_execution, layer.scaling) == (False, 0.25)


@pytest.mark.parametrize("batch_first", [True, False])
def test_associate_returns_four_results_with_the_batch_second(layers, batch_first):
    layer = layers["Hopfield"](8, num_heads=2, pattern_size=3, batch_first=batch_first)
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    output, mean, weights, projected = layer._associate(data=x)
    assert (mean, weights, projected) == (None, None, None)
    assert output.shape == (5, 3, 8)
    torch.testing.assert_close(layer._maybe_transpose(output), layer(x))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 2] = True
    result = layer._associate(
        data=(x, x, x), return_raw_associations=True, return_projected_patterns=True, stored_pattern_padding_mask=mask
    )
    assert (result[2].shape, result[3].shape) == ((3, 2, 5, 5), (3, 2, 5, 3))
    assert (result[2][..., 2] == 0).all()
    torch.testing.assert_close(layer._maybe_transpose(result[0]), layer(x, stored_pattern_padding_mask=mask))
    both = layer._maybe_transpose(torch.zeros(2, 3, 4), torch.zeros(5, 6, 4))
    assert [part.shape[:2] for part in both] == ([(3, 2), (6, 5)] if batch_first else [(2, 3), (5, 6)])


def test_a_subclass_may_override_associate(layers):
    class Shifted(layers["Hopfield"]):
        def _associate(self, *args, **keywords):
            output, *rest = super()._associate(*args, **keywords)
            return output + 1, *rest

    layer, plain, x = Shifted(8), layers["Hopfield"](8), torch.randn(3, 5, 8)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x) + 1)


def test_calling_the_core(layers):
    layer = layers["Hopfield"](8, num_heads=2, scaling=0.7, update_steps_max=2, **NO_NORM)
    core, x = layer.association_core, torch.randn(5, 3, 8)
    settings = {
        "scaling": layer._Hopfield__scaling,
        "update_steps_max": layer._Hopfield__update_steps_max,
        "update_steps_eps": layer._Hopfield__update_steps_eps,
    }
    output, mean, weights, projected = core(
        query=x, key=x, value=x, need_weights=True, return_raw_associations=True, return_pattern_projections=True,
        **settings,
    )  # fmt: skip
    torch.testing.assert_close(output.transpose(0, 1), layer(x.transpose(0, 1)))
    torch.testing.assert_close(mean, weights.mean(1))
    torch.testing.assert_close(weights, layer.get_association_matrix(x.transpose(0, 1)))
    assert projected.shape == (3, 2, 5, 4)
    bare = layers["Hopfield"](8, num_heads=2, scaling=1.0, **NO_NORM)
    bare.load_state_dict(layer.state_dict())
    torch.testing.assert_close(core(x, x, x, need_weights=False)[0], bare(x.transpose(0, 1)).transpose(0, 1))
    steps = core(x, x, x, scaling=0.7, update_steps_max=torch.tensor([2, 2]))[0]
    torch.testing.assert_close(steps, output)


def test_private_attributes_of_hflayers_can_be_read_and_set(layers):
    layer, x = layers["Hopfield"](8, num_heads=2, update_steps_max=1), torch.randn(3, 5, 8)
    assert layer._Hopfield__batch_first is True
    assert layer._Hopfield__scaling == 0.5
    assert (layer._Hopfield__update_steps_max, layer._Hopfield__update_steps_eps) == (1, 1e-4)
    layer._Hopfield__scaling = 2.0
    layer._Hopfield__update_steps_max = 3
    other = layers["Hopfield"](8, num_heads=2, scaling=2.0, update_steps_max=3)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), other(x))
    for scaling in (torch.tensor([0.5, 0.5]), 0.5):
        layer._Hopfield__scaling = scaling
        assert layer.scaling is scaling
    layer._Hopfield__batch_first = False
    assert not layer.batch_first


@pytest.mark.parametrize("batch_first", [True, False])
def test_prepare_input_expands_the_learned_patterns(layers, batch_first):
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    lookup = layers["HopfieldLayer"](8, quantity=4, lookup_weights_as_separated=True, batch_first=batch_first)
    pooling = layers["HopfieldPooling"](8, quantity=4, batch_first=batch_first)
    wide = (3, 4, 8) if batch_first else (4, 3, 8)
    assert [part.shape for part in lookup._prepare_input(input=x)] == [wide, x.shape, wide]
    assert [part.shape for part in pooling._prepare_input(input=x)] == [x.shape, wide, x.shape]
    output = lookup.hopfield._associate(data=lookup._prepare_input(input=x))[0]
    torch.testing.assert_close(lookup.hopfield._maybe_transpose(output), lookup(x))
    stored, _, projection = pooling._prepare_input(input=(x, 2 * x))
    torch.testing.assert_close(projection, 2 * stored)


@pytest.mark.parametrize("name", OWN)
def test_an_association_matrix_with_gradients(layers, name):
    quantity = {"quantity": 4} if name == "HopfieldLayer" else {}  # the weight of a single pattern is always 1
    layer, x = layers[name](8, num_heads=2, **quantity), torch.randn(3, 5, 8)
    assert not layer.get_association_matrix(x).requires_grad
    weights = layer.get_association_matrix(x, with_grad=True)
    torch.testing.assert_close(weights.detach(), layer.get_association_matrix(x))
    weights.square().sum().backward()
    core = getattr(layer, "hopfield", layer).association_core
    assert core.in_proj_weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert not layer.get_association_matrix(x, with_grad=True).requires_grad


SEEDED = [
    ("Hopfield", {}),
    ("Hopfield", {"num_heads": 2, "hidden_size": 8, "pattern_size": 3, "input_bias": False}),
    ("Hopfield", {"concat_bias_pattern": True, "stored_pattern_size": 8}),
    ("Hopfield", {"disable_out_projection": True, "concat_bias_pattern": True}),
    ("Hopfield", {"normalize_hopfield_space": True, "normalize_hopfield_space_affine": True, "hidden_size": 4}),
    ("HopfieldLayer", {"quantity": 4, "lookup_weights_as_separated": True}),
    ("HopfieldPooling", {"quantity": 2, "state_pattern_as_static": True}),
]


@pytest.mark.parametrize(("name", "arguments"), SEEDED)
def test_the_same_seed_draws_the_weights_of_hflayers(name, arguments):
    theirs = [getattr(import_module("hflayers"), name)] if find_spec("hflayers") else []
    states = []
    for kind in (*theirs, OWN[name], ADAPTIVE[name]):
        torch.manual_seed(3)
        states.append(kind(12, **arguments).state_dict() | {"next": torch.rand(1)})
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())


RECORDED = torch.tensor([
    [0.0057715168222785, 0.007731955032795668, -0.004021278116852045, -0.002358539728447795],
    [-0.005029589869081974, -0.021110637113451958, -0.01118522509932518, -0.002394172130152583],
])  # fmt: skip


@pytest.mark.recorded
def test_the_weights_that_hflayers_draws_with_seed_0():
    torch.manual_seed(0)
    layer = AdaptiveHopfieldLayer(4, quantity=2)
    torch.testing.assert_close(layer.hopfield.association_core.in_proj_weight[0], RECORDED[0])
    torch.testing.assert_close(layer.lookup_weights[0, 1], RECORDED[1])


PROJECT = """
import hflayers
from hflayers import Hopfield, HopfieldLayer, HopfieldPooling
from hflayers.activation import HopfieldCore
from hflayers.auxiliary.data import BitPatternSet, LatchSequenceSet
from hflayers.functional import hopfield_core_forward
from hflayers.transformer import HopfieldDecoderLayer, HopfieldEncoderLayer
layer = hflayers.HopfieldLayer(input_size=4, quantity=3)
"""


def test_install_as_hflayers_switches_the_imports_of_a_project():
    with patch.dict("sys.modules"):
        with suppress(ImportError):
            import hflayers.transformer  # noqa: F401 - the original, if it is installed
        for _ in range(2):
            ah.install_as_hflayers()
            scope = {}
            exec(PROJECT, scope)
            assert type(scope["layer"]) is AdaptiveHopfieldLayer
            assert all(scope[name] is kind for name, kind in ADAPTIVE.items())


def test_install_as_hflayers_warns_once_of_modules_that_have_imported_the_original():
    original, project, other = ModuleType("hflayers"), ModuleType("project"), ModuleType("other")
    original.Hopfield = project.Layer = type("Hopfield", (torch.nn.Module,), {"__module__": "hflayers"})
    other.library, original.torch = original, torch  # of which others may hold what they want
    with patch.dict("sys.modules", {"hflayers": original, "project": project, "other": other}):
        with pytest.warns(UserWarning, match="have imported them: other, project; call"):
            ah.install_as_hflayers()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ah.install_as_hflayers()


def test_install_as_hflayers_takes_defaults_of_the_adaptive_layers():
    with patch.dict("sys.modules"):
        refuses("keywords must be one of bases, .*, got 'block'", ah.install_as_hflayers, block=4)
        ah.install_as_hflayers(blocks=8, separation=ah.Separation("sparsemax"))
        import hflayers
        import hflayers.transformer

        class Mine(hflayers.Hopfield):
            pass

        layers = [Mine(16), hflayers.HopfieldPooling(16).hopfield, hflayers.Hopfield(16, blocks=2)]
        assert [layer.association_core.similarity.w.shape[-1] for layer in layers] == [8, 8, 2]
        separations = [layer.association_core.separation for layer in layers]
        assert {each.name for each in separations} == {"sparsemax"}
        assert len(set(map(id, separations))) == 3
        assert type(pickle.loads(pickle.dumps(layers[2]))) is hflayers.Hopfield
        assert list(inspect.signature(hflayers.Hopfield).parameters) == list(
            inspect.signature(AdaptiveHopfield).parameters
        )
        assert AdaptiveHopfield(16).association_core.similarity.w.shape[-1] == 4
        ah.install_as_hflayers()
        assert import_module("hflayers").Hopfield is AdaptiveHopfield


def test_a_model_that_was_pickled_with_hflayers_is_complete():
    """The record has two models with random weights in float64, their inputs and their outputs."""
    with patch.dict("sys.modules"):
        ah.install_as_hflayers()
        path = Path(__file__).parent / "data" / "hflayers_model.pt"
        saved = torch.load(path, weights_only=False)
    for name in ("", "static "):
        model = saved[f"{name.strip() or 'model'}"]
        x, expected = saved[f"{name}input"], saved[f"{name}output"]
        torch.testing.assert_close(model(x), expected)
        for part in ah.similarity_parameters(model):
            torch.nn.init.normal_(part)
        trained = model(x)
        assert not torch.allclose(trained, expected)
        for each in (deepcopy(model), pickle.loads(pickle.dumps(model)), copy(model)):
            assert torch.equal(each(x), trained)


def test_a_star_import_gives_the_names_of_hflayers():
    names = {"Module", "Optional", "Parameter", "Tensor", "Tuple", "Union", "nn", "sqrt", "torch"}
    names |= {*NAMES, "HopfieldCore", "activation", "functional"}
    exec("from ahop_layers.hflayers import *", own := {})
    assert own.keys() - {"__builtins__"} == names
    if find_spec("hflayers"):
        exec("from hflayers import *", scope := {})
        assert scope.keys() - {"__builtins__", "auxiliary", "transformer"} == names  # which others may have imported


CALLS = [
    {"input_bias": False, "update_steps_max": 2, "scaling": torch.tensor([0.5, 2.0])},
    {"hidden_size": 8, "pattern_size": 3, "add_zero_association": True, "output_size": 5},
    {"normalize_hopfield_space": True, "normalize_hopfield_space_affine": True, "hidden_size": 4},
    {"pattern_projection_as_connected": True, "stored_pattern_size": 10, "pattern_projection_size": 10},
    {"num_heads": 1, "state_pattern_as_static": True, "dropout": 0.4, "disable_out_projection": True},
    {"num_heads": 1, "scaling": 0.7, **WITHOUT_PARAMETERS},
]


def passed(core):
    """What a core of hflayers passes to ``hopfield_core_forward`` of its settings and parameters."""
    names = inspect.signature(functional.hopfield_core_forward).parameters
    given = {name: getattr(core, name) for name in names if hasattr(core, name)}
    given |= {f"out_proj_{name}": getattr(core.out_proj, name, None) for name in ("weight", "bias")}
    given |= {"dropout_p": core.dropout, "use_separate_proj_weight": core.q_proj_weight is not None}
    return given | {"embed_dim_to_check": 12}


@pytest.mark.parametrize("arguments", CALLS)
def test_hopfield_core_forward_computes_what_the_core_does(arguments):
    layer = OWN["Hopfield"](**{"input_size": 12, "num_heads": 2} | NO_NORM | arguments)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    core = layer.association_core
    query, key = torch.randn(5, 3, 12, requires_grad=True), torch.randn(7, 3, arguments.get("stored_pattern_size", 12))
    ignored = torch.rand(3, 7) < 0.3
    own = passed(core) | {"key_padding_mask": ignored, "attn_mask": torch.rand(5, 7), "return_raw_associations": True}
    call = {name: value for name, value in own.items() if name in inspect.signature(core.forward).parameters}
    torch.manual_seed(1)
    expected = core(query, key, key, **call, return_pattern_projections=True)
    torch.manual_seed(1)
    got = functional.hopfield_core_forward(query, key, key, **own, return_projected_patterns=True)
    torch.testing.assert_close(tuple(got), tuple(expected))
    inputs = [query, *core.parameters()]
    gradients = [torch.autograd.grad(each.output.square().sum(), inputs) for each in (expected, got)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("arguments", CALLS)
def test_the_layers_of_hflayers_may_call_our_hopfield_core_forward(original, arguments):
    layer = original.Hopfield(**{"input_size": 12, "num_heads": 2} | NO_NORM | arguments)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    stored = torch.randn(3, 7, arguments.get("stored_pattern_size", 12))
    patterns = stored, torch.randn(3, 5, 12), stored
    results = []
    for function in (import_module("hflayers.functional").hopfield_core_forward, functional.hopfield_core_forward):
        torch.manual_seed(1)
        with patch("hflayers.activation.hopfield_core_forward", function):
            results.append(layer._associate(patterns, True, True, torch.eye(3, 7) > 0))
    torch.testing.assert_close(*map(tuple, results), atol=1e-4, rtol=1e-4)


def test_hopfield_core_forward_refuses_what_it_does_not_compute():
    layer, x = OWN["Hopfield"](8, num_heads=2), torch.randn(3, 1, 8)
    own = passed(layer.association_core) | {"embed_dim_to_check": 8}
    assert functional.hopfield_core_forward(x, x, x, **own).output.shape == (3, 1, 8)
    static = {"key_as_static": True, "value_as_static": True, "use_separate_proj_weight": True}
    for message, more in (
        ("static_k and static_v must be None", {"static_v": x}),
        (r"query must be \(L, N, 4\), got \(3, 1, 8\)", {"embed_dim_to_check": 4}),
        ("static keys and values need one head here", static),
    ):
        refuses(message, functional.hopfield_core_forward, x, x, x, **own | more)


def test_signatures_are_those_of_hflayers(original):
    from hflayers.activation import HopfieldCore
    from hflayers.functional import hopfield_core_forward
    from hflayers.transformer import HopfieldDecoderLayer, HopfieldEncoderLayer

    core = hopfield.core.AssociationCore
    pairs = [(core, HopfieldCore), (core.forward, HopfieldCore.forward)]
    pairs += [(functional.hopfield_core_forward, hopfield_core_forward)]
    pairs += [(transformer.HopfieldEncoderLayer, HopfieldEncoderLayer)]
    pairs += [(transformer.HopfieldDecoderLayer, HopfieldDecoderLayer)]
    pairs += [(ours, getattr(original, name)) for name, ours in OWN.items()]
    for ours, theirs in pairs:
        names = [[(p.name, p.default) for p in inspect.signature(each).parameters.values()] for each in (ours, theirs)]
        assert names[0] == names[1]


def test_data_sets_draw_the_data_of_hflayers(original):
    from hflayers.auxiliary import data as theirs

    from ahop_layers.hflayers.auxiliary import data as ours

    for name, arguments in (
        ("BitPatternSet", {"num_bags": 40, "num_instances": 9, "num_signals": 5, "num_bits": 4}),
        ("BitPatternSet", {"num_bags": 7, "num_instances": 6, "num_signals": 3, "num_signals_per_bag": 4}),
        ("LatchSequenceSet", {"num_samples": 30, "num_characters": 5}),
    ):
        sets = [getattr(module, name)(**arguments) for module in (ours, theirs)]
        assert len(sets[0]) == len(sets[1])
        for pair in zip(*sets, strict=True):
            assert all(torch.equal(pair[0][key], pair[1][key]) for key in ("data", "target"))
        assert torch.equal(sets[0].targets, sets[1].targets)
    assert torch.equal(ours.BitPatternSet(9, 4, 2).signals, theirs.BitPatternSet(9, 4, 2).signals)


def test_bit_patterns_contain_signals_in_one_class_only():
    sizes = {"num_bags": 20, "num_instances": 6, "num_signals": 3, "num_bits": 5}
    bags = BitPatternSet(**sizes, num_signals_per_bag=2)
    found = (bags.bags.unsqueeze(2) == bags.signals).all(-1).any(-1).sum(1)
    assert torch.equal(found, 2 * bags.targets)
    assert (bags.num_targets_high, bags.num_targets_low) == (10, 10)
    assert bags.bags.any(-1).all()
    for arguments, message in (
        ({"num_signals": 31}, r"num_signals must be less than 2\*\*num_bits - 1 = 31, got 31"),
        ({"num_signals_per_bag": 7}, "between 0 and 6, got 7"),
        ({"fraction_targets": 1.0}, "fraction_targets must be between 0 and 1, got 1.0"),
        ({"num_bags": 0}, "num_bags must be an integer of at least 1, got 0"),
    ):
        refuses(message, BitPatternSet, **sizes | arguments)


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("module", ["ahop_layers.hopfield", "hflayers"])
def test_a_plain_layer_can_be_adapted_and_loads_the_state_dict_of_an_adaptive_one(module, name):
    kind = getattr(pytest.importorskip(module, reason="hopfield-layers is not installed: make test-hflayers"), name)
    plain, adaptive = kind(12, num_heads=3, hidden_size=4), ADAPTIVE[name](12, num_heads=3, hidden_size=4)
    x = torch.randn(3, 5, 12)
    before = plain.eval()(x)
    ah.adapt_(torch.nn.Sequential(changed := deepcopy(plain)))
    assert type(changed) is type(adaptive)
    torch.testing.assert_close(changed(x), before, atol=1e-6, rtol=1e-5)
    plain.load_state_dict(ah.hflayers_state_dict(adaptive), strict=True)
    torch.testing.assert_close(plain(x), adaptive.eval()(x), atol=1e-6, rtol=1e-5)
    models = [torch.nn.Sequential(torch.nn.Linear(12, 12), layer) for layer in (adaptive, plain)]
    assert set(ah.hflayers_state_dict(models[0])) == set(models[1].state_dict())


def test_state_dict_for_hflayers_needs_the_dot_product():
    layer = torch.nn.Sequential(AdaptiveHopfield(8, num_heads=2))
    with torch.no_grad():
        layer[0].association_core.similarity.w[1, 1, 3] += 1e-3
    refuses(r"0\.association_core\.similarity must be the dot product", ah.hflayers_state_dict, layer)
    sparse = AdaptiveHopfield(8, separation="sparsemax")
    refuses("separation must be softmax for hflayers, got 'sparsemax'", ah.hflayers_state_dict, sparse)
    learned = AdaptiveHopfield(8, scaling=torch.nn.Parameter(torch.ones(())))
    refuses("scaling must be fixed", ah.hflayers_state_dict, learned)


@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, True),
    ({"blocks": 2}, True),
    ({"bases": ("dot",), "debias": True}, True),
    ({"blocks": ah.Blocks(4, normalize=True)}, False),
    ({"init": "uniform"}, False),
])  # fmt: skip
def test_is_dot_product_agrees_with_the_scores(arguments, expected):
    similarity = ah.AdaptiveSimilarity(8, 2, **arguments)
    query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    assert is_dot_product(similarity) is expected
    assert torch.allclose(similarity(query, key), query @ key.mT, atol=1e-5) is expected
    for name in dict(similarity.named_parameters()):
        changed = deepcopy(similarity)
        with torch.no_grad():
            changed.get_parameter(name).add_(0.1)
        equal = torch.allclose(changed(query, key), query @ key.mT, atol=1e-5)
        assert is_dot_product(changed) is equal, name


@pytest.mark.parametrize("name", ADAPTIVE)
def test_revert_makes_layers_plain_that_were_built_adaptive(name):
    layer, x = ADAPTIVE[name](12, num_heads=2), torch.randn(3, 5, 12)
    model, before = torch.nn.Sequential(torch.nn.Identity(), layer), layer(x)
    assert ah.revert_(model) == ["1"]
    assert type(layer) is OWN[name]
    assert not ah.similarity_parameters(model)
    torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)
    OWN[name](12, num_heads=2).load_state_dict(layer.state_dict(), strict=True)
    assert list(ah.adapt_(model).adapted) == ["1"]
    torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)


def test_revert_keeps_the_class_of_a_subclass():
    class Mine(AdaptiveHopfield):
        pass

    layer, x = Mine(8), torch.randn(2, 3, 8)
    with torch.no_grad():
        layer.association_core.similarity.w.normal_()
    refuses("similarity of the model must still be the dot product", ah.revert_, layer)
    assert ah.revert_(layer, discard=True) == [""]
    plain = OWN["Hopfield"](8)
    plain.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.fixture
def static_layer(monkeypatch):
    monkeypatch.setattr("ahop_layers.hopfield.adaptive.CALLS_WITHOUT_UPDATE", 10)
    return AdaptiveHopfield(8, scaling=3.0, **WITHOUT_PARAMETERS)


def contrast(layer, parameters, steps):
    """Trains with a layer of static patterns, as in CLOOB."""
    x = torch.randn(1, 6, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x, *parameters], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        layer((x, x, x)).square().sum().backward()
        optimizer.step()


def test_a_static_layer_outside_of_the_optimizer_warns_once(static_layer):
    with pytest.warns(UserWarning, match="received gradients, but was not updated for 10 calls") as seen:
        contrast(static_layer, [], 25)
    assert len(seen) == 1


def test_no_warning_for_an_optimized_frozen_or_rarely_updated_layer(static_layer, recwarn):
    contrast(static_layer, static_layer.parameters(), 12)
    contrast(deepcopy(static_layer).requires_grad_(False), [], 12)
    for _ in range(3):
        contrast(static_layer, [], 6)
        with torch.no_grad():
            for parameter in static_layer.parameters():
                parameter.add_(0.0)
    contrast(static_layer.eval(), [], 12)
    assert not recwarn


def norm_gradients(layer, patterns):
    norms = [layer.norm_state_pattern, layer.norm_stored_pattern, layer.norm_pattern_projection]
    output = layer(patterns).square().sum()
    return torch.autograd.grad(output, [norm.weight for norm in norms])


def test_each_norm_receives_its_own_gradient(original):
    """hflayers projects equal patterns together: one norm receives the gradients of all, and the others none."""
    torch.manual_seed(0)
    ours, theirs = OWN["Hopfield"](8, num_heads=2), original.Hopfield(8, num_heads=2)
    for parameter in ours.association_core.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    theirs.load_state_dict(ours.state_dict())
    x, state = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    for patterns in (x, (x, state, x)):
        with patch("torch.equal", lambda *_: False):
            expected = norm_gradients(theirs, patterns)
        torch.testing.assert_close(norm_gradients(ours, patterns), expected, atol=1e-4, rtol=1e-4)
