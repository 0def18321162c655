"""AdaptiveAttention computes the same function as nn.MultiheadAttention until it is trained."""

import pytest
import torch
from torch import nn

import ahop_layers as ah
from tests.samples import Scaled, refuses

N, L, S, E, H = 3, 5, 7, 12, 3
OPTIONS = {
    "plain": {},
    "no-bias": {"bias": False},
    "sizes": {"kdim": 5, "vdim": 9},
    "more-keys": {"add_bias_kv": True, "add_zero_attn": True},
    "batch-first": {"batch_first": True, "add_zero_attn": True},
}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def pair(**options):
    """nn.MultiheadAttention and AdaptiveAttention with the same weights."""
    theirs = nn.MultiheadAttention(E, H, **options)
    ours = ah.AdaptiveAttention(E, H, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():  # a missing bias would not show at its initial value, zero
            parameter.normal_(std=0.4)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def inputs(length=L, stored=S, **options):
    sizes = (length, E), (stored, options.get("kdim") or E), (stored, options.get("vdim") or E)
    xs = [torch.randn(N, *size, requires_grad=True) for size in sizes]
    return xs if options.get("batch_first") else [x.detach().transpose(0, 1).requires_grad_() for x in xs]


def masks(kind):
    torch.manual_seed(1)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 4:] = True
    pairs = torch.rand(N * H, L, S) < 0.3
    pairs[..., 0] = False  # nn.MultiheadAttention returns NaN for a fully masked query
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "(L, S)": {"attn_mask": pairs[0]},
        "both": {"attn_mask": pairs, "key_padding_mask": padding},
        "both float": {"attn_mask": torch.randn(N * H, L, S), "key_padding_mask": torch.randn(N, S)},
    }[kind]


@pytest.mark.parametrize(
    ("option", "mask"),
    [*((option, "both float") for option in OPTIONS), *(("plain", m) for m in ("none", "padding", "(L, S)", "both"))],
)
def test_equals_multihead_attention_with_gradients(option, mask):
    """In float64 to rounding; in float32 the error is at most twice that of nn.MultiheadAttention."""
    modules, x, given = pair(**OPTIONS[option]), inputs(**OPTIONS[option]), masks(mask)

    def results(module, dtype):
        masked = {name: m.to(dtype) if m.is_floating_point() else m for name, m in given.items()}
        rows = [each.detach().to(dtype).requires_grad_() for each in x]
        output, weights = module.to(dtype)(*rows, **masked, average_attn_weights=False)
        gradients = torch.autograd.grad(output.square().sum(), [*rows, *old_parameters(module)])
        return [output, weights, *gradients]

    low, (exact, ours) = ([results(each, dtype) for each in modules] for dtype in (torch.float32, torch.float64))
    for got, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, expected)
    bound, error = (max((y - e).abs().max() for y, e in zip(each, exact, strict=True)) for each in low)
    assert error <= 2 * bound + 1e-6 * max(e.abs().max() for e in exact)


def old_parameters(module):
    return [p for name, p in module.named_parameters() if not name.startswith("similarity")]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need", [True, False])
def test_returned_weights(need, average):
    theirs, ours = pair()
    x, ignored = inputs(), torch.arange(S).expand(N, S) > 3
    for given, padding in ((x, ignored), ([each[:, 0] for each in x], ignored[0])):  # batched and unbatched
        options = {"need_weights": need, "average_attn_weights": average, "key_padding_mask": padding}
        torch.testing.assert_close(ours(*given, **options), theirs(*given, **options), **TOLERANCE)


def test_causal_with_and_without_its_mask():
    theirs, ours = pair()
    x, mask = torch.randn(L, N, E), nn.Transformer.generate_square_subsequent_mask(L)
    expected = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    for given in (mask, mask == -torch.inf, None):
        got = ours(x, x, x, attn_mask=given, is_causal=True, need_weights=False)[0]
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("training", [True, False])
def test_in_an_encoder_layer(training):
    """The encoder layer calls the adaptive attention in eval mode too, instead of taking its fast path."""
    layer = nn.TransformerEncoderLayer(E, H * 2, 24, dropout=0.0, batch_first=True).train(training)
    x, ignored = torch.randn(N, S, E), torch.arange(S).expand(N, S) > torch.tensor([6, 3, 5])[:, None]

    def output():  # the fast path has other values at padded positions
        return layer(x, src_key_padding_mask=ignored)[~ignored]

    with torch.no_grad():
        expected = output()
        attention = ah.AdaptiveAttention(E, H * 2, batch_first=True)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention.train(training)
        torch.testing.assert_close(output(), expected, rtol=1e-5, atol=1e-5)
        attention.similarity.beta.mul_(5.0)
        assert not torch.allclose(output(), expected, atol=1e-2)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    _, ours = pair(batch_first=True)
    samples = [torch.randn(size, E) for size in (4, 1, 6)]
    nested = torch.nested.nested_tensor(samples, layout=layout)
    with torch.no_grad():
        for is_causal in (False, True):
            output, _ = ours(nested, nested, nested, is_causal=is_causal)
            assert output.layout == layout
            for got, sample in zip(output.unbind(), samples, strict=True):
                expected = ours(sample, sample, sample, is_causal=is_causal)[0]
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        other, mask = torch.nested.nested_tensor(samples), torch.zeros(3, 6, dtype=torch.bool)
        refuses(r"nested tensors need .* got batch_first=True and 2 tensors", ours, nested, other, nested)
        refuses("key_padding_mask must be None for nested tensors", ours, nested, nested, nested, mask)


