"""Modules that attend in their own ``forward`` are adapted through an example call, whatever their class."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ahop_layers as ah
from ahop_layers import association
from ahop_layers.attention.call import similarity_attention
from ahop_layers.convert.find import CHANNELS, OPAQUE, OTHER_SCORES
from ahop_layers.separation import Separation
from ahop_layers.similarity.associator import SimilarityList, named_similarities
from tests.samples import Scaled, perturb, refuses

pytestmark = pytest.mark.slow

SDPA = functional.scaled_dot_product_attention


def split(x, parts, heads):
    """``(N, L, parts * heads * d)`` as ``parts`` tensors ``(N, heads, L, d)``."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def merge(x):
    return x.transpose(1, 2).flatten(2)


class Relate(nn.Module):
    """Calls scaled_dot_product_attention; neither the name of the class nor that of a part says attention."""

    def __init__(self, dim=16, num_heads=2, **options):
        super().__init__()
        self.num_heads, self.options = num_heads, options
        self.into, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(merge(self.attend(*split(self.into(x), 3, self.num_heads))))

    def attend(self, q, k, v):
        return SDPA(q, k, v, **self.options)


class ByHand(Relate):
    """Computes scores by hand, as subclasses of it do in other ways."""

    def attend(self, q, k, v):
        return self.weigh(self.score(q * q.shape[-1] ** -0.5, k)) @ v

    def score(self, q, k):
        return q @ k.transpose(-2, -1)

    def weigh(self, scores):
        return scores.softmax(-1)


def by_hand(name, **methods):
    return type(name, (ByHand,), methods)


def added_score(self, q, k):
    """One product over batch and heads, with a bias, as BLOOM does."""
    bias = torch.linspace(-1, 1, k.shape[-2]).expand(q.shape[0] * q.shape[1], q.shape[-2], -1)
    scores = bias.baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, beta=0.5, alpha=2.0)
    return scores.unflatten(0, q.shape[:2])


def sink_weights(self, scores):
    """A further score takes a part of the weights."""
    return functional.softmax(torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1), dim=-1)[..., :-1]


def position_weights(self, scores):
    """Mixes the weights with those of positions, whose scores are no products."""
    return 0.7 * scores.softmax(-1) + 0.3 * torch.linspace(-1, 1, scores.shape[-1]).expand(scores.shape).softmax(-1)


def window_attend(self, q, k, v):
    """The axis before the tokens is that of windows, not of heads."""
    return ByHand.attend(self, *(x.unflatten(2, (-1, 3)) for x in (q, k, v))).flatten(2, 3)


Einsum = by_hand("Einsum", score=lambda _, q, k: torch.einsum("b h i d, b h j d -> b i j h", q, k).permute(0, 3, 1, 2))
Added = by_hand("Added", score=added_score)
Sink = by_hand("Sink", weigh=sink_weights)
Positions = by_hand("Positions", weigh=position_weights)
Windows = by_hand("Windows", attend=window_attend)
Channels = by_hand("Channels", attend=lambda self, q, k, v: ByHand.attend(self, q.mT, k.mT, v.mT).mT)
Gate = by_hand("Gate", score=lambda _, q, k: q[..., : k.shape[-2]])  # not a product


