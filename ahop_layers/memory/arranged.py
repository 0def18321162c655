"""The patterns of a memory, arranged once by the blocks of its similarity."""

from collections.abc import MutableMapping, Sequence
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ahop_layers.blocks import arrange
from ahop_layers.similarity import AdaptiveSimilarity

KEPT_ELEMENTS = 2**28
"""Maximum number of elements of the arranged copies of a memory: 1 GiB in float32."""


class _Kept(NamedTuple):
    """Arranged copies, and what they were computed from."""

    version: int
    gathers: Sequence[Tensor | None]
    copies: Sequence[Tensor | None]


_kept: MutableMapping[Tensor, _Kept] = WeakTensorKeyDictionary()


def arranged_patterns(similarity: AdaptiveSimilarity, patterns: Tensor) -> Sequence[Tensor | None] | None:
    """Returns the ``arranged`` argument of a similarity for ``patterns (N, d)``, or None to arrange them in each call.

    Copies are kept for as long as ``patterns`` exists, and are computed again if the tensor was modified in place or if
    the similarity has other blocks. They are not part of a module, so they are neither saved nor copied with it.
    """
    gathers = similarity.gathers()
    elements = len(patterns) * sum(len(gather) for gather in gathers if gather is not None)
    if not 0 < elements <= KEPT_ELEMENTS or torch.compiler.is_compiling():
        return None
    if patterns.requires_grad or patterns.is_inference():  # a copy would have no gradient; no version counter
        return None
    kept = _kept.get(patterns)
    if kept is None or kept.version != patterns._version or any(map(is_not, kept.gathers, gathers)):
        # Tensors created in inference mode could not be used in a later fit.
        with torch.inference_mode(False), torch.no_grad():
            copies = [None if gather is None else arrange(patterns, gather) for gather in gathers]
        kept = _kept[patterns] = _Kept(patterns._version, gathers, copies)
    return kept.copies
