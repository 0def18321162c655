"""The adaptive Hopfield layers: drop-in replacements of the plain ones."""

import copy
import inspect
import io
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hopfield import WITHOUT_PARAMETERS
from torch import nn

from ahop_layers import AdaptiveSimilarity, adapt_, hflayers_state_dict, hopfield, similarity_parameters
from ahop_layers.hopfield import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.similarity.options import SimilarityOptions
from tests.samples import Scaled, refuses

RECORD = torch.load(Path(__file__).parent / "data" / "hflayers.pt", weights_only=True)
OWN = {
    AdaptiveHopfield: hopfield.Hopfield,
    AdaptiveHopfieldLayer: hopfield.HopfieldLayer,
    AdaptiveHopfieldPooling: hopfield.HopfieldPooling,
}
ADAPTIVE = {adaptive.__name__.removeprefix("Adaptive"): adaptive for adaptive in OWN}
SEPARATIONS = ("softmax", "sparsemax", "entmax15", "entmax", "argmax")
SMALL = [
    pytest.param(AdaptiveHopfield, {"num_heads": 2}, id="hopfield"),
    pytest.param(AdaptiveHopfield, {"num_heads": 2, "update_steps_max": 2, "separation": "entmax"}, id="steps"),
    pytest.param(AdaptiveHopfieldLayer, {"quantity": 5, "debias": True}, id="layer"),
    pytest.param(AdaptiveHopfieldPooling, {"quantity": 2, "separation": "sparsemax"}, id="pooling"),
]


def trained(layer: nn.Module) -> nn.Module:
    """Moves every parameter away from its initial value."""
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("name", RECORD)
def test_recorded_case_and_gradients(name):
    case = RECORD[name]
    adaptive = ADAPTIVE[case["cls"]](**case["kwargs"]).eval()
    ours = OWN[type(adaptive)](**case["kwargs"]).eval()
    cotangent, grads = torch.randn_like(case["output"]), []
    for layer in (adaptive, ours):
        shapes = [(key, value.shape) for key, value in layer.state_dict().items() if "similarity" not in key]
        assert shapes == [(key, value.shape) for key, value in case["state_dict"].items()]
        layer.load_state_dict(case["state_dict"], strict=True)
        flags = {key: p.requires_grad for key, p in layer.named_parameters() if "similarity" not in key}
        assert flags == case["requires_grad"]
        for method, expected in (
            (layer, case["output"]),
            (layer.get_association_matrix, case["association"]),
            (layer.get_projected_pattern_matrix, case["projected"]),
        ):
            torch.testing.assert_close(method(case["inputs"], **case["call"]), expected, atol=1e-5, rtol=1e-5)
        single = isinstance(case["inputs"], torch.Tensor)
        inputs = [x.clone().requires_grad_() for x in ([case["inputs"]] if single else case["inputs"])]
        layer(inputs[0] if single else inputs, **case["call"]).backward(cotangent)
        found = dict(layer.named_parameters())
        grads.append([x.grad for x in inputs] + [found[key].grad for key in case["state_dict"]])
    for adaptive_grad, own_grad in zip(*grads, strict=True):
        torch.testing.assert_close(adaptive_grad, own_grad, atol=1e-4, rtol=1e-4)
    assert all(p.grad is not None for p in similarity_parameters(adaptive))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_arguments_are_those_of_the_base_class_then_keywords(name):
    adaptive, base = ADAPTIVE[name], getattr(hopfield, name)
    assert issubclass(adaptive, base)
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (adaptive, base))
    plain = [(p.name, p.default, p.kind) for p in ours if p.kind != p.KEYWORD_ONLY]
    assert plain == [(p.name, p.default, p.kind) for p in theirs]
    keywords = {p.name: p.default for p in ours if p.kind == p.KEYWORD_ONLY}
    built = {"bases": None, "init": None, "debias": False, "separation": "softmax", "similarity": None}
    assert keywords == {**built, "blocks": "auto", "device": None, "dtype": None}


def test_subclasses_and_errors_show_the_right_signature():
    class Mine(AdaptiveHopfieldPooling):
        def __init__(self, width: int) -> None:
            super().__init__(width, quantity=3, separation="sparsemax")

    assert list(inspect.signature(Mine).parameters) == ["width"]
    assert Mine(8)(torch.randn(2, 4, 8)).shape == (2, 24)
    with pytest.raises(TypeError, match="unexpected keyword argument 'head'"):
        AdaptiveHopfieldPooling(8, head=2)