class Mixed(ByHand):
    """Mixes heads before and after the softmax, after a soft cap and a position bias of its own product."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.softmax = nn.Linear(2, 2), nn.Linear(2, 2), nn.Softmax(-1)
        self.position, self.drop = nn.Parameter(torch.randn(5, 8)), nn.Dropout(0.1)

    def score(self, q, k):
        near = torch.einsum("bhid,jd->bhij", q, self.position)
        return (q @ k.mT + near[..., :1]).tanh() * 3

    def weigh(self, scores):
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.drop(self.after(self.softmax(scores).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def check_kept(model, x, **options):
    """Adapts a model, and checks outputs and gradients; returns the report."""
    parameters = list(model.parameters())
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    report = ah.adapt_(model, example=x, **options)
    output = model(x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(output.square().sum(), parameters, allow_unused=True, retain_graph=True)
    for one, other in zip(got, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    new = torch.autograd.grad(output.square().sum(), ah.similarity_parameters(model))
    assert all(gradient.abs().sum() > 0 for gradient in new)
    perturb(model)
    assert (model(x) - expected).abs().max() > 1e-3
    return report


@pytest.mark.parametrize(("query", "key", "mask", "options"), [
    ((2, 4, 3, 8), (2, 4, 5, 8), None, {"is_causal": True, "scale": 0.7}),
    ((2, 4, 3, 8), (2, 4, 5, 8), torch.tensor([True, False, True, True, False]).expand(2, 1, 3, 5), {}),
    ((2, 4, 3, 8), (2, 2, 5, 8), None, {"enable_gqa": True, "is_causal": True}),
    ((2, 4, 3, 8), (1, 4, 5, 8), None, {}),
    ((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), torch.randn(3, 1, 3, 5, dtype=torch.double), {}),
    ((2, 3, 8), (2, 5, 8), torch.randn(2, 3, 5, dtype=torch.double), {}),
    ((2, 3, 8), (2, 5, 8), torch.randn(1, 5, dtype=torch.double), {"scale": 2.0}),
    ((3, 8), (5, 8), torch.randn(3, 5, dtype=torch.double), {}),
])  # fmt: skip
def test_the_function_equals_that_of_pytorch(query, key, mask, options):
    q, k, v = (torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in (query, key, key))
    similarity = ah.AdaptiveSimilarity(8, query[-3] if len(query) > 3 else None, dtype=torch.double)
    expected = SDPA(q, k, v, mask, **options)
    output = similarity_attention(similarity, Separation(), q, k, v, mask, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (output, expected)))


def test_dropout_is_that_of_the_call():
    q = torch.randn(2, 4, 6, 8)
    similarity, separation = ah.AdaptiveSimilarity(8, 4).eval(), Separation().eval()
    assert not similarity_attention(similarity, separation, q, q, q, dropout_p=1.0).any()
    some = similarity_attention(similarity, separation, q, q, torch.ones_like(q), dropout_p=0.5)
    assert some.unique().numel() > 6  # without dropout, all are 1


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(4, 2, 8), torch.randn(3, 2, 8)]).transpose(1, 2)
    parts = ah.AdaptiveSimilarity(8, 2), Separation()
    refuses("must not be nested", similarity_attention, *parts, nested, nested, nested)


@pytest.mark.parametrize("blocks", [None, 4])
def test_outputs_and_gradients_are_kept(blocks):
    model, x = nn.Sequential(Relate(is_causal=blocks == 4), nn.ReLU(), Relate()), torch.randn(3, 5, 16)
    report = check_kept(model, x, blocks=blocks)
    assert report.adapted == {"0": "Relate", "2": "Relate"}
    assert set(report.how.values()) == {"scaled_dot_product_attention"}
    assert "0  adapted Relate (scaled_dot_product_attention)" in str(report)


@pytest.mark.parametrize(
    ("kind", "heads"), [(Einsum, 2), (Added, None), (Mixed, 2), (Sink, 2), (Positions, 2), (Windows, None)]
)
def test_attention_by_hand(kind, heads):
    model, x = nn.Sequential(kind().eval()), torch.randn(3, 6 if kind is Windows else 5, 16)
    refuses(r"0 passed over: it computes scores by hand.*pass by_hand=True", ah.adapt_, model, example=x)
    report = check_kept(model, x, by_hand=True)
    assert report.how == {"0": "by hand"}
    assert [part.num_heads for part in named_similarities(model).values()] == [heads]


class Router(nn.Module):
    """A softmax without values."""

    def forward(self, x):
        return x * (x @ x.mT).softmax(-1).sum(-1, keepdim=True)


class Opaque(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Outer(Relate):
    """Attends, and contains another module that attends if it is called or known."""

    def __init__(self, inner, called=True):
        super().__init__()
        self.inner, self.called = inner, called

    def forward(self, x):
        return self.inner(super().forward(x)) if self.called else super().forward(x)


class Two(nn.Module):
    """Attends twice, with heads of different sizes."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.skip = 2, False
        self.into = nn.Linear(16, 16)

    def forward(self, x):
        q = self.into(x).unflatten(-1, (2, 8)).transpose(1, 2)
        first = merge(SDPA(q, q, q))
        if self.skip:
            return first
        half = q[..., :4]
        return first + merge(torch.cat([SDPA(half, half, half)] * 2, -1))


