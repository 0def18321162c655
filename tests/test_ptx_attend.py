"""The PTX bodies of fused attention, executed by the emulator and compared with float64."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ahop_layers.ops.dropout import kept
from ahop_layers.ops.gpu import attend_backward, attend_kernels
from ahop_layers.ops.gpu.attend_pairs import Rules
from ahop_layers.ops.reference import fold, folded_similarity
from tests.ptx_emulator import NAMES, WARP, Emulator, Memory, bits, error

pytestmark = pytest.mark.slow

BOTH = ("dis", "dot")
SEED = 0x1234_5678_9ABC_DEF0 - 2**62
HEAD = 5
DROPOUT = 0.3


def word(number):
    """The bits of a float32 number as a signed integer."""
    return int(np.float32(number).view(np.int32))


class Problem:
    """Inputs in the emulator's memory, and the readout and gradients in float64."""

    def __init__(self, n, size, width, length, count, dtype, bases, rules):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.n, self.size, self.width, self.length, self.count = n, size, width, length, count
        self.bases, self.rules, self.dtype, self.d = bases, rules, dtype, n * size
        tensors = randn(length, self.d), randn(count, self.d), randn(count, width), randn(length, width)
        query, key, value, grad = (tensor.to(dtype) for tensor in tensors)
        weight = randn(len(bases), n) / 8
        threshold = round(DROPOUT * 2**32)
        exact = [x.double().requires_grad_() for x in (query, key, value, fold(weight))]
        scores = folded_similarity(exact[0], exact[1], exact[3], bases)
        mask = torch.zeros(length, count)
        if rules.mask == "u8":
            mask = randn(length, count) > 0.3
            mask[3] = True
            scores = scores.masked_fill(mask, -torch.inf)
        elif rules.mask:
            mask = randn(length, count).to(next(kind for kind, name in NAMES.items() if name == rules.mask))
            scores = scores + mask
        if rules.causal:
            scores = scores.masked_fill(torch.ones(length, count, dtype=torch.bool).triu(1), -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        self.log_sum = scores.masked_fill(empty, torch.inf).logsumexp(-1).detach()
        shares = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        if rules.dropout:
            keys = torch.tensor([SEED]), torch.tensor([HEAD]), torch.arange(length), torch.arange(count)
            shares = shares * kept(*keys, DROPOUT)[0] / (1 - DROPOUT)
        out = shares @ exact[2]
        self.grads = torch.autograd.grad(out, exact, grad.double())
        self.out = out.detach()
        self.memory = memory = Memory()
        places = [memory.put(bits(x)) for x in (query, key, value, weight, grad, mask)]
        self.query, self.key, self.value, self.weight, self.grad, mask_place = places
        seed = memory.put(np.array([SEED]))
        item = mask.element_size()
        self.pair_arguments = [mask_place, item * count, item, seed]
        self.numbers = [HEAD, threshold, word(1 / (1 - DROPOUT))]

    def read(self, warps):
        """Runs the forward body and returns the readout and the log-sums."""
        memory, d, width = self.memory, self.d, self.width
        out = memory.put(np.zeros((self.length, width), np.int16))
        log_sum = memory.put(np.full(self.length, np.nan, np.float32))
        body = attend_kernels.attend(self.n, self.size, width, self.bases, NAMES[self.dtype], warps, self.rules)
        for first in range(0, self.length, 16 * warps):
            Emulator(memory, warps).run(
                body,
                [self.query, 2 * d, self.key, 2 * d, self.value, 2 * width, self.weight, out, 2 * width, log_sum,
                 self.length, *self.pair_arguments, first, self.count, *self.numbers],
            )  # fmt: skip
        halves = torch.from_numpy(memory.get(out, (self.length, width), np.int16)).view(self.dtype)
        return halves, torch.from_numpy(memory.get(log_sum, (self.length,)))

    def differentiate(self, warps, step=None):
        """Runs the backward body, in launches of ``step`` queries, and returns the gradients."""
        memory, d, width, length, count = self.memory, self.d, self.width, self.length, self.count
        adds = step is not None
        item, kind = (4, np.float32) if adds else (2, np.int16)
        shapes = (length, d), (count, d), (count, width), (warps, len(self.bases), self.n)
        query_grad = memory.put(np.full(shapes[0], 0.0 if self.rules.causal else np.nan, np.float32))
        weight_grad = memory.put(np.full(shapes[3], np.nan, np.float32))
        key_grad, value_grad = (memory.put(np.full(shapes[i], -1, kind)) for i in (1, 2))
        dots = (self.out * torch.from_numpy(memory.get(self.grad, (length, width), np.int16)).view(self.dtype)).sum(-1)
        tiles = -(-count // (16 * warps))
        warp = np.arange(WARP * warps) // WARP
        name = NAMES[self.dtype]
        body = attend_backward.attend_backward(self.n, self.size, width, self.bases, name, warps, self.rules)
        total = 0.0
        for start in range(0, length, step or length):
            rows = min(step or length, length - start)
            statistics = np.zeros((-(-rows // 16) * 16, 2), np.float32)
            statistics[:, 0] = np.inf
            statistics[:rows, 0] = self.log_sum[start : start + rows] / np.log(2)
            statistics[:rows, 1] = dots[start : start + rows]
            mask, by_query, *rest = self.pair_arguments
            Emulator(memory, warps).run(
                body,
                [self.query + 2 * d * start, 2 * d, self.key, 2 * d, self.value, 2 * width, self.weight,
                 self.grad + 2 * width * start, 2 * width, memory.put(statistics), query_grad + 4 * d * start, key_grad,
                 item * d, value_grad, item * width, weight_grad + 4 * warp * len(self.bases) * self.n, 0, count,
                 mask + start * by_query, by_query, *rest, rows, tiles, start, (1 + (start > 0)) * adds, *self.numbers],
            )  # fmt: skip
            total = total + torch.from_numpy(memory.get(weight_grad, shapes[3])).sum(0)
        results = [torch.from_numpy(memory.get(query_grad, shapes[0]))]
        for place, shape in ((key_grad, shapes[1]), (value_grad, shapes[2])):
            grad = torch.from_numpy(memory.get(place, shape, kind))
            results.append(grad if adds else grad.view(self.dtype))
        return [*results, total]


CASES = {
    "4 blocks": (4, 16, 64, torch.bfloat16, BOTH, Rules()),
    "8 blocks": (8, 8, 64, torch.float16, BOTH, Rules()),
    "dot alone": (2, 16, 24, torch.bfloat16, ("dot",), Rules()),
    "dis alone": (3, 8, 8, torch.float16, ("dis",), Rules()),
    "wide": (4, 32, 128, torch.bfloat16, ("dot", "dis"), Rules()),
    "blocked": (4, 8, 32, torch.bfloat16, BOTH, Rules(mask="u8")),
    "added": (4, 8, 32, torch.bfloat16, BOTH, Rules(mask="f32")),
    "added halves": (4, 8, 32, torch.float16, BOTH, Rules(mask="f16")),
    "causal": (4, 8, 32, torch.bfloat16, BOTH, Rules(causal=True)),
    "dropout": (4, 8, 32, torch.bfloat16, BOTH, Rules(dropout=True)),
    "all": (4, 8, 32, torch.bfloat16, BOTH, Rules("u8", True, True)),
}
QUICK = ("dis alone", "added", "all")
PARAMETERS = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.full) for name, case in CASES.items()
]


@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.parametrize("warps", [pytest.param(1, marks=pytest.mark.full), 2])
def test_readout(case, warps):
    n, size, width, dtype, bases, rules = case
    problem = Problem(n, size, width, 37, 41, dtype, bases, rules)
    out, log_sum = problem.read(warps)
    assert error(out, problem.out) < torch.finfo(dtype).eps
    assert_close(log_sum.double(), problem.log_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.parametrize(("warps", "step"), [(2, None), pytest.param(1, 16, marks=pytest.mark.full)])
def test_gradients(case, warps, step):
    n, size, width, dtype, bases, rules = case
    problem = Problem(n, size, width, 21, 37, dtype, bases, rules)
    for result, exact in zip(problem.differentiate(warps, step), problem.grads, strict=True):
        assert error(result, exact) < 1.5 * torch.finfo(dtype).eps