def test_reset_parameters_initializes_the_projections():
    ours = ah.AdaptiveAttention(E, H)
    before = ours.in_proj_weight.clone()
    ours._reset_parameters()
    assert not torch.equal(ours.in_proj_weight, before)


def test_dropout_acts_in_training_only():
    ours = ah.AdaptiveAttention(E, H, dropout=0.9)
    x = inputs()
    assert not torch.equal(ours(*x)[0], ours(*x)[0])
    ours.eval()
    assert torch.equal(ours(*x)[0], ours(*x)[0])


def test_autocast_errs_like_multihead_attention():
    theirs, ours = pair()
    x = inputs()
    exact = theirs(*x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        low, got = theirs(*x)[0], ours(*x)[0]
    error, bound = ((y - exact).abs().max() for y in (got, low))
    assert error <= 2 * bound + 2**-8 * exact.abs().max()


@pytest.mark.parametrize("keywords", [{"separation": "sparsemax"}, {"debias": True, "blocks": 2}, {"bases": ("dot",)}])
def test_keywords_reach_similarity_and_separation(keywords):
    ours = ah.AdaptiveAttention(E, H, **keywords)
    assert ours.separation.name == keywords.get("separation", "softmax")
    assert ours.similarity.bases == keywords.get("bases", ("dis", "dot"))
    assert (ours.similarity.bias is not None) == keywords.get("debias", False)
    assert ours.similarity.w.shape == (H, len(ours.similarity.bases), keywords.get("blocks", E // H))
    output, _ = ours(*inputs())
    output.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in ours.similarity.parameters())


@pytest.mark.parametrize("similarity", [Scaled, Scaled(E // H, H)], ids=["factory", "module"])
def test_another_similarity_or_none(similarity):
    theirs, ours = nn.MultiheadAttention(E, H), ah.AdaptiveAttention(E, H, similarity=similarity)
    x = inputs()
    ours.load_state_dict(theirs.state_dict())  # a similarity without reset_parameters keeps its values
    torch.testing.assert_close(ours(*x), theirs(*x), **TOLERANCE)
    assert ah.similarity_parameters(ours) == [ours.similarity.scale]
    ours(*x)[0].square().sum().backward()
    assert ours.similarity.scale.grad.abs().sum() > 0
    ours.similarity = None  # the dot product
    torch.testing.assert_close(ours(*x), theirs(*x), **TOLERANCE)


@pytest.mark.slow
def test_compile_and_export():
    _, ours = pair(batch_first=True)
    x, options = torch.randn(N, S, E), {"key_padding_mask": torch.arange(S).expand(N, S) > 4}
    expected = ours(x, x, x, **options)[0]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(ours.eval(), (x, x, x), options).module()
    for each in (compiled, exported):
        torch.testing.assert_close(each(x, x, x, **options)[0], expected, **TOLERANCE)


def test_bad_inputs():
    ours, x = ah.AdaptiveAttention(E, H, batch_first=True), torch.randn(N, S, E)
    for inputs, masks, message in (
        ((None, x, x), {}, "query must be a tensor, got NoneType"),
        ((x, x, 5), {}, "value must be a tensor"),
        ((x, x[:, :3], x), {}, r"the shapes \(N, L, 12\), \(N, S, 12\), \(N, S, 12\) with the batch"),
        ((x, x, x), {"attn_mask": torch.zeros(S, S + 1)}, r"attn_mask must be \(L, S\) = \(7, 7\)"),
        ((x, x, x), {"key_padding_mask": torch.zeros(S, N)}, r"key_padding_mask must be \(N, S\) = \(3, 7\)"),
    ):
        refuses(message, ours, *inputs, **masks)


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("itself", [False, True])
def test_nan_in_a_key_that_padding_hides_does_not_count(itself, need):
    ours, results = ah.AdaptiveAttention(E, H, batch_first=True), []
    query, x, padding = torch.randn(N, L, E), torch.randn(N, S, E), torch.arange(S).expand(N, S) > 4
    for key in (x, x.masked_fill(padding.unsqueeze(-1), torch.nan)):
        output, _ = ours(key if itself else query, key, key, padding, need_weights=need)
        results.append([output[:, :5]])  # the others are queries with NaN if keys attend to keys
        results[-1] += [] if itself else torch.autograd.grad(output.cos().sum(), ours.parameters())
    torch.testing.assert_close(*results)