class Changing(Two):
    def forward(self, x):
        self.skip = not self.skip
        return super().forward(x)


class Twice(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(self.part(x))


def with_attribute(name):
    module = Relate()
    setattr(module, name, nn.Identity())
    return module


def with_own_forward():
    module = Relate()
    forward = module.forward
    module.forward = lambda x: forward(x)
    return module


@pytest.mark.parametrize(("make", "name", "reason"), [
    (Channels, "0", CHANNELS),
    (Gate, "0", OTHER_SCORES),
    (Router, None, None),
    (lambda: Opaque(16, 2), "0", OPAQUE),
    (lambda: with_attribute("similarity"), "0", "it has an attribute similarity of its own"),
    (lambda: with_attribute("associate"), "0", "it has an attribute associate of its own"),
    (with_own_forward, "0", "its forward is replaced on the instance"),
    (lambda: Outer(Relate()), "0", "it attends, and so does its submodule inner"),
    (lambda: Outer(nn.MultiheadAttention(16, 2), False), "0", "it attends, and so does its submodule inner"),
    (lambda: Twice(Changing()), "0.part", "it attends differently in several calls of the example"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_passed_over_with_a_reason(make, name, reason):
    model = nn.Sequential(make(), ByHand())
    report = ah.adapt_(model, example=torch.randn(2, 5, 16), by_hand=True)
    assert report.passed_over == ({} if name is None else {name: reason})
    inner = ["0.inner"] if isinstance(model[0], Outer) else []
    assert list(report.adapted) == [*inner, "1"]
    total = len(report.adapted) + len(report.passed_over)
    assert str(report).startswith(f"adapted {len(report.adapted)} of {total} attention modules")


def test_bad_arguments_of_attention_by_hand():
    options = {"example": torch.randn(2, 5, 16), "by_hand": True, "separation": "sparsemax"}
    refuses("0: separation must be None .* by hand, got 'sparsemax'", ah.adapt_, nn.Sequential(ByHand()), **options)
    refuses("by_hand=True needs example", ah.adapt_, ByHand(), by_hand=True)


def test_an_example_may_be_given_in_several_forms():
    x = torch.randn(2, 5, 16)
    for example in (x, (x,), [x], {"x": x}, lambda model: model(x)):
        assert ah.adapt_(Relate(), example=example).adapted == {"": "Relate"}


def test_all_that_looks_like_attention_is_listed():
    class XCA(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model = nn.ModuleDict({"known": nn.MultiheadAttention(16, 2), "other": Relate(), "hand": XCA()})
    report = ah.adapt_(model, dry_run=True)
    assert str(report).splitlines()[0] == "would adapt 1 of 2 attention modules"
    assert list(report.passed_over) == ["hand"]
    assert report.passed_over["hand"].endswith("XCA; pass example=, or see register_converter")
    report = ah.adapt_(model, example=lambda model: model["other"](torch.randn(2, 5, 16)))
    assert list(report.adapted) == ["known", "other"]
    assert report.passed_over == {"hand": "the example does not call it"}


def test_a_subclass_of_a_known_class_with_its_own_forward_is_adapted():
    class Special(nn.MultiheadAttention):
        def forward(self, x):
            q, k, v = split(functional.linear(x, self.in_proj_weight), 3, self.num_heads)
            return self.out_proj(merge(SDPA(q, k, v)))

    model = Special(16, 2)
    assert check_kept(model, torch.randn(3, 5, 16)).how == {"": "scaled_dot_product_attention"}


def test_the_example_changes_nothing():
    model = nn.Sequential(Relate(), nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Dropout(0.5))
    model[0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    state = torch.get_rng_state()
    report = ah.adapt_(model, example=lambda m: (m(torch.randn(2, 5, 16)), torch.rand(3)), dry_run=True)
    assert list(report.adapted) == ["0"]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ah.adapt_(model, example=lambda model: model(torch.randn(2, 5, 3)))
    assert type(model[0]) is Relate
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class PerWindow(Relate):
    """Calls once for each window."""

    def attend(self, q, k, v):
        parts = zip(*(x.split(3, 2) for x in (q, k, v)), strict=True)
        return torch.cat([SDPA(*part) for part in parts], 2)


def test_calls_with_the_same_heads_share_a_similarity():
    model, x = PerWindow(), torch.randn(2, 6, 16)
    check_kept(model, x)
    assert isinstance(model.similarity, ah.AdaptiveSimilarity)
    plain = copy.deepcopy(model)
    ah.revert_(plain, discard=True)
    longer = torch.randn(2, 9, 16)
    assert model(longer).shape == plain(longer).shape  # more windows need no other similarity


def test_calls_with_different_heads_have_a_similarity_each():
    model, x = nn.Sequential(Two()), torch.randn(2, 6, 16)
    original = copy.deepcopy(model.state_dict())
    expected = model(x)
    report = check_kept(model, x)
    assert report.new_parameters == 2 * (2 * 8 + 2) + 2 * (2 * 4 + 2)
    assert isinstance(model[0].similarity, SimilarityList)
    assert list(named_similarities(model)) == ["0.similarity.0", "0.similarity.1"]
    assert len(ah.similarity_parameters(model)) == 4
    model.load_state_dict(original)  # resets the similarities
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_a_given_similarity_is_copied_for_each_shape():
    model, x = Two(), torch.randn(2, 6, 16)
    expected = model(x)
    ah.adapt_(model, example=x, similarity=Scaled(8, 2))
    assert len(ah.similarity_parameters(model)) == 2
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


class Switched(ByHand):
    """Attends in other ways than its example, on demand."""

    joined = switched = more = False

    def forward(self, x):
        return super().forward(x @ torch.eye(16).expand(len(x), -1, -1) if self.more else x)

    def attend(self, q, k, v):
        output = SDPA(q, k, v) if self.switched else super().attend(q, k, v)
        return output + SDPA(q, k, v) if self.joined else output


@pytest.mark.parametrize(("kind", "name", "first", "message"), [
    (Two, "skip", False, "got a forward pass without scaled_dot_product_attention with 2 heads of 4"),
    (Two, "skip", True, r"AdaptiveTwo was adapted for .* got scaled_dot_product_attention of"),
    (Switched, "joined", False, "got scaled_dot_product_attention of a query"),
    (Switched, "switched", False, "got scaled_dot_product_attention of a query"),
    (Switched, "more", False, "in the product 0"),
    (Switched, "more", True, r"without the product 1|in the product 1"),
])  # fmt: skip
def test_a_call_that_attends_differently_raises(kind, name, first, message):
    model, x = kind(), torch.randn(2, 6, 16)
    setattr(model, name, first)
    ah.adapt_(model, example=x, by_hand=True)
    model(x)
    setattr(model, name, not first)
    refuses(message, model, x)


def test_copies_pickles_state_dicts_and_revert():
    model, x = nn.Sequential(Relate(), ByHand(), Two()), torch.randn(2, 5, 16)
    expected, state, names = model(x), copy.deepcopy(model.state_dict()), [list(vars(part)) for part in model.modules()]
    ah.adapt_(model, example=x, by_hand=True)
    perturb(model)
    output = model(x)
    other = nn.Sequential(Relate(), ByHand(), Two())
    ah.adapt_(other, example=x, by_hand=True)
    other.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(twin(x), output)
        ah.revert_(twin, discard=True)
        assert torch.equal(twin(x), expected)
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert ah.revert_(model) == ["0", "1", "2"]
    assert [type(part) for part in model] == [Relate, ByHand, Two]
    assert [list(vars(part)) for part in model.modules()] == names
    assert torch.equal(model(x), expected)


@pytest.mark.full
def test_compile_and_export():
    model, x = nn.Sequential(Relate(is_causal=True), Two(), Einsum(), Added(), Mixed()).eval(), torch.randn(2, 5, 16)
    ah.adapt_(model, example=x, by_hand=True, blocks=2)
    perturb(model)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)
    compiled.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in ah.similarity_parameters(model))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-5, atol=1e-6)


def test_two_threads_with_an_adapted_and_a_plain_model():
    plain, x = Relate(), torch.randn(2, 5, 16)
    adapted = copy.deepcopy(plain)
    ah.adapt_(adapted, example=x)
    perturb(adapted)
    expected, changed = (model(x).detach() for model in (plain, adapted))
    assert (expected - changed).abs().max() > 1e-3
    start = threading.Barrier(2)

    def run(model, right):
        start.wait()
        return all(torch.equal(model(x), right) for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, (plain, adapted), (expected, changed)))


def test_a_fused_operator_serves_the_call(monkeypatch):
    """Scores of much memory are not kept: one operator computes them, the mask and the readout."""
    calls, original = [], association.attend

    def counted(*args, **options):
        calls.append(args[6])
        return original(*args, **options)

    monkeypatch.setattr(association, "attend", counted)
    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", 0)
    model, x = Relate(is_causal=True), torch.randn(2, 5, 16)
    expected = model(x)
    ah.adapt_(model, example=x, blocks=4)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert calls == [True]  # causal


def test_maps_are_those_of_the_separation_and_attention_by_hand_has_none():
    model, x = nn.Sequential(Relate(), ByHand()), 9 * torch.randn(2, 5, 16)
    ah.adapt_(model[0], example=x, separation="sparsemax")
    ah.adapt_(model[1], example=x, by_hand=True)
    (weights,) = ah.association_maps(model, x).values()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    assert (weights == 0).any()
    refuses(r"called none with a separation: attention by hand keeps its own", ah.association_maps, model[1], x)


def test_half_precision_and_autocast():
    model, x = nn.Sequential(Relate(), ByHand()).eval(), torch.randn(2, 5, 16)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
        ah.adapt_(model, example=x, by_hand=True)
        got = model(x)
    error, bound = ((y - exact).abs().max() for y in (got, low))
    assert error <= 2 * bound + 2**-8 * exact.abs().max()
    ah.revert_(model)
    model.bfloat16()
    ah.adapt_(model, example=x.bfloat16(), by_hand=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(x.bfloat16()).dtype == torch.bfloat16


class Checkpointed(Relate):
    """Applies a checkpoint inside its own forward."""

    reentrant = False

    def attend(self, q, k, v):
        return checkpoint(super().attend, q, k, v, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_a_module_is_refused(reentrant):
    model, x = Checkpointed(), torch.randn(2, 5, 16)
    model.reentrant = reentrant
    ah.adapt_(model, example=x)
    refuses("AdaptiveCheckpointed uses gradient checkpointing inside its forward", model, x)
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize(("kind", "reentrant"), [(Relate, False), (ByHand, True)])
def test_checkpointing_a_module_gives_the_same_gradients(kind, reentrant):
    model, x = kind(), torch.randn(2, 5, 16, requires_grad=True)
    ah.adapt_(model, example=x, by_hand=True)
    perturb(model)
    over = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), over)
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for one, other in zip(expected, over, strict=True):
        torch.testing.assert_close(other.grad, one)


@pytest.mark.full
def test_compiled_checkpointing_inside_a_module_is_refused():
    """The compiler traces the checkpointed function without the mode."""
    model, x = Checkpointed(), torch.randn(2, 5, 16)
    ah.adapt_(model, example=x)
    with pytest.raises(Exception, match=r"a forward pass without scaled_dot|not in the current scope"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
