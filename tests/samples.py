"""Inputs of scores, a similarity, changes of weights, and a check of errors, that several test files use."""

import pytest
import torch
from torch import nn

import ahop_layers as ah


def problem(*batch, length=5, count=7, d=8, n=None, heads=None, bases=2, dtype=torch.float64, grad=False):
    """Returns random queries, keys and weights of ``n`` blocks, by default as many as dimensions."""
    shape = (heads,) if heads else ()
    tensors = (
        torch.randn(*batch, *shape, length, d, dtype=dtype),
        torch.randn(*batch, *shape, count, d, dtype=dtype),
        torch.randn(*shape, bases, n or d, dtype=dtype) / d,
    )
    return tuple(tensor.requires_grad_(grad) for tensor in tensors)


class Scaled(nn.Module):
    """A similarity of another class: the dot product times a learned factor per head."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.shape, self.scale = (dim, num_heads), nn.Parameter(torch.ones(num_heads, 1, 1))

    def forward(self, query, key):
        return self.scale * (query @ key.mT)


def refuses(message, call, *args, **keywords):
    """Checks that a call raises AHopError with a message."""
    with pytest.raises(ah.AHopError, match=message):
        call(*args, **keywords)


def perturb(model, size=0.1):
    """Changes the similarities of a model, as training would."""
    with torch.no_grad():
        for parameter in ah.similarity_parameters(model):
            parameter.add_(size * torch.randn_like(parameter))
