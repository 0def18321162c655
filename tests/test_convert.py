"""adapt_ keeps outputs and gradients of real models of every supported library, and revert_ undoes it."""

import copy
import gc
import inspect
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from frameworks import framework
from test_hopfield import WITHOUT_PARAMETERS
from torch import nn

import ahop_layers as ah
from ahop_layers import hopfield
from ahop_layers.attention import Adaptive
from ahop_layers.convert import class_swap
from ahop_layers.convert.registry import CONVERTERS, full_name
from tests.models.check import Case, check
from tests.samples import Scaled, perturb, refuses, unchanged

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}


def images():
    return (torch.randn(2, 3, 32, 32),)


def needs(library, function, *names):
    """Skips a test whose arguments an older release of the library does not support."""
    missing = set(names) - inspect.signature(function).parameters.keys()
    if missing:
        pytest.skip(f"{library.__name__} {library.__version__} does not support {', '.join(sorted(missing))} yet")


def timm_vit(**options):
    timm = framework("timm")
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    needs(timm, timm.models.VisionTransformer, *options)
    return timm.models.VisionTransformer(**{**small, **options})


def torchvision_vit():
    model = framework("torchvision").models.VisionTransformer(32, 8, 2, 3, 48, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # initialized to zero, which would hide differences
    return model


def transformers_vision(model, config, **options):
    def make():
        transformers = framework("transformers")
        settings = getattr(transformers, config)(**SIZES, image_size=32, patch_size=8, **options)
        return getattr(transformers, model)(settings)

    return make


def padded():
    ignored = torch.arange(6).expand(3, 6) > torch.tensor([5, 2, 4])[:, None]
    return {"src": torch.randn(3, 6, 16), "src_key_padding_mask": ignored}


def causal():
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    target = torch.randn(3, 5, 16)
    return {"src": torch.randn(3, 6, 16), "tgt": target, "tgt_mask": mask, "tgt_is_causal": True}


class Bags(nn.Module):
    """A typical model with hflayers: lookup, self-association, pooling."""

    def __init__(self):
        super().__init__()
        self.lookup = hopfield.HopfieldLayer(input_size=16, quantity=9, num_heads=2)
        self.relate = hopfield.Hopfield(input_size=16, num_heads=4, scaling=0.3, update_steps_max=1)
        self.pool = hopfield.HopfieldPooling(input_size=16, hidden_size=6, num_heads=2, quantity=2)
        with torch.no_grad():
            # If the norms of stored and state patterns have equal values, hflayers adds both gradients to one of them.
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)

    def forward(self, x, mask=None):
        return self.pool(self.relate(self.lookup(x)), stored_pattern_padding_mask=mask)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 3)


# name: (model, input, number of attention modules)
MODELS = {
    "timm": (timm_vit, images, 2),
    "timm-norms": (lambda: timm_vit(qk_norm=True, scale_attn_norm=True, qkv_bias=False), images, 2),
    "torchvision": (torchvision_vit, images, 2),
    "transformers-vit": (transformers_vision("ViTModel", "ViTConfig"), images, 2),
    "transformers-deit": (transformers_vision("DeiTModel", "DeiTConfig"), images, 2),
    "transformers-dinov2": (transformers_vision("Dinov2Model", "Dinov2Config"), images, 2),
    "transformers-clip": (transformers_vision("CLIPVisionModel", "CLIPVisionConfig"), images, 2),
    "encoder": (encoder, padded, 3),
    "transformer": (lambda: nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True), causal, 6),
    "hopfield": (Bags, lambda: {"x": torch.randn(3, 6, 16), "mask": padded()["src_key_padding_mask"]}, 3),
}


def call(model, given):
    output = model(**given) if isinstance(given, dict) else model(*given)
    return output if isinstance(output, torch.Tensor) else output[0]


