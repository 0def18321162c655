"""The portable Triton kernels in the interpreter; test_gpu.py runs this file in a process with TRITON_INTERPRET=1."""

import pytest
import torch

from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.reference import folded_similarity


@pytest.mark.parametrize(
    ("shape", "bases"),
    [((2, 1, 2, 3, 4), ("dis", "dot")), ((1, 2, 3, 2, 5), ("dot", "l1", "dis")), ((1, 1, 2, 70, 2), ("l1",))],
    ids=["N2-L2-S3-d4", "H2-L3-S2-d5", "L2-S70-d2"],
)
def test_portable_kernels(shape, bases, monkeypatch):
    monkeypatch.setattr(gpu, "_slots", lambda device: 1)
    monkeypatch.setattr(gpu, "PROGRAMS_PER_SLOT", 1)  # several tiles of keys per program
    n, h, length, count, d = shape
    query, key, weight = torch.randn(n, h, length, d), torch.randn(n, h, count, d), torch.randn(h, len(bases), d)
    grad = torch.randn(n, h, length, count)
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, weight)]
    scores = folded_similarity(*inputs, bases)
    torch.testing.assert_close(gpu.score(query, key, weight, bases), scores.detach())
    ours = gpu.score_backward(grad, query, key, weight, bases, (True, True, True))
    torch.testing.assert_close(ours, torch.autograd.grad(scores, inputs, grad))
    query[0, 0, 0, 0] = float("nan")
    assert torch.equal(gpu.score(query, key, weight, bases).isnan(), query.isnan().any(-1, True).expand_as(grad))
