"""Scores of pairs with unknown values: a warp sorts all blocks of a pair, in CUDA C++."""

from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from ahop_layers.ops.gpu import nvrtc
from ahop_layers.ops.gpu.score import KINDS

MAX_BLOCKS = 4096
KEYS, THREADS = 32, 128
ARGUMENTS = Struct("<12q8i")


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], widths: Tensor | None = None) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)``, where NaN is an unknown value."""
    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in (query.float(), key.float()))
    (batch, heads, length, d), count, n = query.shape, key.shape[-2], weight.shape[-1]
    weight = weight.contiguous()
    before = torch.nn.functional.pad(weight.cumsum(-1), (1, 0))
    widths = weight.new_ones(len(bases)) if widths is None else widths.contiguous()
    out = torch.empty(batch, heads, length, count, device=query.device)
    chunks = -(-count // KEYS)
    if out.numel() == 0:
        return out
    arguments = ARGUMENTS.pack(
        query.data_ptr(), key.data_ptr(), *query.stride()[:3], *key.stride()[:3], weight.data_ptr(), before.data_ptr(),
        widths.data_ptr(), out.data_ptr(), heads, length, count, n, d // n, chunks,
        len(bases), sum(KINDS.index(base) << 2 * place for place, base in enumerate(bases)),
    )  # fmt: skip
    values = max(1, (1 << (n - 1).bit_length()) // 32)  # in the registers of a lane
    kernel = nvrtc.kernel("missing.cu", "score_missing", (("values", values),), query.device.index or 0)
    launch = kernel, batch * heads * length * chunks, THREADS, THREADS * 33 * values // 8
    nvrtc.run(query.device, [launch], arguments)
    return out
