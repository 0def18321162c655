"""Modules with a similarity: how they load state dicts, and how the similarities of a model are found."""

from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ahop_layers.errors import check_module
from ahop_layers.similarity.adaptive import AdaptiveSimilarity


def reset(module: nn.Module | None) -> None:
    """Resets a module to its initial values, if it has any: a module of the user may have none."""
    reset_parameters: Any = getattr(module, "reset_parameters", None)
    if reset_parameters is not None:
        reset_parameters()


class SimilarityList(nn.ModuleList):
    """The similarities of a module that attends with several shapes of heads."""

    def reset_parameters(self) -> None:
        """Resets each similarity."""
        for part in self:
            reset(part)


class Associator(nn.Module):
    """A module that scores queries against keys with its ``similarity``; None means the dot product.

    It loads state dicts of the layer it replaces: ``_added`` names the submodules and parameters that such a state dict
    does not have.
    """

    similarity: Any
    _added: ClassVar[tuple[str, ...]] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        """Adds initial similarity and separation values to a state dict of the original layer, then loads it.

        Such a state dict has every key of that layer, and no key of a similarity. Any other one is loaded unchanged:
        a part of a layer must not reset the rest. If that layer has no keys, only metadata tell whether it was there.
        """
        original = [key for key in self.state_dict() if key.partition(".")[0] not in self._added]
        adaptive = any(key.startswith(f"{prefix}similarity.") for key in state_dict)
        if not adaptive and all(prefix + key in state_dict for key in original):
            device = state_dict[prefix + original[0]].device if original else None
            for name in self._added:
                part = getattr(self, name, None)
                if isinstance(part, nn.Parameter):
                    state_dict.setdefault(prefix + name, part.detach())
                elif isinstance(part, nn.Module):
                    values = _initial_values(part, device) if original or metadata else part.state_dict()
                    for key, value in values.items():
                        state_dict.setdefault(f"{prefix}{name}.{key}", value)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


def _initial_values(module: nn.Module, device: torch.device | None) -> dict[str, Tensor]:
    """Returns the state dict of a module after a reset; a module without initial values keeps its current ones."""
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    if on_meta and not hasattr(module, "reset_parameters"):
        return {}
    fresh = deepcopy(module)
    if on_meta and device is not None:
        fresh = fresh.to_empty(device=device)
    reset(fresh)
    return fresh.state_dict()


def named_similarities(module: nn.Module) -> dict[str, nn.Module]:
    """Finds the similarity of every adaptive layer in a module, and every other AdaptiveSimilarity, by name."""
    check_module(module=module)
    parts = dict(module.named_modules())
    owned = set()
    for part in parts.values():
        if isinstance(part, Associator):
            similarity = getattr(part, "similarity", None)
            owned |= {id(each) for each in (similarity if isinstance(similarity, SimilarityList) else [similarity])}
    return {name: part for name, part in parts.items() if id(part) in owned or isinstance(part, AdaptiveSimilarity)}


def similarity_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of every similarity in a module, for example to give them their own learning rate.

    :func:`~ahop_layers.parameter_groups` builds the groups of an optimizer from them.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> [tuple(parameter.shape) for parameter in similarity_parameters(model)]
    [(1, 2, 8), (1, 2)]
    """
    found = {id(p): p for part in named_similarities(module).values() for p in part.parameters()}
    return list(found.values())
