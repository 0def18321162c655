"""Attention without weights in associate and the layers: the choice of ahop::attend, and what it leaves unchanged."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import ahop_layers as ah
from ahop_layers import association
from ahop_layers.association import Mask, Padded, associate
from ahop_layers.ops import cpu
from ahop_layers.ops.attend import attend, prefers_attend
from ahop_layers.ops.protocols import AttentionCall
from ahop_layers.ops.reference import BASES, Base
from ahop_layers.separation import Separation
from ahop_layers.similarity.protocol import dot_product
from tests.frameworks import framework
from tests.new_tensors import peak_memory

N, H, L, S, D, E = 2, 4, 7, 9, 8, 5


@pytest.fixture
def calls(monkeypatch):
    """Makes associate choose ahop::attend for small calls too, and returns the list of these calls."""
    calls = []

    def counted(*args, **options):
        result = attend(*args, **options)
        if result is not None:
            calls.append(args)
        return result

    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", -1)
    monkeypatch.setattr(association, "attend", counted)
    return calls


def inputs(dtype=torch.float64, key_heads=H):
    shapes = (N, H, L, D), (N, key_heads, S, D), (N, key_heads, S, E)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def trained(**keywords):
    """Returns a similarity with random weights."""
    similarity = ah.AdaptiveSimilarity(D, H, **keywords).double()
    for parameter in similarity.parameters():
        parameter.data += torch.randn_like(parameter) / 4
    return similarity


def both(call, parameters):
    """Returns outputs and gradients of ``call(need_weights)`` without and with weights."""
    results = []
    for need_weights in (False, True):
        output = call(need_weights)
        grad = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        results.append((output, *torch.autograd.grad(output, parameters, grad)))
    return results


SIMILARITIES = {
    "full": {},
    "debias": {"blocks": 2, "debias": True},
    "gathered": {"blocks": torch.tensor([0, 1, 0, 2, 1, 0, 2, 2])},
    "normalized": {"blocks": ah.Blocks(2, normalize=True)},
    "l1": {"bases": ("l1", "dot")},
}


def run(tensors, similarity, need_weights=False, mask=None, **keywords):
    """Calls associate with softmax; returns the output and the weights."""
    options = {"score": similarity, "separation": Separation(), **keywords}
    return associate(tensors[0], Padded(*tensors[1:], mask), need_weights=need_weights, **options)


@pytest.mark.parametrize(
    ("name", "scaling"), [*((name, 0.3) for name in SIMILARITIES), ("full", torch.rand(H, 1, 1, dtype=torch.float64))]
)
def test_associate_without_weights(name, scaling, calls):
    similarity, tensors = trained(**SIMILARITIES[name]), inputs()
    learned = [scaling.requires_grad_()] if isinstance(scaling, torch.Tensor) else []
    mask = Mask(torch.rand(N, 1, 1, S) < 0.3, torch.randn(L, S, dtype=torch.float64), causal=True)

    def call(need_weights):
        output, weights = run(tensors, similarity, need_weights, mask, scaling=scaling)
        assert (weights is None) is not need_weights
        return output

    found, expected = both(call, [*tensors, *learned, *similarity.parameters()])
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)


def test_associate_with_grouped_queries(calls):
    similarity, (query, key, value) = trained(), inputs(key_heads=2)
    found, expected = (run((query, key, value), similarity, need)[0] for need in (False, True))
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1
    repeated = (each.repeat_interleave(2, 1) for each in (key, value))
    torch.testing.assert_close(found, run((query, *repeated), similarity, True)[0])
    normalized = trained(blocks=ah.Blocks(2, normalize=True))
    torch.testing.assert_close(*(run((query, key, value), normalized, need)[0] for need in (False, True)))


class Unfused(Separation):
    pass


class Rescored(ah.AdaptiveSimilarity):
    def _score(self, *args):
        return 2 * super()._score(*args)


class Doubled(ah.AdaptiveSimilarity):
    def forward(self, query, key):
        return 2 * super().forward(query, key)


def hooked(module):
    module.register_forward_hook(lambda *args: None)
    return module


def replaced(module):
    module.forward = module.forward
    return module


OTHERS = {  # keywords of associate that separate operations compute
    "sparsemax": {"separation": Separation("sparsemax")},
    "update steps": {"steps": 1},
    "steps of heads": {"steps": [0, 1, 0, 0]},
    "until convergence": {"steps": None, "eps": 1e-2},
    "dot product": {"score": dot_product},
    "subclass": {"score": Doubled(D, H).double()},
    "subclass with another score": {"score": Rescored(D, H).double()},
    "integer mask": {"mask": Mask(added=torch.ones(1, H, L, S, dtype=torch.int64))},
    "mask of several samples": {"mask": Mask(torch.rand(3, 1, L, S) < 0.3), "samples": 1},
    "hook on the similarity": {"score": hooked(trained())},
    "replaced forward": {"score": replaced(trained())},
    "hook on the separation": {"separation": hooked(Separation())},
    "learned mask": {"mask": Mask(added=torch.zeros(1, H, L, S, dtype=torch.float64, requires_grad=True))},
}


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_kernel_computes_scores_and_softmax(name, steps, monkeypatch):
    similarity, (query, key, value), found = trained(**SIMILARITIES[name]), inputs(), []
    query = query.detach()[:1].requires_grad_()  # the same for all samples
    score = cpu.score
    monkeypatch.setattr(cpu, "score", lambda *args, **options: found.append(options) or score(*args, **options))

    def call(kernel):
        separation = Separation() if kernel else Unfused()
        return run((query, key, value), similarity, True, scaling=0.3, steps=steps, separation=separation)[0]

    torch.testing.assert_close(*both(call, [query, key, value, *similarity.parameters()]))
    assert found.count({"softmax": True}) == steps + 1


def test_softmax_of_scores_is_differentiable_once():
    similarity, (query, key, value) = trained(), inputs()
    loss = run((query, key, value), similarity, True)[0].square().sum()
    (expected,) = torch.autograd.grad(loss, query, retain_graph=True)
    (slope,) = torch.autograd.grad(loss, query, create_graph=True)
    torch.testing.assert_close(slope, expected)
    with pytest.raises(ah.AHopError, match="differentiable once"):
        slope.sum().backward()


@pytest.mark.parametrize("name", OTHERS)
def test_other_associations_are_separate_operations(name, calls):
    keywords = {"score": trained(), "separation": Separation(), "samples": N, "mask": None, **OTHERS[name]}
    query, key, value = (tensor[: keywords["samples"]] for tensor in inputs())
    padded = Padded(key, value, keywords.pop("mask"))
    del keywords["samples"]
    expected, _ = associate(query, padded, **keywords)
    output, weights = associate(query, padded, need_weights=False, **keywords)
    assert weights is None
    assert not calls
    assert torch.equal(output, expected)


def test_hooks_of_all_modules_see_every_call(calls):
    separation, seen = Separation(), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        run(inputs(), trained(), separation=separation)
    finally:
        handle.remove()
    assert separation in seen
    assert not calls


def test_a_registered_base_is_separate_operations(calls, monkeypatch):
    monkeypatch.setitem(BASES, "mean_for_this_test", Base(lambda query, key: (query + key) / 2))
    assert run(inputs(), trained(bases=("dot", "mean_for_this_test")))[0].isfinite().all()
    assert not calls


def test_small_calls_on_the_cpu_are_separate_operations(calls, monkeypatch):
    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", N * H * L * S * 8)
    similarity, (query, key, value) = trained(), inputs()
    run((query, key, value), similarity)
    assert not calls
    run((query, *(torch.cat([each, each[:, :, :1]], 2) for each in (key, value))), similarity)
    assert len(calls) == 1


def test_choice_on_a_gpu(monkeypatch):
    """Full footprints and calls of a fused kernel take ahop::attend; without kernels, only large scores do."""
    with FakeTensorMode():
        query, key, value = (torch.empty(N, H, rows, D, device="cuda") for rows in (L, S, S))
        full, blocks = (torch.empty(H, 2, n, device="cuda") for n in (D, 2))
    tensors = (query, key, value)
    monkeypatch.setattr("ahop_layers.ops.gpu.nvrtc.capability", lambda device: (7, 5))
    for fused in (False, True):
        monkeypatch.setattr("ahop_layers.ops.gpu.attend.serves", lambda *args, fused=fused: fused)
        assert prefers_attend(AttentionCall(*tensors, full, bases=("dis", "dot")))
        assert prefers_attend(AttentionCall(*tensors, blocks, bases=("dis", "dot"))) is fused
    monkeypatch.setattr("ahop_layers.ops.gpu.attend.serves", lambda *args: False)
    low = [tensor.bfloat16() for tensor in tensors]
    assert not prefers_attend(AttentionCall(*low, full, bases=("dis", "dot")))  # no instructions for bfloat16
    monkeypatch.setattr("ahop_layers.ops.gpu.nvrtc.capability", lambda device: (0, 0))
    assert not prefers_attend(AttentionCall(*tensors, full, bases=("dis", "dot")))
    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", 0)
    assert prefers_attend(AttentionCall(*tensors, full, bases=("dis", "dot")))


def test_causal_masks():
    scores = torch.randn(N, H, L, S)
    triangle = torch.ones(L, S, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(triangle, -torch.inf)
    assert torch.equal(Mask(causal=True).apply(scores), expected)
    query, key = torch.randn(L, 1), torch.randn(S - 2, 1)
    grown = Mask(causal=True).grow(query, key).grow(query, torch.cat((key, key[:1])))
    expected = scores.masked_fill(triangle & (torch.arange(S) < S - 2), -torch.inf)
    assert torch.equal(grown.apply(scores), expected)


def attention(**keywords):
    layer = ah.AdaptiveAttention(16, H, batch_first=True, **keywords)
    for parameter in layer.parameters():
        parameter.data += torch.randn_like(parameter) / 8
    return layer


@pytest.mark.parametrize("keywords", [{}, {"add_zero_attn": True, "add_bias_kv": True}, {"blocks": 2}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_multihead_attention(is_causal, keywords, calls):
    layer, x = attention(**keywords).double(), torch.randn(N, L, 16, dtype=torch.float64, requires_grad=True)
    ignored = torch.arange(L) > torch.tensor([[4], [L]])

    def call(need_weights):
        return layer(x, x, x, key_padding_mask=ignored, need_weights=need_weights, is_causal=is_causal)[0]

    found, expected = both(call, [x, *layer.parameters()])
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)


def test_a_causal_layer_needs_no_mask_tensor(calls):
    layer, x = attention(), torch.randn(N, L, 16)
    output, _ = layer(x, x, x, need_weights=False, is_causal=True)
    assert (calls[0][5], calls[0][6]) == (None, True)
    torch.testing.assert_close(output[:, :3], layer(x[:, :3], x[:, :3], x[:, :3], is_causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_cpu(dtype, calls):
    layer, x = attention(), torch.randn(N, L, 16)
    with torch.autocast("cpu", dtype):
        found, expected = both(lambda need: layer(x, x, x, need_weights=need)[0], list(layer.parameters()))
    assert len(calls) == 1
    assert found[0].dtype == expected[0].dtype == dtype
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 4 * torch.finfo(dtype).eps * theirs.norm()


HOPFIELD = {
    "association": (ah.AdaptiveHopfield, {"add_zero_association": True}),
    "scaling": (ah.AdaptiveHopfield, {"scaling": nn.Parameter(torch.rand(2, 1, 1))}),
    "scaling of dimensions": (ah.AdaptiveHopfield, {"scaling": torch.rand(2)}),
    "lookup": (ah.AdaptiveHopfieldLayer, {"quantity": 5}),
    "pooling": (ah.AdaptiveHopfieldPooling, {"quantity": 3}),
}


@pytest.mark.parametrize("name", HOPFIELD)
def test_hopfield_layers(name, calls):
    kind, keywords = HOPFIELD[name]
    layer, x = kind(8, num_heads=2, **copy.deepcopy(keywords)), torch.randn(3, L, 8)
    core = layer.association_core if kind is ah.AdaptiveHopfield else layer.hopfield.association_core
    output, weights = layer(x), layer.get_association_matrix(x)
    assert len(calls) == (name != "scaling of dimensions")
    assert weights.shape[:2] == (3, 2)
    seen = []
    core.register_forward_hook(lambda module, args, result: seen.append(result.weights))
    torch.testing.assert_close(layer(x), output)  # a hook makes it compute the weights
    torch.testing.assert_close(seen[0], weights)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_with_dropout(use_reentrant, calls):
    layer, x = attention(dropout=0.4), torch.randn(N, L, 16, requires_grad=True)

    def call(x):
        return layer(x, x, x, need_weights=False)[0]

    results = []
    for function in (call, lambda x: checkpoint(call, x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        x.grad, output = None, function(x)
        output.square().sum().backward()
        results.append((output, x.grad))
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0][0], call(x))
    assert len(calls) == 4


@pytest.mark.full
@pytest.mark.parametrize(("backend", "dropout"), [("aot_eager", 0.3), ("inductor", 0.0)])
def test_compile(backend, dropout, monkeypatch):
    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", -1)
    from torch._dynamo.testing import CompileCounterWithBackend  # imports the compiler, which takes seconds

    torch._dynamo.reset()
    layer, counter = attention(dropout=dropout), CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in (7, 12, 15):
        x = torch.randn(N, length, 16, requires_grad=True)
        results = []
        for function in (layer, compiled):
            output = function(x, x, x, need_weights=False, is_causal=True)[0]
            results.append((output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])))
        if not dropout:
            torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 2
    graph = counter.graphs[-1]
    assert sum(node.target is torch.ops.ahop.attend.default for node in graph.graph.nodes) == 1


@pytest.mark.full
def test_the_limit_of_memory_under_compile(monkeypatch):
    """A compiled layer changes to slices where an eager one does."""
    monkeypatch.setattr("ahop_layers.ops.attend.SCORES_BYTES", N * H * 40 * 40 * 4)
    from torch._dynamo.testing import CompileCounterWithBackend  # imports the compiler, which takes seconds

    torch._dynamo.reset()
    layer, counter = attention(), CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    found = {}
    for length in (10, 20, 30, 40, 41, 50):
        x, before = torch.randn(N, length, 16), counter.frame_count
        torch.testing.assert_close(compiled(x, x, x, need_weights=False), layer(x, x, x, need_weights=False))
        found[length] = counter.frame_count - before
    assert found == {10: 1, 20: 1, 30: 0, 40: 0, 41: 1, 50: 0}
    used = [any("attend" in str(node.target) for node in each.graph.nodes) for each in counter.graphs]
    assert used == [False, False, True]


@pytest.mark.slow
def test_export(calls):
    layer, x = attention().eval(), torch.randn(N, L, 16)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    dynamic = {"query": axes, "key": axes, "value": axes, "need_weights": None}
    program = torch.export.export(layer, (x, x, x), {"need_weights": False}, dynamic_shapes=dynamic).module()
    for shape in ((N, L, 16), (5, 13, 16)):
        x = torch.randn(shape)
        found, expected = (each(x, x, x, need_weights=False)[0] for each in (program, layer))
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_torch_func(calls):
    layer, x = attention().double(), torch.randn(3, N, L, 16, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def output(x, need_weights=False):
        return layer(x, x, x, need_weights=need_weights)[0]

    def loss(parameters, x, need_weights):
        return torch.func.functional_call(layer, parameters, (x, x, x), {"need_weights": need_weights})[0].sum()

    torch.testing.assert_close(torch.vmap(output)(x), torch.stack([output(each, True) for each in x]))
    found, expected = (torch.func.grad(loss)(parameters, x[0], need) for need in (False, True))
    torch.testing.assert_close(found, expected)
    samples = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, None))(parameters, x, False)
    torch.testing.assert_close(samples["similarity.w"][0], found["similarity.w"])
    _, tangent = torch.func.jvp(output, (x[0],), (x[1],))
    assert tangent.shape == x[0].shape
    layer.dropout = 0.5
    assert torch.vmap(output, randomness="different")(x).shape == x.shape
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [pytest.param(None, marks=pytest.mark.full), 2])
def test_memory_is_bounded(blocks):
    """Peak memory of a training step does not grow with L x S: a single tensor of scores takes 77 MB here."""
    similarity = ah.AdaptiveSimilarity(4, 1, blocks=blocks)
    tensors = [torch.randn(1, 1, 4400, 4, requires_grad=True) for _ in range(3)]
    _, peak = peak_memory(lambda: run(tensors, similarity, mask=Mask(causal=True), dropout=0.1)[0].sum().backward())
    assert 0 < peak <= 64e6


@pytest.mark.slow
def test_transformers_without_weights(calls):
    """Weights are computed where the call, the configuration, a hook or a replaced forward asks for them."""
    transformers, shapes = framework("transformers"), [(2, 3, 5, 5)] * 2
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
    vit, x = transformers.ViTModel(config, add_pooling_layer=False).eval(), torch.randn(2, 3, 8, 8)
    ah.adapt_(vit)
    expected = vit(x).last_hidden_state
    assert len(calls) == 2

    seen, (first, second) = [], (module for module in vit.modules() if isinstance(module, ah.Adaptive))
    handle = first.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    forward = second.forward
    second.forward = lambda *args, **keywords: seen.append(forward(*args, **keywords)[1]) or forward(*args, **keywords)
    vit(x)
    assert [each.shape for each in seen] == shapes
    assert len(calls) == 2
    handle.remove()
    del second.forward

    assert first(torch.randn(2, 5, 12))[1] is None
    assert len(calls) == 3
    recorded = vit(x, output_attentions=True)
    assert [each.shape for each in recorded.attentions] == shapes
    torch.testing.assert_close(recorded.last_hidden_state, expected)
    vit.set_attn_implementation("eager")
    assert first(torch.randn(2, 5, 12))[1].shape == (2, 3, 5, 5)
    vit.config.output_attentions = True
    assert [each.shape for each in vit(x).attentions] == shapes
    assert len(calls) == 3
