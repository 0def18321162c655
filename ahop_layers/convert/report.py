"""Report: what adapt_ changed, and what it costs."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from ahop_layers.ops.gpu.networks import sorting_network
from ahop_layers.similarity import AdaptiveSimilarity, LazyAdaptiveSimilarity


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

    >>> print(Report({"blocks.0.attn": "Attention"}, {}, 96, comparisons=3258, comparisons_with_4_blocks=30))
    blocks.0.attn  adapted Attention
    adapted 1, passed over 0; 96 new parameters
    sorting takes 3,258 comparisons for each query-key pair, summed over heads and layers; blocks=4 would take 30
    """

    adapted: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    new_parameters: int = 0
    dry_run: bool = False
    comparisons: int = 0
    comparisons_with_4_blocks: int | None = None

    def __str__(self) -> str:
        """One line per module, then the totals and the cost."""
        width = max(map(len, [*self.adapted, *self.passed_over]), default=0)
        done, takes = ("would adapt", "would take") if self.dry_run else ("adapted", "takes")
        lines = [f"{name:{width}}  {done} {kind}" for name, kind in self.adapted.items()]
        lines += [f"{name:{width}}  passed over: {reason}" for name, reason in self.passed_over.items()]
        total = f"{done} {len(self.adapted)}, passed over {len(self.passed_over)}"
        lines.append(total if self.dry_run else f"{total}; {self.new_parameters} new parameters")
        if self.comparisons:
            count = f"{self.comparisons:,} comparisons for each query-key pair, summed over heads and layers"
            fewer = self.comparisons_with_4_blocks
            lines.append(f"sorting {takes} {count}" + ("" if fewer is None else f"; blocks=4 would take {fewer:,}"))
        return "\n".join(lines)


def costs(similarities: Iterable[nn.Module | None]) -> tuple[int, int | None]:
    """Returns the last two fields of a :class:`Report`, for the similarities of all adapted layers."""
    total = fewer = 0
    full = []
    for part in similarities:
        if isinstance(part, AdaptiveSimilarity) and not isinstance(part, LazyAdaptiveSimilarity):
            sorts = (part.num_heads or 1) * len(part.bases)
            for n in (entry.count(part.dim) for entry in part.blocks):
                total += sorts * _comparators(n)
                fewer += sorts * _comparators(4 if n == part.dim else n)
                full += [n] * (n == part.dim)
    return total, fewer if full and all(n > 4 and n % 4 == 0 for n in full) else None


def _comparators(n: int) -> int:
    return len(sorting_network(n).comparators)
