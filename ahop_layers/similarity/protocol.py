"""What can be asked of a similarity, whatever its class: each function has an answer for a plain ``f(query, key)``.

A similarity is anything that scores ``query (L, d)`` against ``key (S, d)``: ``(L, S)``. It may have more, as
:class:`~ahop_layers.AdaptiveSimilarity` and :class:`~ahop_layers.ImageSimilarity` do:

- ``allows_missing = True``: a call takes ``missing=True``, which makes NaN an unknown value.
- ``prepare(patterns)`` returns a list of tensors with one row for each pattern, which a call takes as ``prepared=`` in
  place of the patterns; ``sources()`` returns the tensors that they depend on, and none if there is nothing to prepare.
- ``fix_scales_(patterns)`` takes over norms, widths and other scales of the stored patterns, once.
- ``explain(query, key)`` returns what each dimension adds to the score of pairs ``(L, d)``: ``(L, d)``.
- ``is_solvable()`` says whether the score is linear in weights, see :class:`Solvable`.
- ``is_fused()`` says whether scores need little memory beyond query and key.
- ``is_unbounded()`` says whether a single wrong value can decide a score, and should be clamped.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from ahop_layers.errors import AHopError
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

    def unbiased(self, query: Tensor) -> Tensor:
        """Subtracts the learned bias, if any."""

    def set_ranks_(self, weights: Sequence[Tensor]) -> None:
        """Sets the weights of sorted similarities ``(n_bases, n)`` for each part."""


def is_solvable(similarity: Any) -> TypeGuard[Solvable]:
    """Returns whether the weights of a similarity can be solved for, and none of them is frozen."""
    linear = hasattr(similarity, "is_solvable") and bool(similarity.is_solvable())
    return linear and all(parameter.requires_grad for parameter in similarity.parameters())


def is_attended(similarity: Any) -> TypeGuard[AdaptiveSimilarity]:
    """Returns whether ``w``, ``beta`` and ``compared`` are all that a score needs."""
    return isinstance(similarity, AdaptiveSimilarity) and similarity.is_single()


def is_fused(similarity: Any) -> bool:
    """Returns whether scores need little memory beyond query and key."""
    return hasattr(similarity, "is_fused") and bool(similarity.is_fused())


def is_unbounded(similarity: Any) -> bool:
    """Returns whether values far from all patterns should be clamped."""
    return hasattr(similarity, "is_unbounded") and bool(similarity.is_unbounded())


def allows_missing(similarity: Any) -> bool:
    """Returns whether NaN can be an unknown value."""
    return bool(getattr(similarity, "allows_missing", False))


def score(
    similarity: Any, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
) -> Tensor:
    """Scores queries against keys; options that are not given are not passed on."""
    options: dict[str, Any] = {"missing": True} if missing else {}
    if prepared is not None:
        options["prepared"] = [each.to(query.dtype) for each in prepared]
    scores: Tensor = similarity(query, key, **options)
    return scores


def sources(similarity: Any) -> list[Tensor]:
    """Returns the tensors that prepared patterns depend on; none if there is nothing to prepare."""
    return list(similarity.sources()) if hasattr(similarity, "sources") else []


def fix_scales_(similarity: Any, patterns: Tensor) -> None:
    """Lets a similarity take over the scales of the stored ``patterns (N, d)``, if it has any."""
    if hasattr(similarity, "fix_scales_"):
        similarity.fix_scales_(patterns)


def compared_size(similarity: Any, dim: int) -> int:
    """Returns the number of values that are compared for one pair of patterns ``(dim,)``."""
    return sum(part.dim for part in similarity.parts()) if is_solvable(similarity) else dim


def explain(similarity: Any, query: Tensor, key: Tensor) -> Tensor:
    """Returns what each dimension adds to the score of ``query (L, d)`` and ``key (L, d)``: ``(L, d)``.

    Raises:
        AHopError: the similarity has no ``explain``, or its score is not a sum over dimensions.
    """
    if getattr(similarity, "explain", None) is None:
        raise AHopError(f"explain needs a fixed or an adaptive similarity, got {type(similarity).__name__}")
    found: Tensor = similarity.explain(query, key)
    return found
