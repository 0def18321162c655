"""Packed bags: equal to the padded call, with less memory, and one graph for all sizes."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.rnn import pad_sequence

from ahop_layers import packed as layout
from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from benchmarks import packed as benchmark
from tests.new_tensors import LargestNewTensor
from tests.samples import refuses

pytestmark = pytest.mark.slow

SIZES = [3, 0, 7, 1, 12, 5]


def pad(instances, sizes):
    padded = pad_sequence([*instances.split(sizes), torch.zeros(1, instances.shape[1])], batch_first=True)[:-1]
    return padded, torch.arange(padded.shape[1]) >= torch.tensor(sizes)[:, None]


def both(pooling, instances, sizes):
    """Outputs, weights and all gradients of the packed and the padded call."""
    results = []
    for packed in (True, False):
        x = instances.clone().requires_grad_()
        pooling.zero_grad()
        if packed:
            output, weights = pooling.pool_packed(x, sizes, return_association=True)
        else:
            padded, mask = pad(x, sizes)
            output = pooling(padded, stored_pattern_padding_mask=mask)
            weights = pooling.get_association_matrix(padded, stored_pattern_padding_mask=mask)
            weights = weights[..., : padded.shape[1]].permute(0, 3, 1, 2)[~mask]
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        grads = [p.grad.clone() for p in pooling.parameters() if p.grad is not None]
        results.append([output.detach(), weights.detach(), x.grad, *grads])
    return zip(*results, strict=True)


CASES = [
    {},
    {"quantity": 3, "num_heads": 2, "output_size": 5},
    {"update_steps_max": 2, "quantity": 2, "blocks": 4},
    {"update_steps_max": None, "num_heads": 2, "update_steps_eps": 1e-2},
    {"add_zero_association": True, "separation": "sparsemax", "update_steps_max": 1, "num_heads": 2},
    {"separation": "entmax15", "quantity": 2},
    {"separation": "entmax", "num_heads": 2},
    {"separation": "argmax", "quantity": 2},
    {"association_activation": "tanh", "normalize_hopfield_space": True, "debias": True},
    {"scaling": torch.tensor([0.5, 1.5]), "num_heads": 2, "disable_out_projection": True},
]


@pytest.mark.parametrize("keywords", CASES, ids=lambda keywords: "-".join(keywords) or "default")
def test_packed_equals_padded(keywords):
    pooling = AdaptiveHopfieldPooling(8, **keywords)
    for parameter in pooling.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    for packed, padded in both(pooling.double(), torch.randn(sum(SIZES), 8).double(), SIZES):
        torch.testing.assert_close(packed, padded)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9) | st.integers(15, 33), min_size=1, max_size=12).filter(any),
    room=st.sampled_from([1, 6, 48, 2**22]),
    separation=st.sampled_from(["softmax", "entmax15"]),
    steps=st.sampled_from([0, 0, 1]),
)
def test_packed_equals_padded_for_any_bags_and_slices(sizes, room, separation, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SLICE_ELEMENTS", {"cpu": room})
        pooling = AdaptiveHopfieldPooling(6, num_heads=2, separation=separation, update_steps_max=steps)
        for packed, padded in both(pooling, torch.randn(sum(sizes), 6), sizes):
            torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)


def test_hooks_of_the_separation_see_the_weights_of_the_zero_pattern_too():
    keywords, seen = {"add_zero_association": True, "separation": "sparsemax"}, []
    pooling = AdaptiveHopfieldPooling(8, num_heads=2, quantity=3, **keywords)
    separation = pooling.hopfield.association_core.separation
    separation.register_forward_hook(lambda module, args, weights: seen.append(weights))
    _, weights = pooling.pool_packed(torch.randn(sum(SIZES), 8), SIZES, return_association=True)
    assert weights.shape == (sum(SIZES), 2, 3)
    (hooked,) = seen
    ends = torch.tensor(SIZES).cumsum(0) + torch.arange(len(SIZES))  # as in a padded map, it follows each bag
    kept = torch.ones(sum(SIZES) + len(SIZES), dtype=torch.bool).index_fill(0, ends, False)
    assert torch.equal(hooked[kept], weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_hooks_of_the_core_see_packed_and_padded_calls_alike(batch_first):
    pooling = AdaptiveHopfieldPooling(8, num_heads=2, quantity=3, add_zero_association=True, batch_first=batch_first)
    core, sizes, seen = pooling.hopfield.association_core, [5, 5], []

    def double(module, args, result):
        seen.append((args[0], result))
        return result._replace(output=2 * result.output)

    x = torch.randn(10, 8)
    padded = x.unflatten(0, (2, 5)) if batch_first else x.unflatten(0, (2, 5)).transpose(0, 1)
    plain, _ = pooling.pool_packed(x, sizes, return_association=True)
    with core.register_forward_hook(double):
        doubled, weights = pooling.pool_packed(x, sizes, return_association=True)
        pooling(padded)
    torch.testing.assert_close(doubled, 2 * plain)
    (packed_query, packed), (query, result) = seen
    assert (packed_query.shape, query.shape) == ((3, 1, 8), (3, 1, 8))
    torch.testing.assert_close(packed.output, result.output)  # (quantity, N, output_size)
    torch.testing.assert_close(packed.weights.unflatten(0, (2, 5)), result.weights[..., :5].permute(0, 3, 1, 2))
    assert weights is packed.weights


STEPS = {"quantity": 2, "num_heads": 2, "update_steps_max": 1, "add_zero_association": True, "separation": "argmax"}


@pytest.mark.parametrize(("backend", "keywords"), [("aot_eager", {}), ("eager", STEPS)])
@pytest.mark.full
def test_one_graph_for_all_sizes(backend, keywords):
    torch.compiler.reset()
    pooling, counter = AdaptiveHopfieldPooling(8, **keywords), CompileCounterWithBackend(backend)
    compiled = torch.compile(pooling.pool_packed, fullgraph=True, backend=counter)
    for sizes in ([3, 0, 7], [9, 1, 0], [2, 5, 1, 1], [40, 2], [3, 3, 3, 3, 3], [0, 0, 9, 1, 20, 4]):
        x = torch.randn(sum(sizes), 8, requires_grad=True)
        results = []
        for pool in (compiled, pooling.pool_packed):
            output, weights = pool(x, torch.tensor(sizes), return_association=True)
            results.append((output, weights, *torch.autograd.grad(output.square().sum(), x)))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)
    assert counter.frame_count == 2  # one for the first shape, one for all others
    for sizes in ([3, 6], [11, -1]):
        with pytest.raises(RuntimeError, match="bag_sizes must be integers >= 0 that add up"):
            compiled(torch.randn(10, 8), torch.tensor(sizes))


def test_export():
    pooling = AdaptiveHopfieldPooling(8, num_heads=2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pooling = pooling

        def forward(self, instances, sizes):
            return self.pooling.pool_packed(instances, sizes)

    shapes = ({0: torch.export.Dim("total", min=2)}, {0: torch.export.Dim("bags", min=2)})
    exported = torch.export.export(Model(), (torch.randn(10, 8), torch.tensor([3, 7])), dynamic_shapes=shapes).module()
    x, sizes = torch.randn(14, 8), torch.tensor([5, 0, 9])
    torch.testing.assert_close(exported(x, sizes), pooling.pool_packed(x, sizes))


def test_no_intermediate_tensor_grows_with_a_large_bag(monkeypatch):
    monkeypatch.setattr(layout, "SLICE_ELEMENTS", {"cpu": 640})
    pooling, instances = AdaptiveHopfieldPooling(16, num_heads=2), torch.randn(1000, 16)
    with LargestNewTensor() as largest:
        pooling.pool_packed(instances, [990, 10]).sum().backward()
    assert 640 <= largest.elements <= 2000  # a slice, or all scores (1000, 2, 1); the instances have 16,000


def test_empty_bags_read_zeros():
    pooling = AdaptiveHopfieldPooling(8)
    bias = torch.nn.init.normal_(pooling.hopfield.association_core.out_proj.bias)
    torch.testing.assert_close(pooling.pool_packed(torch.randn(4, 8), [0, 4, 0])[[0, 2]], bias.expand(2, 8))
    torch.testing.assert_close(pooling.pool_packed(torch.randn(0, 8), [0, 0]), bias.expand(2, 8))
    assert pooling.pool_packed(torch.randn(0, 8), []).shape == (0, 8)
    sparse = AdaptiveHopfieldPooling(8, separation="sparsemax", update_steps_max=1)
    output, weights = sparse.pool_packed(torch.randn(0, 8), [0, 0], return_association=True)
    assert (output == 0).all()
    assert weights.shape == (0, 1, 1)


def test_dropout_and_batch_first_false():
    pooling, instances = AdaptiveHopfieldPooling(8, dropout=0.5, batch_first=False), torch.randn(8, 8)
    dropped = pooling.pool_packed(instances, [4, 4])
    kept = pooling.eval().pool_packed(instances, [4, 4])
    assert not torch.allclose(dropped, kept)
    torch.testing.assert_close(kept.flatten(), pooling(instances.unflatten(0, (2, 4)).transpose(0, 1)).flatten())


def test_sizes_are_any_sequence_or_array_of_integers():
    pooling, instances = AdaptiveHopfieldPooling(8), torch.randn(3, 8)
    expected = pooling.pool_packed(instances, [0, 1, 2])
    array = np.array([0, 1, 2], dtype=np.uint8)
    for sizes in (array, list(array), range(3), torch.from_numpy(array), list(torch.from_numpy(array))):
        assert torch.equal(pooling.pool_packed(instances, sizes), expected)


def test_half_precision_and_autocast():
    pooling, instances = AdaptiveHopfieldPooling(8, num_heads=2), torch.randn(sum(SIZES), 8)
    expected = pooling.pool_packed(instances, SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        output = pooling.pool_packed(instances, SIZES)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    assert pooling.bfloat16().pool_packed(instances.bfloat16(), SIZES).dtype == torch.bfloat16


def test_wrong_arguments_raise():
    pooling, x = AdaptiveHopfieldPooling(8), torch.randn(4, 8)
    numbers = [[5, -1], [2.0, 2.0], np.array([2.0, 2.0]), [True] * 4, torch.ones(4, dtype=torch.bool), [np.True_] * 4]
    others = [np.array([[2, 2]]), torch.tensor(4), 4, "4", {4: "four"}, {1, 3}, None]
    for instances, sizes, message in (
        *((x, sizes, "add up to the number of instances, 4, got 3") for sizes in ([1, 2], np.array([1, 2]))),
        *((x, each, "^bag_sizes must be a sequence of integers >= 0, got ") for each in numbers + others),
        (None, [4], "instances must be a tensor, got NoneType"),
        (np.zeros((4, 8)), [4], "instances must be a tensor, got ndarray"),
        (x[None], [4], r"must be \(total, input_size\), .* got \(1, 4, 8\)"),
        (torch.nested.nested_tensor([x, x]), [4, 4], r"must be \(total, input_size\), .* got a nested tensor"),
        (x[:, :7], [4], r"8\), got \(1, 4, 7\)"),
    ):
        refuses(message, pooling.pool_packed, instances, sizes)


def test_the_benchmark_writes_its_rows(tmp_path, monkeypatch, capsys):
    settings = {"bags": 5, "longest": 20, "width": 8, "heads": 2, "repeats": 1, "output": tmp_path / "rows.csv"}
    monkeypatch.setattr(sys, "argv", ["packed.py", *(f"--{name}={value}" for name, value in settings.items())])
    monkeypatch.setattr(benchmark, "in_own_process", lambda measure, *job: measure(*job))
    benchmark.main()
    header, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert "log-uniform" in capsys.readouterr().out
    assert {"device", "torch", "commit", "faster", "less_memory"} <= set(header.split(","))
    assert len(rows) == 4
