"""association_maps: the association matrices of every adaptive layer of a model."""

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.attention.call import CallAttention
from ahop_layers.convert.registry import ADAPTIVE_LAYERS
from ahop_layers.errors import AHopError, check_module
from ahop_layers.separation import Separation


@torch.no_grad()
def association_maps(model: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, Tensor]:
    """Returns the association matrices of every adaptive layer in one forward pass.

    Args:
        model: a module that contains adaptive layers. Call ``model.eval()`` first to disable dropout.
        inputs, keywords: arguments of the forward pass.

    Returns:
        The matrix of each called layer, by name: ``(N, H, L, S)``, or ``(total, H, L)`` for packed bags. With update
        steps or repeated calls it is the last one. Modules that :func:`adapt_` adapted with ``by_hand`` keep their own
        softmax and have none.

    >>> import ahop_layers as ah
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2)
    >>> report = ah.adapt_(model)
    >>> {name: tuple(map.shape) for name, map in ah.association_maps(model, torch.randn(3, 5, 16)).items()}
    {'layers.0.self_attn': (3, 2, 5, 5), 'layers.1.self_attn': (3, 2, 5, 5)}
    """
    check_module(model=model)
    maps: dict[str, Tensor] = {}
    names: dict[nn.Module, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ADAPTIVE_LAYERS):
            # A layer with learned patterns contains another layer: report the outer one, which users defined.
            for part in layer.modules():
                names.setdefault(part, name)

    def keep(separation: nn.Module, args: Any, weights: Tensor) -> None:
        maps[names[separation]] = weights

    with ExitStack() as hooks:
        for part in names:
            if isinstance(part, Separation):
                hooks.callback(part.register_forward_hook(keep).remove)
        if "torch._dynamo" in sys.modules:  # compiled code ignores hooks that were registered later
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        model(*inputs, **keywords)
    if not maps:
        got = f"{type(model).__name__} that called none"
        if any(isinstance(part, CallAttention) for part in model.modules()):
            got += " with a separation: attention by hand keeps its own softmax"
        raise AHopError(f"expected a model that calls adaptive layers, got {got}")
    return maps