def loss(output):
    """A fixed linear function: the sum of squares is nearly constant after a layer norm."""
    return (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()


def close(got, expected):
    """Compares with an absolute tolerance of 1e-5 times the largest value."""
    return (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def layout(model):
    """Classes and names of attributes of all modules."""
    return {name: (type(each), set(vars(each)), set(each._modules)) for name, each in model.named_modules()}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_copies_and_state_dicts_are_kept_and_revert_restores(name):
    make, make_input, count = MODELS[name]
    result = check(Case("", name, lambda: (make(), make_input())), compile=False)
    assert (result["coverage"], result["adapted"]) == ("fully", count)
    assert float(result["change"]) <= 1e-5


ONE_OF_EACH_CONVERTER = ("timm", "torchvision", "transformers-vit", "transformers-clip", "transformer", "hopfield")


@pytest.mark.parametrize("name", ONE_OF_EACH_CONVERTER)
def test_gradients_are_kept_and_a_dry_run_or_revert_leaves_no_trace(name):
    make, make_input, count = MODELS[name]
    model, given = make(), make_input()
    modules, parameters, before = dict(model.named_modules()), dict(model.named_parameters()), layout(model)
    expected = call(model, given)
    gradients = torch.autograd.grad(loss(expected), list(model.parameters()), allow_unused=True)

    planned = ah.adapt_(model, dry_run=True)
    assert layout(model) == before
    report = ah.adapt_(model)
    assert len(report.adapted) == count
    assert (planned.adapted, planned.passed_over) == (report.adapted, report.passed_over) == (report.adapted, {})
    output = call(model, given)
    assert close(output, expected)
    similarities = [part for part in model.modules() if isinstance(part, ah.AdaptiveSimilarity)]
    new = [parameter for part in similarities for parameter in (part.beta, part.w)]
    old = [parameter for name, parameter in model.named_parameters() if name in parameters]
    largest = max(g.abs().max() for g in gradients if g is not None)
    got = torch.autograd.grad(loss(output), [*old, *new], allow_unused=True)
    for one, other in zip(got, gradients, strict=False):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= 1e-5 * largest
    assert all((part.beta[..., 0] == 0).all() for part in similarities)  # beta_dis
    assert all(gradient.any() for gradient in got[len(old) :])

    assert ah.revert_(model) == list(report.adapted)
    assert dict(model.named_modules()) == modules
    assert layout(model) == before
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test_masks_of_timm():
    timm = framework("timm")
    attention = timm.models.vision_transformer.Attention
    needs(timm, attention.forward, "attn_mask", "is_causal")
    layer, x, allowed = attention(16, num_heads=2).eval(), torch.randn(2, 5, 16), torch.rand(2, 1, 5, 5) < 0.6
    allowed[..., 0] = True
    cases = [{"attn_mask": allowed}, {"attn_mask": torch.randn(5, 5)}, {"is_causal": True}]
    expected = [layer(x, **case) for case in cases]
    ah.adapt_(layer)
    for case, value in zip(cases, expected, strict=True):
        torch.testing.assert_close(layer(x, **case), value, rtol=1e-5, atol=1e-6)


def test_masks_of_transformers_text():
    transformers = framework("transformers")
    sizes = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES, **sizes)).eval()
    plain = {"input_ids": torch.randint(3, 20, (2, 7))}
    given = [plain, {**plain, "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}]
    with torch.no_grad():
        expected = [call(model, each) for each in given]
        ah.adapt_(model)
        assert all(close(call(model, each), value) for each, value in zip(given, expected, strict=True))


class EarlierSelfAttention(nn.Module):
    """The attributes and signature of ViTSelfAttention in transformers 4."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.dropout_prob = 3, 4, 0.0
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.config = SimpleNamespace(_attn_implementation="eager", output_attentions=False)

    def forward(self, hidden_states, head_mask=None, output_attentions=False):
        parts = (self.query, self.key, self.value)
        q, k, v = (part(hidden_states).unflatten(-1, (3, 4)).transpose(1, 2) for part in parts)
        weights = (q @ k.mT / 2).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


def test_class_names_of_earlier_transformers(monkeypatch):
    converter = CONVERTERS["transformers.models.dinov2.modeling_dinov2.Dinov2SelfAttention"]
    monkeypatch.setitem(CONVERTERS, full_name(EarlierSelfAttention), converter)
    layer, x = EarlierSelfAttention(), torch.randn(2, 5, 12)
    expected = layer(x)
    assert ah.adapt_(layer).adapted == {"": "EarlierSelfAttention"}
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    refuses("head_mask must be None", layer, x, torch.ones(3))


def test_where_and_last():
    names = ["layers.0.self_attn", "layers.1.self_attn", "layers.2.self_attn"]
    for where, expected in (
        (lambda name, module: name.startswith("layers.1"), names[1:2]),
        ("layers.[02].*", [names[0], names[2]]),
        (["layers.0.*", "*.2.self_attn"], [names[0], names[2]]),
    ):
        model = encoder()
        report = ah.adapt_(model, where=where)
        assert list(report.adapted) == expected
        assert set(report.passed_over.values()) == {"not chosen by where"}
        assert [isinstance(layer.self_attn, Adaptive) for layer in model.layers] == [n in expected for n in names]
    assert list(ah.adapt_(encoder(), last=2).adapted) == names[1:]
    last = ["decoder.layers.1.self_attn", "decoder.layers.1.multihead_attn"]
    assert list(ah.adapt_(nn.Transformer(16, 4, 2, 2, 32), last=1).adapted) == last
    both = nn.Sequential(encoder(), Bags())
    assert list(ah.adapt_(both, last=1).adapted) == ["1.lookup", "1.relate", "1.pool"]


def test_arguments_are_checked_for_every_layer_before_one_is_converted(monkeypatch):
    model = nn.ModuleDict({"first": encoder(), "second": nn.MultiheadAttention(18, 3), "bags": Bags()})
    before, state = layout(model), copy.deepcopy(model.state_dict())
    monkeypatch.setattr(class_swap, "OriginalClass", lambda *_: pytest.fail("a module was converted"))
    for options, message in (
        ({"blocks": 4}, "second: blocks must divide d = 6: expected one of 1, 2, 3, 6, got 4"),
        ({"blocks": torch.arange(4)}, "second: blocks must name the block of each of the 6 dimensions, got 4"),
        ({"init": torch.ones(4, 2, 4)}, r"second: init must have the shape of w, \(3, 2, 6\), got \(4, 2, 4\)"),
        ({"bases": ("dot", "l2")}, r"first\.layers\.0\.self_attn: bases must be .* got \('dot', 'l2'\)"),
        ({"separation": "hard"}, r"first\.layers\.0\.self_attn: .* got 'hard'"),
        ({"similarity": Scaled, "blocks": 2}, r"first\.layers\.0\.self_attn: similarity replaces .* and blocks"),
        ({"where": 5}, "where must be a function of name and module, or one or several name patterns, got 5"),
        ({"where": ["layers.0.*", 5]}, r"where must be .* got \['layers.0.\*', 5\]"),
        ({"last": 0}, "last must be .* got 0"),
        ({"last": "2"}, "last must be .* got '2'"),
    ):
        refuses(message, ah.adapt_, model, dry_run="bases" in options, **options)
    assert layout(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.pop("second")
    with pytest.raises(ah.AHopError, match=r"bags\.pool: blocks must divide d = 6: expected one of 1, 2, 3, 6, got 4"):
        ah.adapt_(model, blocks=4, dry_run=True)


def test_the_report_counts_only_what_is_known_and_new():
    report = ah.adapt_(hopfield.Hopfield(**WITHOUT_PARAMETERS))
    assert report.new_parameters == 2  # the betas: the first call determines the dimension
    built = ah.adapt_(nn.Sequential(ah.AdaptiveAttention(8, 2), nn.MultiheadAttention(8, 2)))
    assert built.passed_over == {"0": "it is adaptive already"}
    assert built.new_parameters == 2 * (2 * 4 + 2)
    shared = nn.MultiheadAttention(8, 2)
    report = ah.adapt_(nn.ModuleList([shared, shared]))
    assert (list(report.adapted), report.new_parameters) == (["0"], 2 * (2 * 4 + 2))


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def encoder_with_norm():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, nn.LayerNorm(16))


@pytest.mark.parametrize("duplicate", [lambda model: model, lambda model: pickle.loads(pickle.dumps(model))])
def test_reverting_a_part_unfreezes_it(duplicate):
    model = encoder_with_norm()
    model.layers[0].norm1.weight.requires_grad_(False)
    model._frozen = ["an attribute of the user"]
    before = trainable(model)
    report = ah.adapt_(model, freeze_rest=True, separation="entmax")  # its alpha is frozen with the rest
    left = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in left} == {id(p) for p in ah.similarity_parameters(model)}
    assert sum(p.numel() for p in left) == report.new_parameters == 2 * 4 * (2 * 4 + 2)
    model = duplicate(model)
    assert ah.revert_(model.layers[0]) == ["self_attn"]
    assert trainable(model.layers[0]) == {name.removeprefix("layers.0.") for name in before if "layers.0" in name}
    assert trainable(model.layers[1]) == {"self_attn.similarity.w", "self_attn.similarity.beta"}
    assert not trainable(model.norm)
    assert ah.revert_(model.layers[1]) == ["self_attn"]
    assert ah.revert_(model) == []  # what is outside of both parts
    assert trainable(model) == before
    assert model._frozen == ["an attribute of the user"]


def test_a_class_that_changed_after_adapt_is_not_reverted():
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    ah.adapt_(model)
    nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
    before = model(x, x, x)[0]
    refuses("the classes that adapt_ set, got ParametrizedAdaptiveAttention for '': undo", ah.revert_, model)
    torch.testing.assert_close(model(x, x, x)[0], before)
    nn.utils.parametrize.remove_parametrizations(model, "in_proj_weight")
    ah.revert_(model)
    torch.testing.assert_close(model(x, x, x)[0], before)


def test_a_trained_similarity_is_reverted_only_if_told_so():
    model, x = encoder(), torch.randn(2, 5, 16)
    expected = model(x)
    ah.adapt_(model)
    perturb(model.layers[1])
    trained, report = model(x), r"similarity of layers\.1\.self_attn must still be the dot product"
    with unchanged(model):
        refuses(report, ah.revert_, model)
        refuses(report, ah.revert_, nn.ModuleDict({"layers": model.layers}))
    assert torch.equal(model(x), trained)
    assert len(ah.revert_(model, discard=True)) == len(model.layers)
    assert torch.equal(model(x), expected)


def test_frozen_parameters_may_be_removed_before_revert():
    model = encoder_with_norm()
    ah.adapt_(model, freeze_rest=True)
    model.norm = nn.Identity()
    ah.revert_(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_checkpoint_initializes_the_similarities_of_a_model_on_meta():
    checkpoint = encoder().state_dict()
    with torch.device("meta"):
        model = encoder()
    ah.adapt_(model)
    model.load_state_dict(checkpoint, assign=True)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    plain, x = encoder().eval(), torch.randn(2, 5, 16)
    plain.load_state_dict(checkpoint)
    torch.testing.assert_close(model.eval()(x), plain(x), rtol=1e-5, atol=1e-5)


def test_training_modes_and_dtypes_are_kept():
    model = encoder().eval().bfloat16()
    ah.adapt_(model)
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    attention = nn.MultiheadAttention(16, 4)
    attention.out_proj.eval()
    ah.adapt_(attention)
    assert [part.training for part in (attention, attention.similarity, attention.out_proj)] == [True, True, False]


def test_an_adaptive_module_may_have_no_similarity(monkeypatch):
    class Mine(nn.Module):
        pass

    class AdaptiveMine(Adaptive):
        def make_adaptive(self, options):
            self.similarity = None

    monkeypatch.setitem(CONVERTERS, full_name(Mine), None)  # removed after the test
    ah.register_converter(Mine, AdaptiveMine)
    model = Mine()
    assert ah.adapt_(model).new_parameters == 0
    assert ah.revert_(model) == [""]


def adapted_twice():
    model = encoder()
    ah.adapt_(model, last=1)
    ah.adapt_(model)


NO_ATTENTION, BUILT = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(ah.AdaptiveAttention(8, 2))
REFUSED = [
    (lambda: ah.adapt_(None), "model must be a module, got NoneType"),
    (lambda: ah.revert_(None), "model must be a module, got NoneType"),
    (lambda: ah.association_maps(None), "model must be a module, got NoneType"),
    (lambda: ah.register_converter(5, Adaptive), "source must be a class or the full name of one, got 5"),
    (lambda: ah.register_converter(nn.Linear, "A"), r"adaptive must be a subclass of ahop_layers\.Adaptive, got 'A'"),
    (lambda: ah.revert_(encoder()), "model must be adapted, got TransformerEncoder without adapted modules"),
    (adapted_twice, r"must not be adapted yet, got one with layers\.2\.self_attn adapted"),
    (lambda: ah.adapt_(NO_ATTENTION), "expected a model with attention to adapt, got Sequential with none"),
    (lambda: ah.adapt_(encoder(), where="nowhere.*"), r"layers\.0\.self_attn passed over: not chosen by where"),
    (lambda: ah.adapt_(BUILT), "0 passed over: it is adaptive already"),
    (lambda: ah.association_maps(encoder(), torch.randn(2, 5, 16)), "calls adaptive layers, got TransformerEncoder"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_adapted_or_reverted_is_refused(call, message):
    refuses(message, call)


def test_an_override_is_never_shadowed():
    class Matrix(hopfield.Hopfield):
        def get_association_matrix(self, input, **keywords):
            return "mine"

    class Extended(hopfield.Hopfield):  # adds a method, and overrides none
        def double(self, input):
            return 2 * self(input)

    class Special(nn.MultiheadAttention):
        def forward(self, *args, **keywords):
            return super().forward(*args, **keywords)

    class Reset(nn.MultiheadAttention):
        def _reset_parameters(self):
            super()._reset_parameters()
            nn.init.ones_(self.out_proj.weight)

    inner, patched = hopfield.HopfieldPooling(input_size=16), hopfield.Hopfield(input_size=16)
    inner.hopfield.__class__ = Matrix
    patched.association_core.forward = lambda *args, **keywords: None
    replaced = nn.MultiheadAttention(16, 2)
    replaced.forward = lambda *args: None
    parts = {"matrix": Matrix(input_size=16), "extended": Extended(input_size=16), "reset": Reset(16, 2)}
    others = {"inner": inner, "patched": patched, "special": Special(16, 2), "replaced": replaced}
    model = nn.ModuleDict({**parts, **others})
    report = ah.adapt_(model)
    assert list(report.adapted) == ["extended", "reset"]
    assert "Matrix overrides get_association_matrix; see" in report.passed_over["matrix"]
    assert "Matrix overrides get_association_matrix; see" in report.passed_over["inner"]
    assert all("overrides forward; see" in report.passed_over[name] for name in ("patched", "special", "replaced"))
    assert model["matrix"].get_association_matrix(None) == "mine"
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model["extended"].double(x), 2 * model["extended"](x))


SHAPES = {encoder: {f"layers.{number}.self_attn": (4, 4) for number in range(3)},
          Bags: {"lookup": (8, 2), "relate": (4, 4), "pool": (6, 2)}}  # fmt: skip


@pytest.mark.parametrize("make", SHAPES)
def test_a_similarity_factory_is_called_for_each_layer(make):
    model, shapes, x = make().eval(), SHAPES[make], torch.randn(2, 5, 16)
    expected = model(x)
    ah.adapt_(model, similarity=lambda dim, num_heads: pytest.fail("called"), dry_run=True)
    report = ah.adapt_(model, similarity=Scaled, freeze_rest=True)
    built = [part.shape for part in model.modules() if isinstance(part, Scaled)]
    assert dict(zip(report.adapted, built, strict=True)) == shapes
    assert report.new_parameters == sum(heads for _, heads in shapes.values())
    found = ah.similarity_parameters(model)
    assert {id(p) for p in found} == {id(p) for p in model.parameters() if p.requires_grad}
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    loss(model(x)).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in found)
    ah.revert_(model, discard=True)
    assert torch.equal(model(x), expected)


def test_a_similarity_module_is_copied_for_each_layer_and_init_may_have_a_gradient():
    model, given = encoder(), Scaled(4, 4)
    nn.init.constant_(given.scale, 3.0)
    ah.adapt_(model, similarity=given)
    scales = [layer.self_attn.similarity.scale for layer in model.layers]
    assert len({id(scale) for scale in [given.scale, *scales]}) == 4
    assert all((scale == 3).all() for scale in scales)
    ah.revert_(model, discard=True)
    trained = ah.AdaptiveSimilarity(4, 4)
    ah.adapt_(model, init=2 * trained.w)
    assert all(torch.equal(layer.self_attn.similarity.w, 2 * trained.w) for layer in model.layers)


def test_a_class_that_was_adapted_can_be_freed():
    def adapt():
        class Mine(nn.MultiheadAttention):
            pass

        model, twin = Mine(8, 2), Mine(8, 2)
        for each in (model, twin):
            ah.adapt_(each)
        assert type(model) is type(twin) is type(copy.deepcopy(model))
        return weakref.ref(Mine), weakref.ref(type(model))

    references = adapt()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_the_separation_of_a_hopfield_layer_stays():
    model = hopfield.HopfieldPooling(8, num_heads=2)
    model.hopfield.association_core.separation = ah.separation.Separation("sparsemax")
    x = torch.randn(2, 5, 8)
    expected = model(x)
    ah.adapt_(model)
    assert isinstance(model, ah.AdaptiveHopfieldPooling)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.pool_packed(x.flatten(0, 1), [5, 5]), expected, rtol=1e-5, atol=1e-6)
