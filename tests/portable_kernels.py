"""The portable Triton kernels in the interpreter; test_gpu.py runs this file in a process with TRITON_INTERPRET=1."""

import pytest
import torch

from ahop_layers.ops.gpu import division
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.reference import folded_similarity

CASES = {
    "N2-L2-S3-d4": ((2, 1, 2, 3, 4, 4), ("dis", "dot")),
    "H2-L3-S2-d5": ((1, 2, 3, 2, 5, 5), ("dot", "l1", "dis")),
    "L2-S70-d2": ((1, 1, 2, 70, 2, 2), ("l1",)),
    "L3-S5-d12-n3": ((2, 2, 3, 5, 12, 3), ("dis", "dot")),
    "L2-S3-d6-n1": ((1, 1, 2, 3, 6, 1), ("dis", "dot", "l1")),
    "H2-L1-S3-d3-near": ((1, 2, 1, 3, 3, 3), ("l1", "near")),
    "L1-S2-d6-n2-near": ((1, 1, 1, 2, 6, 2), ("near", "dot", "near")),
}


@pytest.mark.parametrize(("shape", "bases"), CASES.values(), ids=CASES)
def test_portable_kernels(shape, bases, monkeypatch):
    monkeypatch.setattr(division, "slots", lambda device: 1)
    monkeypatch.setattr(division, "PROGRAMS_PER_SLOT", 1)  # several tiles of keys per program
    n, h, length, count, d, blocks = shape
    query, key, weight = torch.randn(n, h, length, d), torch.randn(n, h, count, d), torch.randn(h, len(bases), blocks)
    assert gpu.serves(query, bases, blocks)
    grad, widths = torch.randn(n, h, length, count), torch.rand(len(bases)) + 0.2
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, weight)]
    scores = folded_similarity(*inputs, bases, widths)
    torch.testing.assert_close(gpu.score(query, key, weight, bases, widths=widths), scores.detach())
    ours = gpu.score_backward(grad, query, key, weight, bases, (True, True, True), widths)
    torch.testing.assert_close(ours, torch.autograd.grad(scores, inputs, grad))
    query[0, 0, 0, 0] = float("nan")
    assert torch.equal(gpu.score(query, key, weight, bases).isnan(), query.isnan().any(-1, True).expand_as(grad))
