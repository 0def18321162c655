"""How layers build their similarity, and how to find every similarity of a model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from ahop_layers.blocks import resolutions
from ahop_layers.errors import AHopError, check_module, check_pair
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BlocksArgument, Init, refuse_script

SimilaritySource = nn.Module | Callable[[int, int | None], nn.Module]
"""A similarity module, or a factory ``f(dim, num_heads)`` that returns one."""


class LazyAdaptiveSimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that infers ``dim`` from the first query."""

    cls_to_become = AdaptiveSimilarity

    def __init__(
        self, num_heads: int, bases: Sequence[str], init: Init, debias: bool, blocks: BlocksArgument = None
    ) -> None:
        # A dimension that every number of blocks divides stands in for the unknown one.
        counts = [entry.blocks for entry in resolutions(blocks) if entry.blocks is not None]
        super().__init__(2 * lcm(*counts) if counts else 1, num_heads, bases, init, debias, blocks)
        unknown = [w for (w, _), entry in zip(self.parameter_names(), self.blocks, strict=True) if entry.blocks is None]
        for name in [*unknown, "bias"] if debias else unknown:
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Resets all parameters once their shapes are known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Infers ``dim`` from ``query (..., d)`` and initializes the parameters."""
        check_pair(query, key)
        for entry in self.blocks:
            entry.count(query.shape[-1])  # raises if the blocks do not fit
        self.dim, heads = query.shape[-1], (self.num_heads or 1,)
        if self.has_uninitialized_params():
            for name, parameter in list(self.named_parameters(recurse=False)):
                if isinstance(parameter, UninitializedParameter):
                    middle = () if name == "bias" else (len(self.bases),)
                    parameter.materialize((*heads, *middle, self.dim))
            self.reset_parameters()


class SimilarityList(nn.ModuleList):
    """The similarities of a module that attends with several shapes of heads."""

    def reset_parameters(self) -> None:
        """Resets each similarity that has initial values."""
        for part in self:
            reset: Any = getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()


class Associator(nn.Module):
    """A module that scores queries against keys with its ``similarity``; None means the dot product.

    It loads state dicts of the layer it replaces: ``_added`` names the submodules and parameters that such a state dict
    does not have.
    """

    __prepare_scriptable__ = refuse_script
    similarity: Any
    _added: ClassVar[tuple[str, ...]] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Adds initial similarity and separation values to a state dict of the original layer, then loads it.

        A state dict that lacks a key of the original layer is loaded unchanged: with ``strict=False``, a part of a
        layer must not reset its similarity.
        """
        original = [key for key in self.state_dict() if key.partition(".")[0] not in self._added]
        if all(prefix + key in state_dict for key in original):
            device = state_dict[prefix + original[0]].device if original else None
            for name in self._added:
                part = getattr(self, name, None)
                if isinstance(part, nn.Parameter):
                    state_dict.setdefault(prefix + name, part.detach())
                elif isinstance(part, nn.Module) and not any(key.startswith(f"{prefix}{name}.") for key in state_dict):
                    values = _initial_values(part, device)
                    state_dict.update({f"{prefix}{name}.{key}": value for key, value in values.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def _initial_values(module: nn.Module, device: torch.device | None) -> dict[str, Tensor]:
    """State dict of a module after ``reset_parameters``; a module without that method keeps its current values."""
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    fresh: Any = deepcopy(module)
    if not hasattr(fresh, "reset_parameters"):
        return {} if on_meta else fresh.state_dict()
    if on_meta and device is not None:
        fresh = fresh.to_empty(device=device)
    fresh.reset_parameters()
    values: dict[str, Tensor] = fresh.state_dict()
    return values


@dataclass(frozen=True, eq=False)
class SimilarityOptions:
    """From what an adaptive layer makes its similarity and its separation.

    Public functions and classes build it from their keywords. None, or False, means that an option is not given.

    Args:
        bases, init, debias, blocks: see :class:`AdaptiveSimilarity`, which has the defaults.
        separation: the name of a separation, or a module. None means softmax.
        similarity: a module to use instead of an :class:`AdaptiveSimilarity`, or a factory ``f(dim, num_heads)`` that
            returns one.

    >>> SimilarityOptions(blocks=4).make_similarity(8, 2)
    AdaptiveSimilarity(8, num_heads=2, bases=('dis', 'dot'), init='dot', debias=False, blocks=4)
    """

    bases: Sequence[str] | None = None
    init: Init | None = None
    debias: bool = False
    separation: str | Separation | None = None
    similarity: SimilaritySource | None = None
    blocks: BlocksArgument = None

    def copied(self) -> "SimilarityOptions":
        """Returns the options with copies of their modules, so that no two layers share one."""
        modules = {"separation": self.separation, "similarity": self.similarity}
        copies: Any = {name: deepcopy(each) for name, each in modules.items() if isinstance(each, nn.Module)}
        return replace(self, **copies)

    def make_separation(self, num_heads: int | None) -> Separation:
        """Returns the separation of a layer; ``num_heads`` is for one that learns."""
        if isinstance(self.separation, Separation):
            return self.separation
        return Separation("softmax" if self.separation is None else self.separation, num_heads)

    def make_similarity(self, dim: int | None, num_heads: int | None) -> nn.Module:
        """Returns the similarity of a layer.

        Args:
            dim: dimension of a head, or None to infer it from the first query.
            num_heads: number of heads; None for one set of weights, with a given ``dim``.

        Raises:
            AHopError: an option is invalid, or ``similarity`` is given together with an option that it replaces.
        """
        if self.similarity is None:
            bases = ("dis", "dot") if self.bases is None else self.bases
            init = "dot" if self.init is None else self.init
            dim = _known_dim(init, self.blocks) if dim is None else dim
            if dim is None:
                return LazyAdaptiveSimilarity(num_heads or 1, bases, init, self.debias, self.blocks)
            return AdaptiveSimilarity(dim, num_heads, bases, init, self.debias, self.blocks)
        if not isinstance(self.similarity, nn.Module) and not callable(self.similarity):
            raise AHopError(f"similarity must be a module or a factory f(dim, num_heads), got {self.similarity!r}")
        replaced = {"bases": self.bases, "init": self.init, "debias": self.debias or None, "blocks": self.blocks}
        given = ", ".join(f"{name}={value!r}" for name, value in replaced.items() if value is not None)
        if given:
            raise AHopError(f"similarity replaces bases, init, debias and blocks, got similarity together with {given}")
        if isinstance(self.similarity, nn.Module):
            return self.similarity
        if dim is None:
            raise AHopError("a similarity factory needs the dimension of a head, got a layer that infers it")
        built = self.similarity(dim, num_heads)
        if not isinstance(built, nn.Module):
            raise AHopError(f"the similarity factory must return a module, got {type(built).__name__}")
        return built


def _known_dim(init: Init, blocks: BlocksArgument) -> int | None:
    """Returns the dimension that a tensor of blocks, or a tensor of initial weights for all dimensions, determines."""
    entries = resolutions(blocks)
    tensors = list(init) if isinstance(init, (list, tuple)) else [init]
    dims = [entry.dim for entry in entries]
    for entry, tensor in zip(entries, tensors, strict=False):
        if entry.blocks is None and isinstance(tensor, Tensor) and tensor.ndim:
            dims.append(tensor.shape[-1])
    return next((dim for dim in dims if dim is not None), None)


def named_similarities(module: nn.Module) -> dict[str, nn.Module]:
    """Finds the similarity of every adaptive layer in a module, and every other AdaptiveSimilarity, by name.

    >>> import ahop_layers as ah
    >>> list(named_similarities(nn.Sequential(nn.Linear(4, 8), ah.AdaptiveAttention(8, 2))))
    ['1.similarity']
    """
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

    Args:
        module: a layer, or a model that contains adaptive layers.

    Returns:
        The parameters, or an empty list if there is no similarity.

    Raises:
        AHopError: ``module`` is not a module.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> [tuple(parameter.shape) for parameter in similarity_parameters(model)]
    [(1, 2, 8), (1, 2)]
    """
    found = {id(p): p for part in named_similarities(module).values() for p in part.parameters()}
    return list(found.values())
