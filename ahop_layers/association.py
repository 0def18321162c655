"""The path from queries to a readout: score, scale, separate, drop, read, and repeat for each update step.

:func:`associate` is the only statement of this path, for dot products and learned similarities alike. It does not know
how the stored patterns are arranged in memory: either as a padded batch (:class:`Padded`), or as bags without padding
(:class:`ahop_layers.packed.Packed`), which have the same methods.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.errors import AHopError, describe
from ahop_layers.ops.attend import attend, is_large, softmax_scores
from ahop_layers.ops.operators import adaptive_similarity, has_hooks, is_transformed
from ahop_layers.ops.sliced import per_query_head
from ahop_layers.packed import Packed
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.protocol import ScoreFunction, dot_product

Steps = int | None | Sequence[int]

# The dot product under softmax converges. A learned similarity or a hard separation may cycle forever.
MAX_SEARCH_STEPS = 1000


class Mask(NamedTuple):
    """Entries to exclude from the scores, and values to add to them.

    Attributes:
        blocked: None, or a bool tensor that broadcasts to ``(N, H, L, S)``; True excludes a pair.
        added: None, or a floating-point tensor that broadcasts to ``(N, H, L, S)``.
        causal: whether query i may only use keys 0 to i.
    """

    blocked: Tensor | None = None
    added: Tensor | None = None
    causal: bool = False

    def apply(self, scores: Tensor) -> Tensor:
        """Adds ``added`` to the scores, then sets excluded entries to ``-inf``."""
        if self.added is not None:
            scores = scores + self.added.to(scores.dtype)
        if self.causal:
            scores = scores.masked_fill(_triangle(scores.shape[-2], scores.shape[-1], scores.device), -torch.inf)
        return scores if self.blocked is None else scores.masked_fill(self.blocked, -torch.inf)

    def grow(self, query: Tensor, key: Tensor) -> "Mask":
        """Appends one key that every query may use to the mask of ``query (..., L, d)`` and ``key (..., S, d)``."""
        blocked, added, _ = self.without_causal(query, key)
        blocked, added = (None if part is None else functional.pad(part, (0, 1)) for part in (blocked, added))
        return Mask(blocked, added)

    def without_causal(self, query: Tensor, key: Tensor) -> "Mask":
        """Returns the same mask of ``query (..., L, d)`` and ``key (..., S, d)`` with causality as blocked pairs."""
        if not self.causal:
            return self
        triangle = _triangle(query.shape[-2], key.shape[-2], key.device)
        return Mask(triangle if self.blocked is None else self.blocked | triangle, self.added)


def _triangle(length: int, keys: int, device: torch.device) -> Tensor:
    """Returns the pairs that a causal mask excludes, a bool tensor ``(length, keys)``."""
    return torch.ones(length, keys, dtype=torch.bool, device=device).triu(1)


def combine_masks(
    padding: Tensor | None,
    association: Tensor | None,
    shape: tuple[int, int, int, int],
    names: tuple[str, str] = ("stored_pattern_padding_mask", "association_mask"),
) -> Mask | None:
    """Combines the masks of a call: ``padding (N, S)``, and ``association (L, S)`` or ``(N * H, L, S)``.

    True excludes a pair, and a float is added to its score; uint8 is read as bool (deprecated). ``shape`` is
    ``(N, H, L, S)``, and error messages call the arguments by ``names``.
    """
    n, h, length, keys = shape
    masks = []
    if association is not None:
        layouts = ("(L, S)", (length, keys), (1, 1, length, keys)), ("(N * heads, L, S)", (n * h, length, keys), shape)
        masks.append(_read_mask(names[1], association, *layouts))
    if padding is not None:
        masks.append(_read_mask(names[0], padding, ("(N, S)", (n, keys), (n, 1, 1, keys))))
    blocked = [mask for mask in masks if not mask.is_floating_point()]
    added = [mask for mask in masks if mask.is_floating_point()]
    both = reduce(torch.logical_or, blocked) if blocked else None, reduce(torch.add, added) if added else None
    return Mask(*both) if masks else None


def _read_mask(name: str, mask: object, *layouts: tuple[str, tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """Returns a mask that broadcasts to scores; a layout has a name, the shape of a mask, and the resulting shape."""
    if not isinstance(mask, Tensor):
        raise AHopError(f"{name} must be a tensor or None, got {type(mask).__name__}")
    wide = next((wide for _, shape, wide in layouts if tuple(mask.shape) == shape), None)
    if wide is None:
        expected = " or ".join(f"{layout} = {shape}" for layout, shape, _ in layouts)
        raise AHopError(f"{name} must be {expected}, got {describe(mask)}")
    if mask.dtype == torch.uint8:
        warnings.warn(f"a uint8 {name} is deprecated, use bool", DeprecationWarning, stacklevel=3)
        mask = mask.bool()
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        raise AHopError(f"{name} must have dtype bool or a floating-point dtype, got {mask.dtype}")
    return mask.reshape(wide)


def hide(padding: object, key: Tensor, value: Tensor, batch_axis: int = 0) -> tuple[Tensor, Tensor]:
    """Sets the rows of ``key (N, S, E)`` and ``value (N, S, E)`` that a padding mask ``(N, S)`` excludes to 0.

    Their weight is 0, but 0 times NaN is NaN, in the readout and in gradients. With ``batch_axis=1``, patterns are
    ``(S, N, E)``.
    """
    if not isinstance(padding, Tensor) or padding.ndim != 2:
        return key, value
    rows = padding.isneginf() if padding.is_floating_point() else padding.bool()
    rows = rows.transpose(0, batch_axis)
    if rows.shape != key.shape[:2] or rows.shape != value.shape[:2]:
        return key, value  # of samples with different masks, or a mask that is refused later
    hidden = key.masked_fill(rows.unsqueeze(-1), 0.0)
    return hidden, hidden if value is key else value.masked_fill(rows.unsqueeze(-1), 0.0)


def change(weights: Tensor, before: Tensor) -> Tensor:
    """Computes the norm of the difference of two sets of weights: ``(N, H, L, S) -> (N, H)``."""
    return (weights - before).square().sum((-2, -1)).sqrt()


class Padded:
    """Keys and values of a batch, padded to one length; weights are ``(N, H, L, S)``.

    Args:
        key, value: ``(N, H, S, d)``, ``(N, H, S, e)``; N may be 1 where all samples share them. Fewer heads, a divisor
            of H, are each used by as many consecutive heads of the query.
        mask: see :func:`combine_masks`.
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Mask | None = None) -> None:
        self.key, self.value, self.mask = key, value, mask

    def weigh(self, state: Tensor, score: ScoreFunction, separation: Separation) -> Tensor:
        """Turns the masked scores of the states against the keys into weights: ``(N, H, L, S)``."""
        scores = score(state, per_query_head(self.key, state.shape[1]))
        scores = scores if self.mask is None else self.mask.apply(scores)
        return separation(scores, masked=self.mask is not None)

    def next_state(self, weights: Tensor) -> Tensor:
        """Sums the weighted keys: ``(N, H, L, d)``."""
        return weights @ per_query_head(self.key, weights.shape[1])

    def read(self, weights: Tensor) -> Tensor:
        """Sums the weighted values: ``(N, H, L, e)``."""
        return weights @ per_query_head(self.value, weights.shape[1])

    change = staticmethod(change)


