"""Losses of associative memories: the cross entropy of patterns and of classes.

Each function takes the logits ``(L, B)`` of consecutive blocks of patterns and returns the mean loss of the queries. If
the memory is sharded, ``shard`` is the part of the patterns whose logits are given.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.memory.labels import Classes, class_logsumexp, leave_out
from ahop_layers.memory.shards import Shard, all_rows

Measure = Callable[[Iterable[Tensor], Tensor], Tensor]
"""Computes the mean loss of logits ``(L, B)`` of consecutive blocks of patterns, for targets ``(L,)``."""


def pattern_loss(blocks: Iterable[Tensor], index: Tensor, shard: Shard | None = None) -> Tensor:
    """The loss for queries of the patterns ``index (L,)``."""
    logits = torch.cat(list(blocks), -1)
    return functional.cross_entropy(logits, index) if shard is None else shard.cross_entropy(logits, index)


def class_loss(blocks: Iterable[Tensor], target: Tensor, classes: Classes, shard: Shard | None = None) -> Tensor:
    """The loss for queries of the classes ``target (L,)``, from 0 to ``n_classes - 1``."""
    return functional.cross_entropy(class_logsumexp(blocks, classes, shard), target)


def label_loss(blocks: Iterable[Tensor], index: Tensor, classes: Classes, shard: Shard | None = None) -> Tensor:
    """The loss for queries of the classes of the patterns ``index (L,)``, each without that pattern.

    A pattern is kept if it is the only one of its class.
    """
    target = all_rows(classes.of_pattern, shard)[index]
    column = index if shard is None else index - shard.start
    column = column.masked_fill(classes.counts[target] == 1, -1)
    return class_loss(leave_out(blocks, column), target, classes, shard)
