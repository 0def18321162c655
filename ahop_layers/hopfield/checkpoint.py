"""Back to hflayers: state dicts that it loads, and adaptive layers made plain."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ahop_layers.errors import AHopError, check_module
from ahop_layers.hopfield.adaptive import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.hopfield.base import OwnHopfield
from ahop_layers.hopfield.layers import OwnHopfieldLayer, OwnHopfieldPooling
from ahop_layers.ops.reference import fold
from ahop_layers.similarity import AdaptiveSimilarity, Associator

_PLAIN: dict[type, type] = {
    AdaptiveHopfield: OwnHopfield,
    AdaptiveHopfieldLayer: OwnHopfieldLayer,
    AdaptiveHopfieldPooling: OwnHopfieldPooling,
}


@torch.no_grad()
def is_dot_product(similarity: nn.Module | None) -> bool:
    """Returns whether a similarity computes the dot product for all patterns; an unknown class does not count.

    >>> similarity = AdaptiveSimilarity(8, blocks=[None, 4])
    >>> is_dot_product(similarity), is_dot_product(AdaptiveSimilarity(8, init="dis"))
    (True, False)
    """
    if similarity is None:
        return True
    if not isinstance(similarity, AdaptiveSimilarity):
        return False
    if any(is_lazy(parameter) for parameter in similarity.parameters()):
        return isinstance(similarity.init, str) and similarity.init == "dot"
    if similarity.bias is not None and bool(similarity.bias.any()):
        return False
    total: Any = 0.0
    for resolution, blocks in enumerate(similarity.blocks):
        for base, folded in zip(
            similarity.bases, fold(similarity.footprint_weight(resolution)).unbind(-2), strict=True
        ):
            differs = base != "dot" or blocks.normalize or bool((folded != folded[..., :1]).any())
            if differs and bool(folded.any()):
                return False
            total = total + (folded[..., 0] if base == "dot" else 0.0)
    return bool((torch.as_tensor(total) == 1).all())


def hflayers_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a model for its original with hflayers, which loads it with ``strict=True``.

    Args:
        model: a model with adaptive layers whose similarity is still the dot product, for example one that was trained
            with frozen similarities.

    Returns:
        The state dict without the entries of similarities and separations.

    Raises:
        AHopError: a similarity is no longer the dot product, a separation is not softmax, or a scaling is trained.

    >>> import ahop_layers as ah
    >>> sorted(ah.hflayers_state_dict(ah.AdaptiveHopfield(8, disable_out_projection=True)))[:2]
    ['association_core.in_proj_bias', 'association_core.in_proj_weight']
    """
    check_module(model=model)
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, part in model.named_modules():
        if isinstance(part, Associator):
            if not is_dot_product(part.similarity):
                raise AHopError(f"{name}.similarity must be the dot product for hflayers, got a learned similarity")
            separation = getattr(getattr(part, "separation", None), "name", "softmax")
            if separation != "softmax":
                raise AHopError(f"{name}.separation must be softmax for hflayers, got {separation!r}")
            if isinstance(getattr(part, "scaling", None), nn.Parameter):
                raise AHopError(f"{name}.scaling must be fixed for hflayers, got a parameter")
            added = tuple(f"{name}.{each}" if name else each for each in part._added)
            state = {key: value for key, value in state.items() if not key.startswith(added)}
    return state


def make_plain(model: nn.Module) -> dict[str, nn.Module]:
    """Removes the similarities of Hopfield layers that were built adaptive, and returns these layers by name."""
    layers = (AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling)
    found: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, layers)}
    for part in found.values():
        if isinstance(part, AdaptiveHopfield):
            part.association_core.similarity = None
        part.__class__ = _PLAIN.get(type(part), type(part))
    return found
