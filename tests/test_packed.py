"""Bags without padding: equal to the padded call, in less memory."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from ahop_layers import AHopError
from ahop_layers.hopfield import adaptive as layers
from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from benchmarks import packed as benchmark

SIZES = [3, 0, 7, 1, 12, 5]


def pad(instances, sizes):
    padded = pad_sequence([*instances.split(sizes), torch.zeros(1, instances.shape[1])], batch_first=True)[:-1]
    return padded, torch.arange(padded.shape[1]) >= torch.tensor(sizes)[:, None]


def both(pooling, instances, sizes):
    """Outputs, weights and all gradients of the packed and of the padded call."""
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
    {"update_steps_max": 2, "quantity": 2},
    {"update_steps_max": None, "num_heads": 2, "update_steps_eps": 1e-2},
    {"add_zero_association": True, "num_heads": 2},
    {"add_zero_association": True, "separation": "sparsemax", "update_steps_max": 1},
    {"separation": "sparsemax", "num_heads": 2, "quantity": 2},
    {"separation": "entmax15"},
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


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    room=st.sampled_from([1, 6, 48, 2**22]),
    separation=st.sampled_from(["softmax", "entmax15"]),
)
def test_packed_equals_padded_for_any_bags_and_slices(sizes, room, separation):
    kept, layers.ROOM = layers.ROOM, (room, room)
    try:
        pooling = AdaptiveHopfieldPooling(6, num_heads=2, separation=separation)
        for packed, padded in both(pooling, torch.randn(sum(sizes), 6), sizes):
            torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)
    finally:
        layers.ROOM = kept


class LargestResult(TorchDispatchMode):
    """Remembers how many numbers the largest new tensor has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in views:
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_nothing_as_large_as_a_large_bag_is_made(monkeypatch):
    monkeypatch.setattr(layers, "ROOM", (640, 640))
    pooling, instances = AdaptiveHopfieldPooling(16, num_heads=2), torch.randn(1000, 16)
    with LargestResult() as largest:
        pooling.pool_packed(instances, [990, 10]).sum().backward()
    assert 640 <= largest.numbers <= 2000  # a slice, or the scores (1000, 2, 1) of all; the instances have 16,000


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


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    pooling, bags = AdaptiveHopfieldPooling(8), [torch.randn(size, 8) for size in (3, 5, 1)]
    nested = torch.nested.nested_tensor(bags, layout=layout, requires_grad=True)
    torch.testing.assert_close(pooling.pool_packed(nested), pooling.pool_packed(torch.cat(bags), [3, 5, 1]))
    pooling.pool_packed(nested).sum().backward()
    assert nested.grad is not None
    with pytest.raises(AHopError, match="got bag_sizes as well"):
        pooling.pool_packed(nested, [3, 5, 1])


def test_sizes_as_a_tensor_dropout_and_the_batch_second():
    pooling, instances = AdaptiveHopfieldPooling(8, dropout=0.5, batch_first=False), torch.randn(9, 8)
    dropped = pooling.pool_packed(instances, torch.tensor([4, 5]))
    kept = pooling.eval().pool_packed(instances, [4, 5])
    assert not torch.allclose(dropped, kept)
    second = pooling(torch.stack([instances[:4], instances[4:8]], 1))
    torch.testing.assert_close(pooling.pool_packed(instances[:8], [4, 4]).flatten(), second.flatten())


def test_half_precision_and_autocast():
    pooling, instances = AdaptiveHopfieldPooling(8, num_heads=2), torch.randn(sum(SIZES), 8)
    expected = pooling.pool_packed(instances, SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        output = pooling.pool_packed(instances, SIZES)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    assert pooling.bfloat16().pool_packed(instances.bfloat16(), SIZES).dtype == torch.bfloat16


def test_what_does_not_fit():
    pooling, instances = AdaptiveHopfieldPooling(8), torch.randn(4, 8)
    for sizes, message in (
        ([1, 2], "add up to the 4 instances, got 3"),
        ([5, -1], "whole numbers of at least 0, got"),
        ([1.5, 2.5], "whole numbers of at least 0, got"),
        (None, "whole numbers of at least 0, got None"),
    ):
        with pytest.raises(AHopError, match=message):
            pooling.pool_packed(instances, sizes)
    with pytest.raises(AHopError, match=r"must be \(total, input_size\) or nested, got \(1, 4, 8\)"):
        pooling.pool_packed(instances[None], [4])
    with pytest.raises(AHopError, match=r"8\), got \(1, 4, 7\)"):
        pooling.pool_packed(instances[:, :7], [4])


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Run the benchmark at a small size, with rows into a file, and return what the file holds."""
    monkeypatch.setattr(benchmark, "in_own_process", lambda measure, *job: measure(*job))

    def main(bags: int) -> list[str]:
        settings = {"bags": bags, "longest": 20, "width": 8, "heads": 2, "repeats": 1, "output": tmp_path / "rows.csv"}
        monkeypatch.setattr(sys, "argv", ["packed.py", *(f"--{name}={value}" for name, value in settings.items())])
        benchmark.main()
        return (tmp_path / "rows.csv").read_text().splitlines()

    return main


def test_the_benchmark_runs(measure, capsys):
    measure(5)
    header, *rows = measure(5)  # its rows take the place of the first ones
    assert "log-uniform" in capsys.readouterr().out
    assert {"device", "torch", "commit", "faster", "less_memory"} <= set(header.split(","))
    assert len(rows) == 4


def test_a_trial_of_another_size_replaces_nothing(measure):
    before, after = measure(5), measure(6)
    assert after[:5] == before
    assert len(after) == 9


def test_an_interrupted_measurement_leaves_the_rows_as_they_were(measure, tmp_path, monkeypatch):
    before, calls = measure(5), iter(range(5))

    def interrupted(*job):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return 1.0, 1

    monkeypatch.setattr(benchmark, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(5)
    assert (tmp_path / "rows.csv").read_text().splitlines() == before