@pytest.mark.parametrize("adaptive", OWN)
def test_similarity_is_a_module_or_a_factory(adaptive):
    x, module = torch.randn(3, 5, 8), Scaled(4, 2)
    nn.init.constant_(module.scale, 50.0)
    sizes = {"num_heads": 2} if adaptive is AdaptiveHopfield else {"num_heads": 2, "quantity": 3}
    given = adaptive(8, similarity=module, **sizes)
    core = getattr(given, "hopfield", given).association_core
    assert core.similarity is module
    assert similarity_parameters(given) == [module.scale]
    made = adaptive(8, similarity=Scaled, **sizes)
    made.load_state_dict(given.state_dict(), strict=True)
    torch.testing.assert_close(made(x), given(x))
    given(x).square().sum().backward()
    assert module.scale.grad.abs().sum() > 0
    given.reset_parameters()
    used, core.similarity = given.get_association_matrix(x), None
    assert not torch.allclose(given.get_association_matrix(x), used, atol=1e-4)


@pytest.mark.parametrize("adaptive", OWN)
def test_device_and_dtype(adaptive):
    scaling = torch.tensor(0.7)
    layer = adaptive(8, device="cpu", dtype=torch.float64, separation="entmax", debias=True, scaling=scaling)
    assert {tensor.dtype for tensor in (*layer.parameters(), *layer.buffers())} == {torch.float64}
    assert layer(torch.randn(2, 3, 8, dtype=torch.float64)).dtype == torch.float64
    assert all(parameter.is_meta for parameter in adaptive(8, device="meta").parameters())
    with pytest.raises(TypeError, match="positional argument"):
        adaptive(*[None] * 40)


def test_a_new_similarity_has_the_mode_dtype_and_width_of_its_layer():
    layer = AdaptiveHopfield(8, num_heads=2, dtype=torch.float64).eval()
    layer.make_adaptive(SimilarityOptions(bases=("dot",), separation="entmax"))
    core = layer.association_core
    assert core.similarity.dim == 4
    assert core.similarity.w.dtype == core.separation.alpha_logit.dtype == torch.float64
    assert not core.similarity.training
    assert not core.separation.training
    assert AdaptiveHopfield(8, num_heads=2, **WITHOUT_PARAMETERS).association_core.similarity.dim == 8


@pytest.mark.parametrize("adaptive", OWN)
def test_errors_name_an_argument_of_the_wrong_type(adaptive):
    for keywords, message in (
        ({"dropout": "a"}, "dropout must be .*between 0 and 1, got 'a'"),
        ({"scaling": "a"}, "scaling must be a number or a tensor, got 'a'"),
        ({"update_steps_max": 1.5}, "update_steps_max must be an integer, .*got 1.5"),
        ({"update_steps_max": torch.ones(1)}, "update_steps_max must be an integer, .*got tensor"),
        ({"update_steps_eps": None}, "update_steps_eps must be a number or a tensor, got None"),
        ({"association_activation": "nope"}, "association_activation must name a function of torch, got 'nope'"),
        ({"separation": 5}, "separation must be one of .*got 5"),
        ({"init": 5}, "init must be .*got int"),
    ):
        refuses(message, adaptive, 8, **keywords)
    refuses(r"got input_size=None|input_size must be", adaptive, None)
    layer = adaptive(8)
    for bad, message in ((None, "NoneType"), (5, "int"), ("ab", "(str|2)")):
        refuses(f"input must be a tensor.* got {message}", layer, bad)
        refuses(f"input must be a tensor.* got {message}", layer.get_association_matrix, bad)
    for name in ("stored_pattern_padding_mask", "association_mask"):
        refuses(f"{name} must be a tensor or None, got list", layer, torch.randn(2, 3, 8), **{name: [[True]]})


@pytest.mark.parametrize("name", ADAPTIVE)
def test_instances_of_hflayers_classes(name):
    hflayers = pytest.importorskip("hflayers", reason="hopfield-layers is not installed: make test-hflayers")
    layer = ADAPTIVE[name](8)
    assert isinstance(layer, getattr(hflayers, name))
    assert isinstance(getattr(layer, "hopfield", layer), hflayers.Hopfield)


@pytest.mark.parametrize("name", ["HopfieldPooling", "HopfieldLayer"])
def test_static_patterns_of_heads_are_compared_with_learned_ones(name):
    projected = {"pattern_projection_as_static": False} if name == "HopfieldPooling" else {}
    options = {**WITHOUT_PARAMETERS, "disable_out_projection": False, **projected}
    plain, adaptive = (getattr(hopfield, each)(12, num_heads=3, **options) for each in (name, f"Adaptive{name}"))
    adaptive.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 4)
    inputs = (x, torch.randn(2, 5, 12)) if name == "HopfieldPooling" else x
    expected = plain(inputs)
    torch.testing.assert_close(adaptive(inputs), expected)
    adapt_(plain)
    torch.testing.assert_close(plain(inputs), expected)


