"""What a memory can ask of a similarity: anything that scores ``query (L, d)`` against ``key (S, d)``: ``(L, S)``.

A similarity may have more, as :class:`~ahop_layers.AdaptiveSimilarity` and :class:`~ahop_layers.ImageSimilarity` do:

- ``allows_missing = True``: a call takes ``missing=True``, which makes NaN an unknown value.
- ``prepare(patterns)`` returns a list of tensors with one row for each pattern, which a call takes as ``prepared=`` in
  place of the patterns; ``sources()`` returns the tensors that they depend on, and none if there is nothing to prepare.
- ``fix_scales_(patterns)`` takes over norms, widths and other scales of the stored patterns, once.
- ``explain(query, key)`` returns what each dimension adds to the score of pairs ``(L, d)``: ``(L, d)``.
- ``is_solvable`` says whether the score is linear in weights, see :class:`Solvable`.
- ``is_fused`` says whether scores need little memory beyond query and key.
- ``within(query, low, high)`` clamps values that are wrong because they are far beyond the limits of the patterns.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from ahop_layers.similarity.adaptive import AdaptiveSimilarity

Similarity = Callable[..., Tensor]
"""Scores queries against keys: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""


class Solvable(Protocol):
    """A similarity whose score is the sum of adaptive similarities, its parts, of views of query and key.

    A class that is one may also have ``overview(query, key)``, cheap scores that choose candidates.
    """

    dim: int

    def __call__(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Computes the scores."""

    def parts(self) -> list[AdaptiveSimilarity]:
        """Returns the similarity of each view."""

    def views(self, rows: Tensor) -> list[Tensor]:
        """Returns what each of the parts compares of ``rows (..., d)``."""

    def set_ranks_(self, weights: Sequence[Tensor]) -> None:
        """Sets the weights of sorted similarities ``(n_bases, n)`` for each part."""


def is_solvable(similarity: Any) -> TypeGuard[Solvable]:
    """Returns whether the weights of a similarity can be solved for, and none of them is frozen."""
    linear = getattr(similarity, "is_solvable", False)
    return linear and all(parameter.requires_grad for parameter in similarity.parameters())
