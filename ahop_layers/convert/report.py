"""Report: what adapt_ changed, and what it costs."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from ahop_layers.ops.gpu.layout import comparators
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, LazyAdaptiveSimilarity


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
        return "\n".join(lines)


def count_comparisons(similarities: Iterable[nn.Module]) -> tuple[int, int | None]:
    """Returns ``comparisons`` and ``comparisons_with_4_blocks`` of a :class:`Report`."""
    total, fewer, full = 0, 0, []
    for part in similarities:
        if isinstance(part, AdaptiveSimilarity) and not isinstance(part, LazyAdaptiveSimilarity):
            copies = len(part.bases) * (part.num_heads or 1)
            for n in (entry.count(part.dim) for entry in part.blocks):
                total += copies * comparators(n)
                fewer += copies * comparators(4 if n == part.dim else n)
                full += [n] if n == part.dim else []
    return total, fewer if full and all(n > 4 and n % 4 == 0 for n in full) else None
