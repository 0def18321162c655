"""Report: what adapt_ changed, and what it costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul

from torch import nn

from ahop_layers.ops.gpu.networks import sorting_network
from ahop_layers.similarity import AdaptiveSimilarity, LazyAdaptiveSimilarity

MEASURED_TIMES = ((0, 1.0), (5, 2.1), (10, 3.0), (19, 3.7), (38, 6.7), (126, 28.9), (1086, 72.2))
"""Comparisons for one query-key pair and head, and the time of attention relative to the fused dot product.

Measured on an H200 by ``python -m benchmarks.vit --parts attention``: forward with 1024 images, 6 heads of 64
dimensions, 197 tokens, in bfloat16. The points are 4 blocks with one base and with both, 8 blocks likewise, 16 blocks
with both, and full footprints with both.
"""


@dataclass(frozen=True)
class Report:
    """The result of :func:`adapt_`; ``print`` shows it as a table.

    Attributes:
        adapted: original class of each adapted module, by name.
        passed_over: reason why an attention module was not adapted, by name.
        new_parameters: number of elements of the new similarities' parameters, without those of unknown shape.
        dry_run: whether :func:`adapt_` changed nothing.
        comparisons: number of comparisons that sort the similarities of one query-key pair, summed over bases, heads
            and layers: the comparators of Batcher's sorting network. Similarities of another class or of unknown
            dimension do not count.
        comparisons_with_4_blocks: the same with ``blocks=4`` in place of full footprints. None if there are no full
            footprints, or if 4 does not divide the dimension of a head.
        attention_time: expected time of an adapted attention on a GPU, relative to PyTorch's fused dot product: an
            interpolation of measured times by the number of comparisons, averaged over the layers. None without
            comparisons, or if a similarity has several resolutions or bases other than ``dis`` and ``dot``.
        attention_time_with_4_blocks: the same with ``blocks=4``; None like ``comparisons_with_4_blocks``.
        how: how the attention of each adapted module is replaced, by name: by a ``"converter"``, or in the module's own
            ``forward``, where it calls ``"scaled_dot_product_attention"`` or computes scores ``"by hand"``.

    >>> report = Report({"blocks.0.attn": "Attention"}, {}, 96, comparisons=3258, comparisons_with_4_blocks=30)
    >>> print(report)
    adapted 1 of 1 attention modules; 96 new parameters
    blocks.0.attn  adapted Attention
    sorting takes 3,258 comparisons for each query-key pair, summed over heads and layers; blocks=4 would take 30
    """

    adapted: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    new_parameters: int = 0
    dry_run: bool = False
    comparisons: int = 0
    comparisons_with_4_blocks: int | None = None
    attention_time: float | None = None
    attention_time_with_4_blocks: float | None = None
    how: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The coverage, one line per module, then the cost."""
        width = max(map(len, [*self.adapted, *self.passed_over]), default=0)
        done, takes = ("would adapt", "would take") if self.dry_run else ("adapted", "takes")
        total = f"{done} {len(self.adapted)} of {len(self.adapted) + len(self.passed_over)} attention modules"
        lines = [total if self.dry_run else f"{total}; {self.new_parameters} new parameters"]
        for name, kind in self.adapted.items():
            how = self.how.get(name, "converter")
            lines.append(f"{name:{width}}  {done} {kind}" + ("" if how == "converter" else f" ({how})"))
        lines += [f"{name:{width}}  passed over: {reason}" for name, reason in self.passed_over.items()]
        if self.comparisons:
            count = f"{self.comparisons:,} comparisons for each query-key pair, summed over heads and layers"
            fewer = self.comparisons_with_4_blocks
            lines.append(f"sorting {takes} {count}" + ("" if fewer is None else f"; blocks=4 would take {fewer:,}"))
        if self.attention_time is not None:
            cost = f"expected time of attention on a GPU: about {self.attention_time:.2g}x the fused dot product"
            less = self.attention_time_with_4_blocks
            lines.append(cost + ("" if less is None else f", with blocks=4 about {less:.2g}x"))
        return "\n".join(lines)


def costs(similarities: Iterable[nn.Module]) -> tuple[int, int | None, float | None, float | None]:
    """Returns the four fields of a :class:`Report` that tell the cost, for the similarities of all adapted layers."""
    known = [
        part
        for part in similarities
        if isinstance(part, AdaptiveSimilarity) and not isinstance(part, LazyAdaptiveSimilarity)
    ]
    counts = [(part, [entry.count(part.dim) for entry in part.blocks]) for part in known]
    heads = [part.num_heads or 1 for part in known]
    each = [len(part.bases) * sum(map(_comparators, ns)) for part, ns in counts]
    fewer = [len(part.bases) * sum(_comparators(4 if n == part.dim else n) for n in ns) for part, ns in counts]
    full = [n for part, ns in counts for n in ns if n == part.dim]
    reducible = bool(full) and all(n > 4 and n % 4 == 0 for n in full)
    total = sum(map(mul, heads, each))
    timed = total > 0 and all(len(ns) == 1 and {*part.bases} <= {"dis", "dot"} for part, ns in counts)
    return (
        total,
        sum(map(mul, heads, fewer)) if reducible else None,
        _mean_time(each) if timed else None,
        _mean_time(fewer) if timed and reducible else None,
    )


def _comparators(n: int) -> int:
    return len(sorting_network(n).comparators)


def _mean_time(comparisons: Sequence[int]) -> float:
    return sum(map(_relative_time, comparisons)) / len(comparisons)


def _relative_time(comparisons: int) -> float:
    """Interpolates :data:`MEASURED_TIMES` linearly; beyond the last point, the last line is continued."""
    for (low, start), (high, end) in pairwise(MEASURED_TIMES):
        slope = (end - start) / (high - low)
        if comparisons <= high:
            break
    return start + slope * (comparisons - low)
