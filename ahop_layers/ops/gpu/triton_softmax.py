"""A softmax in Triton, for attention that is not fused."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total", "count"], do_not_specialize_on_alignment=["scores", "weights", "log_sum"])
def softmax_rows(
    scores, weights, log_sum, total: tl.int64, count: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the softmax of ``total`` rows of ``count`` scores, and the log-sum-exp of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < total
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < count)[None, :]
        x = tl.load(scores + row[:, None] * count + column[None, :], mask=inside, other=float("-inf"))
        above = tl.maximum(largest, tl.max(x, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)  # the difference of infinities is NaN
        sums = sums * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        largest = above
    log_sums = tl.where(sums == 0, float("inf"), shift + tl.log(sums))
    tl.store(log_sum + row, log_sums, mask=exists)
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < count)[None, :]
        x = tl.load(scores + row[:, None] * count + column[None, :], mask=inside, other=float("-inf"))
        share = tl.exp(x - log_sums[:, None])
        tl.store(weights + row[:, None] * count + column[None, :], share.to(weights.dtype.element_ty), mask=inside)