def test_a_state_dict_of_other_layers_does_not_reset_a_similarity():
    def model(layer_class):
        return nn.ModuleDict({"encoder": nn.Linear(8, 16), "hopfield": layer_class(16, **WITHOUT_PARAMETERS)})

    adaptive, plain = model(AdaptiveHopfield), model(hopfield.Hopfield)
    weight = nn.init.constant_(adaptive["hopfield"].association_core.similarity.w, 0.5)
    adaptive.load_state_dict({"encoder.weight": torch.zeros(16, 8)}, strict=False)
    adaptive.load_state_dict(dict(plain.state_dict()))  # a copy without the metadata of PyTorch
    assert (weight == 0.5).all()
    adaptive.load_state_dict(plain.state_dict())
    assert not (weight == 0.5).all()


def test_parameters_of_a_model_whose_names_begin_alike_are_kept_for_hflayers():
    layer = AdaptiveHopfield(8)
    layer.association_core.similarity_scale = nn.Parameter(torch.ones(()))
    assert "association_core.similarity_scale" in hflayers_state_dict(layer)


def test_a_plain_checkpoint_resets_a_trained_similarity():
    plain = trained(hopfield.HopfieldPooling(8, num_heads=2))
    adaptive = trained(AdaptiveHopfieldPooling(8, num_heads=2, debias=True, separation="entmax"))
    adaptive.load_state_dict(plain.state_dict(), strict=True)
    fresh = AdaptiveHopfieldPooling(8, num_heads=2, debias=True, separation="entmax")
    for got, expected in zip(similarity_parameters(adaptive), similarity_parameters(fresh), strict=True):
        torch.testing.assert_close(got, expected)
    assert (adaptive.hopfield.association_core.separation.alpha_logit == 0).all()
    adaptive = trained(adaptive)
    for name in ("similarity.w", "similarity.beta", "separation.alpha_logit"):  # an adaptive checkpoint is complete
        state = trained(copy.deepcopy(adaptive)).state_dict()
        del state[f"hopfield.association_core.{name}"]
        before = {key: value.clone() for key, value in adaptive.state_dict().items()}
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            adaptive.load_state_dict(state)
        assert all(torch.equal(value, before[key]) for key, value in adaptive.state_dict().items())
        kept = adaptive.state_dict()[f"hopfield.association_core.{name}"].clone()
        assert adaptive.load_state_dict(state, strict=False).missing_keys == [f"hopfield.association_core.{name}"]
        assert torch.equal(adaptive.state_dict()[f"hopfield.association_core.{name}"], kept)


@pytest.mark.parametrize(("layer_class", "keywords"), SMALL)
def test_round_trips(layer_class, keywords):
    layer, x = trained(layer_class(8, **keywords)).eval(), torch.randn(3, 5, 8)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = layer_class(8, **keywords).eval()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for copied in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))