def associate(
    query: Tensor, stored: Padded | Packed, *, score: ScoreFunction = dot_product, separation: Separation,
    scaling: float | Tensor = 1.0, dropout: float = 0.0, steps: Steps = 0, eps: float | Tensor = 1e-4,
    need_weights: bool = True,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Associates queries with stored keys and reads the stored values.

    Without a request for weights, softmax is computed by one operator that keeps no tensor of size L x S: over dot
    products by ``scaled_dot_product_attention``, and over an :class:`~ahop_layers.AdaptiveSimilarity` always where a
    fused GPU kernel supports the call, and elsewhere if the scores would take much memory.

    Args:
        query: ``(N, H, L, d)``; N may be 1 where all samples share it.
        stored: keys and values in a memory layout.
        score: the similarity of queries and keys.
        separation: turns the scores of a query into weights.
        scaling: factor of the scores; a number, or a tensor ``()`` or ``(H, 1, 1)``.
        dropout: probability of dropping a weight from the readout; pass 0 outside training.
        steps: number of update steps, which replace the state by the weighted sum of the keys; an integer, or one per
            head. None or a negative number: until the weights converge.
        eps: a head has converged if its weights change by at most this norm in every sample; a number or ``(H,)``.
        need_weights: whether to return the weights.

    Returns:
        The readout ``(N, H, L, e)``, and the weights before dropout in the layout of ``stored``, or None if they are
        not needed. A query without any key, or with all of them masked, reads zeros.

    >>> query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    >>> output, weights = associate(query, Padded(key, key), separation=Separation(), scaling=8**-0.5)
    >>> reference = functional.scaled_dot_product_attention(query, key, key)
    >>> torch.allclose(output, reference, atol=1e-5), weights.shape
    (True, torch.Size([2, 4, 3, 5]))
    """
    softmax = _is_softmax(separation)
    if not need_weights and isinstance(stored, Padded) and softmax and isinstance(steps, int) and steps == 0:
        readout = None
        if score is dot_product:
            readout = _attend_by_products(query, stored, scaling, dropout)
        elif _is_learned(score):
            readout = _attend(query, stored, score, scaling, dropout)
        if readout is not None:
            return readout, None

    def scaled(query: Tensor, key: Tensor) -> Tensor:
        if score is dot_product:  # there are fewer queries, and fewer weights, than scores
            return dot_product((query * scaling).to(query.dtype), key)
        if not _is_learned(score):
            return score(query, key) * scaling
        query, key, _ = score.compared(query, key)
        return adaptive_similarity(query, key, score.footprint_weight() * scaling, score.names)

    def weigh(state: Tensor) -> Tensor:
        if softmax and isinstance(stored, Padded) and stored.mask is None and not state.is_cuda and _is_learned(score):
            query, key, _ = score.compared(state, per_query_head(stored.key, state.shape[1]))
            weights = softmax_scores(query, key, score.footprint_weight() * scaling, score.names)
            if weights is not None:
                return weights
        return stored.weigh(state, scaled, separation)

    weights = iterate(query, weigh, stored.next_state, stored.change, steps, eps)
    return stored.read(functional.dropout(weights, dropout)), weights if need_weights else None


def _is_softmax(separation: Separation) -> bool:
    """Returns whether the separation is a softmax that one operator can compute, and nothing observes it."""
    softmax = type(separation) is Separation and separation.name == "softmax" and not _is_watched(separation)
    return softmax and not is_transformed()


def _is_learned(score: ScoreFunction) -> TypeGuard[AdaptiveSimilarity]:
    """Returns whether weights determine the scores, and nothing observes them."""
    return isinstance(score, AdaptiveSimilarity) and score.is_attended and not _is_watched(score)


def _is_watched(module: nn.Module) -> bool:
    """Returns whether a hook or an override of an instance observes calls of the module."""
    return has_hooks(module) or "forward" in module.__dict__


def _attend_by_products(query: Tensor, stored: Padded, scaling: float | Tensor, dropout: float) -> Tensor | None:
    """Computes the readout with ``scaled_dot_product_attention``; None if separate operations are preferable."""
    key, value = (per_query_head(each, query.shape[1]) for each in (stored.key, stored.value))
    if dropout and not query.is_cuda:  # where it is separate operations as well
        return None
    n = max(each.shape[0] for each in (query, key, value))
    query, key, value = (each.expand(n, -1, -1, -1) for each in (query, key, value))
    mask = stored.mask or Mask()
    causal = mask.causal and mask.blocked is None and mask.added is None
    mask = mask if causal else mask.without_causal(query, key)
    allowed = None if mask.blocked is None else ~mask.blocked
    if mask.added is not None:
        added = mask.added.to(query.dtype)
        allowed = added if allowed is None else torch.where(allowed, added, -torch.inf)
    if isinstance(scaling, Tensor):
        query, scaling = (query * scaling).to(query.dtype), 1.0
    return functional.scaled_dot_product_attention(query, key, value, allowed, dropout, causal, scale=float(scaling))


def _attend(
    query: Tensor, stored: Padded, similarity: AdaptiveSimilarity, scaling: float | Tensor, dropout: float
) -> Tensor | None:
    """Computes the readout with ``ahop::attend``; None if it does not fit, or separate operations are preferable."""
    key, value, mask = stored.key, stored.value, stored.mask or Mask()
    if not query.ndim == key.ndim == value.ndim == 4 or value.shape[1] != key.shape[1]:
        return None
    batches, masks = (1, query.shape[0], key.shape[0], value.shape[0]), (mask.blocked, mask.added)
    if any(part is not None and part.ndim == 4 and part.shape[0] not in batches for part in masks):
        return None
    added = mask.added
    if added is not None and ((added.requires_grad and torch.is_grad_enabled()) or not added.is_floating_point()):
        return None  # the operator computes no gradient of a mask
    if similarity.blocks.normalize and key.shape[1] not in (1, query.shape[1]):
        return None  # norms are computed for each query head
    if not (query.is_cuda or is_large(query, key)):  # nothing else is prepared in vain
        return None
    if mask.blocked is not None:
        added = mask.blocked if added is None else torch.where(mask.blocked, -torch.inf, added)
    if added is not None:
        added = added[(None,) * (4 - added.ndim)]
    query, key, _ = similarity.compared(query, key)
    return attend(
        query, key, value, similarity.w, similarity.names, added, mask.causal, dropout,
        beta=similarity.beta, scaling=scaling, optional=True,
    )  # fmt: skip


def iterate(
    state: Tensor, weigh: Callable[[Tensor], Tensor], next_state: Callable[[Tensor], Tensor],
    change: Callable[[Tensor, Tensor], Tensor], steps: Steps, eps: float | Tensor,
) -> Tensor:  # fmt: skip
    """Updates the states ``(N, H, L, d)`` until ``steps`` is reached or the weights converge; returns the last weights.

    ``weigh`` computes the weights of the states. :class:`Padded` documents ``next_state`` and ``change``,
    :func:`associate` documents ``steps`` and ``eps``.
    """
    limits = [steps] * state.shape[1] if steps is None or isinstance(steps, int) else list(steps)
    longest = [MAX_SEARCH_STEPS if limit is None or limit < 0 else limit for limit in limits]
    search = any(limit is None or limit < 0 for limit in limits)
    weights, before = weigh(state), None
    for step in range(max(longest)):
        moving = torch.tensor([step < limit for limit in longest], device=state.device)
        if before is not None:
            # A converged head keeps its state, so its weights do not change again: no flag has to be stored.
            moving = moving & (change(weights.detach(), before) > eps).any(0)
        # Only a search branches on data. A fixed number of steps stays one graph under compile and export.
        if search and not moving.any():
            break
        state = torch.where(moving[:, None, None], next_state(weights), state)
        before, weights = weights.detach(), weigh(state)
    return weights
