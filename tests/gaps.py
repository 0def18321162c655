"""Gradients for scores whose order of similarities is certain."""

import torch

from ahop_layers.ops.reference import BASES, block_sums


def near_ties(query, key, bases, n):
    """Returns which pairs have two similarities that are equal up to eight units in the last place.

    Their order, and with it the gradient, depends on the processor, and any order gives a valid subgradient. Half
    precision is scored in float32. A unit is relative to the absolute terms of a block's sum.
    """
    query, key = (each if each.dtype == torch.float64 else each.float() for each in (query, key))
    ties = torch.zeros(*query.shape[:-1], key.shape[-2], dtype=torch.bool, device=query.device)
    for base in bases:
        values = BASES[base].value(query.unsqueeze(-2), key.unsqueeze(-3)).double()
        ordered, order = block_sums(values, n).sort(dim=-1)
        size = block_sums(values.abs(), n).gather(-1, order)
        room = 8 * torch.finfo(query.dtype).eps * torch.maximum(size[..., 1:], size[..., :-1])
        ties |= (ordered.diff(dim=-1) <= room).any(-1)
    return ties


def separated_grad(query, key, bases, n):
    """Returns a random gradient of the scores, 0 for pairs with :func:`near_ties`.

    In half precision all pairs of many dimensions have ties, since their values lie on a coarse grid.
    """
    ties = near_ties(query, key, bases, n)
    half = query.dtype in (torch.float16, torch.bfloat16)
    assert half or not ties.numel() or not ties.all(), "no pair is left to compare"
    return torch.randn(ties.shape, device=query.device).masked_fill(ties, 0)
