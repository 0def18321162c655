"""The one path from projected queries, keys and values to what an association reads out.

Score, mask, separate, read out; with update steps, the state that was read from the keys takes the query's place and
the path is walked again. Every layer of the package, dot product or adaptive, padded or packed, goes through
:func:`settle`.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError, describe
from ahop_layers.separation import Separation

Score = Callable[[Tensor, Tensor], Tensor]
Steps = int | None | Sequence[int]

# A dot product under softmax converges; a learned similarity or a hard separation may cycle for ever.
LONGEST_SEARCH = 1000


def dot_product(query: Tensor, key: Tensor) -> Tensor:
    """The score of attention: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    return query @ key.mT


def negative_distance(query: Tensor, key: Tensor) -> Tensor:
    """The negative squared distance: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    # Far from the origin the squares would swallow their difference; whole numbers stay whole.
    centre = key.mean(-2, keepdim=True).detach().round()
    query, key = query - centre, key - centre
    return 2 * query @ key.mT - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)


class Mask(NamedTuple):
    """What to leave out, and what to add to the scores; both broadcast to (N, H, L, S), both may be absent."""

    blocked: Tensor | None = None
    added: Tensor | None = None

    def apply(self, scores: Tensor) -> Tensor:
        """Add, then set what is blocked to ``-inf``."""
        if self.added is not None:
            scores = scores + self.added.to(scores.dtype)
        return scores if self.blocked is None else scores.masked_fill(self.blocked, -torch.inf)

    def join(self, other: "Mask") -> "Mask":
        """Both masks in one."""
        blocked = self.blocked if other.blocked is None else other.blocked
        added = self.added if other.added is None else other.added
        if self.blocked is not None and other.blocked is not None:
            blocked = self.blocked | other.blocked
        if self.added is not None and other.added is not None:
            added = self.added + other.added
        return Mask(blocked, added)

    def grow(self) -> "Mask":
        """The same with one more key at the end, which every query may use."""
        blocked, added = (None if part is None else functional.pad(part, (0, 1)) for part in self)
        return Mask(blocked, added)


def combine_masks(
    padding: Tensor | None,
    association: Tensor | None,
    shape: tuple[int, int, int, int],
    names: tuple[str, str] = ("stored_pattern_padding_mask", "association_mask"),
) -> Mask | None:
    """Bring the two masks of a call to one form.

    Args:
        padding: ``(N, S)`` for keys; bool or uint8 (deprecated), True = ignore, or any float dtype, added to scores.
        association: ``(L, S)`` or ``(N * H, L, S)`` for pairs, with the same dtypes.
        shape: ``(N, H, L, S)``.
        names: what the caller calls the two masks, for messages.

    Raises:
        AHopError: a shape or dtype that does not fit.
    """
    n, h, length, keys = shape
    parts = []
    if association is not None:
        if tuple(association.shape) == (length, keys):
            association = association[None, None]
        elif tuple(association.shape) == (n * h, length, keys):
            association = rearrange(association, "(n h) l s -> n h l s", h=h)
        else:
            raise AHopError(
                f"{names[1]} must be (L, S) = {(length, keys)} or (N * heads, L, S) = {(n * h, length, keys)},"
                f" got {describe(association)}"
            )
        parts.append(_as_mask(names[1], association))
    if padding is not None:
        if tuple(padding.shape) != (n, keys):
            raise AHopError(f"{names[0]} must be (N, S) = {(n, keys)}, got {describe(padding)}")
        parts.append(_as_mask(names[0], rearrange(padding, "n s -> n 1 1 s")))
    return reduce(Mask.join, parts) if parts else None


def _as_mask(name: str, mask: Tensor) -> Mask:
    """Read a mask of a call: a float is added, True blocks."""
    if mask.is_floating_point():
        return Mask(added=mask)
    if mask.dtype == torch.uint8:
        warnings.warn(f"a uint8 {name} is deprecated, use bool", DeprecationWarning, stacklevel=2)
        return Mask(blocked=mask.bool())
    if mask.dtype != torch.bool:
        raise AHopError(f"{name} must be bool or of a float dtype, got {mask.dtype}")
    return Mask(blocked=mask)


def associate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Score = dot_product,
    separation: Separation,
    scaling: float | Tensor = 1.0,
    mask: Mask | None = None,
    dropout: float = 0.0,
    steps: Steps = 0,
    eps: float | Tensor = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Associate queries with keys and read the values out.

    Args:
        query, key, value: ``(N, H, L, d)``, ``(N, H, S, d)``, ``(N, H, S, e)``; N may be 1 where it is shared.
        score: the similarity of queries and keys.
        separation: from a row of scores to weights.
        scaling: multiplies the scores; a number, or a tensor ``()`` or ``(H, 1, 1)``.
        mask: see :func:`combine_masks`.
        dropout: probability with which a weight is dropped at the readout; 0 outside training.
        steps: how many times the state is replaced by what it reads from the keys, or one such number per head; None or
            a negative number: until the weights of a head stop changing.
        eps: a head stops once its weights change by no more than this in norm, in every sample; a number or ``(H,)``.

    Returns:
        The readout ``(N, H, L, e)`` and the weights ``(N, H, L, S)``. A query with every key masked reads zeros.

    >>> query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    >>> output, weights = associate(query, key, key, separation=Separation(), scaling=8**-0.5)
    >>> reference = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    >>> torch.allclose(output, reference, atol=1e-5), weights.shape
    (True, torch.Size([2, 4, 3, 5]))
    """

    def attend(state: Tensor) -> Tensor:
        scores = score(state, key) * scaling
        weights: Tensor = separation(scores if mask is None else mask.apply(scores), masked=mask is not None)
        return weights

    def follow(weights: Tensor) -> Tensor:
        return weights @ key

    weights = settle(query, attend, follow, change, steps, eps)
    return functional.dropout(weights, dropout) @ value, weights


def change(weights: Tensor, before: Tensor) -> Tensor:
    """The norm of the difference of two sets of weights, ``(N, H, L, S) -> (N, H)``."""
    return (weights - before).square().sum((-2, -1)).sqrt()


def settle(
    state: Tensor,
    attend: Callable[[Tensor], Tensor],
    follow: Callable[[Tensor], Tensor],
    change: Callable[[Tensor, Tensor], Tensor],
    steps: Steps,
    eps: float | Tensor,
) -> Tensor:
    """Let the states move until their steps are used up or they have arrived, and return their last weights.

    Args:
        state: ``(N, H, L, d)``.
        attend: states to weights.
        follow: weights to the states they read from the keys, ``(N, H, L, d)``.
        change: from two sets of weights to the norm of their difference, ``(N, H)``.
        steps, eps: as in :func:`associate`.
    """
    limits = [steps] * state.shape[1] if steps is None or isinstance(steps, int) else list(steps)
    longest = [LONGEST_SEARCH if limit is None or limit < 0 else limit for limit in limits]
    search = any(limit is None or limit < 0 for limit in limits)
    weights, before = attend(state), None
    for step in range(max(longest)):
        moving = torch.tensor([step < limit for limit in longest], device=state.device)
        if before is not None:
            # A head at rest recomputes the same weights, so that it stays at rest without being remembered.
            moving = moving & (change(weights.detach(), before) > eps).any(0)
        # Only a search may look at the data: a fixed number of steps stays one graph for compile and export.
        if search and not moving.any():
            break
        state = torch.where(moving[:, None, None], follow(weights), state)
        before, weights = weights.detach(), attend(state)
    return weights