@pytest.mark.parametrize("separation", SEPARATIONS)
def test_update_steps_work_with_every_separation(separation, monkeypatch):
    monkeypatch.setattr("ahop_layers.association.MAX_SEARCH_STEPS", 20)
    steps = {"update_steps_max": torch.tensor([3, -1]), "update_steps_eps": 1e-2}
    layer = trained(AdaptiveHopfield(8, num_heads=2, separation=separation, debias=True, **steps))
    x = torch.randn(3, 5, 8, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


def test_scaling_can_be_a_trained_parameter():
    x = torch.randn(3, 5, 8)
    for start in (torch.tensor(0.7), torch.full((2, 1, 1), 0.7)):
        layer = AdaptiveHopfield(8, num_heads=2, scaling=nn.Parameter(start))
        assert "association_core.scaling" in layer.state_dict()
        plain = hopfield.Hopfield(8, num_heads=2, scaling=0.7)
        layer.load_state_dict(plain.state_dict(), strict=True)
        torch.testing.assert_close(layer(x), plain(x))
        layer(x).square().sum().backward()
        assert (layer.scaling.grad != 0).all()


def test_scaling_multiplies_the_score_of_any_base():
    x, layer = torch.randn(2, 4, 8), AdaptiveHopfield(8, scaling=0.0, init="uniform")
    torch.testing.assert_close(layer.get_association_matrix(x), torch.full((2, 1, 4, 4), 0.25))


def test_without_sizes_the_first_input_determines_them():
    layer, x = AdaptiveHopfield(**WITHOUT_PARAMETERS, debias=True), torch.randn(2, 4, 6)
    copy.deepcopy(layer).load_state_dict(layer.state_dict())
    layer(x)
    similarity = layer.association_core.similarity
    assert type(similarity) is AdaptiveSimilarity
    assert (similarity.w.shape, similarity.bias.shape) == ((1, 2, 6), (1, 6))
    fresh = AdaptiveHopfield(**WITHOUT_PARAMETERS, debias=True)
    fresh.load_state_dict(trained(layer).state_dict())
    torch.testing.assert_close(fresh(x), layer(x))
    assert AdaptiveHopfield(**WITHOUT_PARAMETERS, init=torch.ones(1, 2, 6)).association_core.similarity.dim == 6


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    layer=st.sampled_from([AdaptiveHopfield, AdaptiveHopfieldPooling]),
    separation=st.sampled_from(SEPARATIONS),
    steps=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**31),
)
def test_masked_equals_shorter(layer, separation, steps, seed):
    torch.manual_seed(seed)
    layer = trained(layer(8, num_heads=2, separation=separation, update_steps_max=steps, update_steps_eps=0.0)).eval()
    stored = torch.randn(2, 6, 8)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[:, 4:] = True
    state = () if isinstance(layer, AdaptiveHopfieldPooling) else (torch.randn(2, 3, 8),)
    longer = layer((stored, *state, stored), stored_pattern_padding_mask=mask)
    shorter = layer((stored[:, :4], *state, stored[:, :4]))
    torch.testing.assert_close(longer, shorter, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer_class", "keywords"),
    [
        pytest.param(*each.values, id=each.id, marks=[pytest.mark.full] * (each.id != "layer"))
        for each in (*SMALL, pytest.param(hopfield.Hopfield, {"num_heads": 2, "update_steps_max": 2}, id="plain"))
    ],
)
def test_one_graph_and_export(layer_class, keywords):
    if torch.__version__ < (2, 7) and keywords.get("separation") == "entmax":
        pytest.skip("torch 2.6 visits every path through a graph with gradients, and entmax has too many")
    layer, x = trained(layer_class(8, **keywords)).eval(), torch.randn(3, 5, 8)
    masks = {}
    if layer_class is AdaptiveHopfieldPooling:
        masks = {"stored_pattern_padding_mask": torch.arange(3)[:, None].expand(3, 5) == 0}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **masks), layer(x, **masks))
    compiled(x, **masks).sum().backward()
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)).module()
    other = torch.randn(7, 5, 8)
    torch.testing.assert_close(exported(other), layer(other))


@pytest.mark.parametrize(("layer_class", "keywords"), SMALL)
def test_autocast_and_half_precision(layer_class, keywords):
    layer, x = trained(layer_class(8, **keywords)), torch.randn(3, 5, 8)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    output.sum().backward()
    if "steps" not in str(keywords):  # rounding may lead update steps to another pattern
        torch.testing.assert_close(output.float(), expected, atol=0.1, rtol=0.1)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_ddp_finds_no_unused_parameter(tmp_path):
    def train():
        layers = AdaptiveHopfieldLayer(8, quantity=3, debias=True), AdaptiveHopfieldPooling(8, num_heads=2)
        model = nn.Sequential(*layers)
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # the second forward raises if the first left a parameter without gradient
            parallel(torch.randn(3, 5, 8)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        train()  # a wrapped model that outlives its group can wait forever for the thread of gloo
    finally:
        torch.distributed.destroy_process_group()


HIDING = {
    "pooling": (hopfield.HopfieldPooling, {}),
    "pooling with steps": (hopfield.HopfieldPooling, {"update_steps_max": 2, "batch_first": False}),
    "adaptive pooling": (AdaptiveHopfieldPooling, {"num_heads": 2, "blocks": 2}),
    "adaptive pooling with sparsemax": (AdaptiveHopfieldPooling, {"separation": "sparsemax"}),
    "hopfield": (hopfield.Hopfield, {}),
    "adaptive hopfield": (AdaptiveHopfield, {"num_heads": 2}),
}


@pytest.mark.parametrize("added", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("name", HIDING)
def test_nan_in_a_hidden_instance_does_not_count(name, added):
    """In the readout, and in the gradients of everything; a state pattern with NaN has its own readout."""
    make, options = HIDING[name]
    layer = trained(make(8, **options))
    x, ignored = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[3], [4], [5]])
    bag, state = x.masked_fill(ignored.unsqueeze(-1), torch.nan), x[:, :2]
    if not layer.batch_first:
        bag, x = bag.transpose(0, 1), x.transpose(0, 1)
    mask, results = torch.zeros(3, 5).masked_fill(ignored, -torch.inf) if added else ignored, []
    for data in (x, bag):
        data = data.clone().requires_grad_()
        output = layer(data if "pooling" in name else (data, state, data), mask)
        leaves = [data, *(each for each in layer.parameters() if each.requires_grad)]
        results.append((output, *torch.autograd.grad(output.cos().sum(), leaves, allow_unused=True)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
