"""association_maps: what every adaptive layer of a model attends to."""

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.attention.adaptive import Adaptive
from ahop_layers.errors import AHopError
from ahop_layers.hopfield.adaptive import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.separation import Separation

_LAYERS = (Adaptive, AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling)


@torch.no_grad()
def association_maps(model: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, Tensor]:
    """The association matrices of every adaptive layer, from one forward pass.

    Args:
        model: a module with adaptive layers inside; call its ``eval()`` first if its dropout should not act.
        inputs, keywords: what the model is called with.

    Returns:
        ``(N, H, L, S)``, or of packed bags ``(total, H, L)``, for the name of each layer that took part; with update
        steps or repeated calls, the last.

    Raises:
        AHopError: no adaptive layer took part.

    >>> import ahop_layers as ah
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2)
    >>> report = ah.adapt_(model)
    >>> {name: tuple(map.shape) for name, map in ah.association_maps(model, torch.randn(3, 5, 16)).items()}
    {'layers.0.self_attn': (3, 2, 5, 5), 'layers.1.self_attn': (3, 2, 5, 5)}
    """
    maps: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, weights: Tensor) -> None:
        maps[name] = weights

    with ExitStack() as hooks:
        taken: set[int] = set()
        for name, layer in model.named_modules():
            if isinstance(layer, _LAYERS):
                # A layer with learned patterns holds another layer: the outer name is the one that people know.
                for part in layer.modules():
                    if isinstance(part, Separation) and id(part) not in taken:
                        taken.add(id(part))
                        hooks.callback(part.register_forward_hook(partial(keep, name)).remove)
        if "torch._dynamo" in sys.modules:  # compiled code does not see hooks that came after it
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        model(*inputs, **keywords)
    if not maps:
        raise AHopError(f"expected a model that calls adaptive layers, got {type(model).__name__} that called none")
    return maps
