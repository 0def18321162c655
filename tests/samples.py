"""Inputs of scores, a similarity, changes of weights, checks of errors and states, and threads, for several files."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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


@contextmanager
def unchanged(module):
    """Checks that the block changes no tensor of a module and replaces no parameter."""
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    yield
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())


@contextmanager
def repeated_in_threads(call, count):
    """Repeats ``call(number)`` in threads until the block ends, and raises the error of a call."""
    done = threading.Event()

    def repeat(number):
        calls = 0
        while not (calls and done.is_set()):
            call(number)
            calls += 1

    with ThreadPoolExecutor(count) as pool:
        threads = [pool.submit(repeat, number) for number in range(count)]
        try:
            yield
        finally:
            done.set()
    for thread in threads:
        thread.result()


def perturb(model, size=0.1):
    """Changes the similarities of a model, as training would."""
    with torch.no_grad():
        for parameter in ah.similarity_parameters(model):
            parameter.add_(size * torch.randn_like(parameter))
