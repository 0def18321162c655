"""AdaptiveSimilarity, how layers build their similarity, and how to find every similarity of a model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from ahop_layers.errors import (
    AHopError,
    check_choice,
    check_floating,
    check_given_sizes,
    check_module,
    check_sizes,
    describe,
)
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import check_bases

INITS = ("dot", "dis", "uniform")

SimilaritySource = nn.Module | Callable[[int, int | None], nn.Module]
"""A similarity module, or a factory ``f(dim, num_heads)`` that returns one."""


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise an AHopError; as ``__prepare_scriptable__`` of a module, ``torch.jit.script`` calls it."""
    name = type(module).__name__
    raise AHopError(f"torch.jit.script does not support {name}: use torch.compile or torch.export instead")


class AdaptiveSimilarity(nn.Module):
    """Scores queries against keys as a learned weighted sum of their similarity footprints.

    ``score = sum over bases of beta_base * w_base . footprint_base(query - bias, key)``

    Args:
        dim: dimension ``d`` of a query or key; with heads, the dimension of one head.
        num_heads: ``None`` for one set of weights, or ``H`` for one set per head.
        bases: names of the base similarities to combine.
        init: ``"dot"`` (the score equals the dot product), ``"dis"`` (it equals the negative squared distance),
            ``"uniform"`` (every footprint entry has weight 1/d), or a tensor with the shape of ``w``.
        debias: whether to subtract a learned vector from every query. It is initialized to zero.
        device, dtype: device and dtype of the parameters.

    Attributes:
        w: learned weights of the footprint entries, ``([H,] n_bases, d)``.
        beta: learned factors of the bases, ``([H,] n_bases)``.
        bias: with ``debias``, the learned vector ``([H,] d)``; otherwise None.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> similarity = ah.AdaptiveSimilarity(16)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-5)
    True
    >>> similarity
    AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=False)
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        bases: Sequence[str] = ("dis", "dot"),
        init: str | Tensor = "dot",
        debias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim)
        check_given_sizes(num_heads=num_heads)
        self.dim, self.num_heads, self.bases = dim, num_heads, check_bases(bases)
        # A copy, because assigning another module's parameter would register it here as well.
        self.init = init.detach().clone() if isinstance(init, Tensor) else init
        heads = () if num_heads is None else (num_heads,)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w = nn.Parameter(torch.empty(*heads, len(self.bases), dim, **factory))
        self.beta = nn.Parameter(torch.empty(*heads, len(self.bases), **factory))
        self.bias = nn.Parameter(torch.empty(*heads, dim, **factory)) if debias else None
        self._check_init()
        self.reset_parameters()

    def _check_init(self) -> None:
        if isinstance(self.init, Tensor):
            check_floating(init=self.init)
            if self.init.shape != self.w.shape:
                raise AHopError(f"init must have the shape of w, {describe(self.w)}, got {describe(self.init)}")
        elif not isinstance(self.init, str):
            raise AHopError(f"init must be a string or a tensor, got {type(self.init).__name__}")
        else:
            check_choice("init", self.init, INITS)
            if self.init != "uniform" and self.init not in self.bases:
                raise AHopError(f"init={self.init!r} needs {self.init!r} among the bases, got {self.bases}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values."""
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.init, Tensor):
            self.w.copy_(self.init)
            self.beta.fill_(1.0)
        elif self.init == "uniform":
            self.w.fill_(1.0 / self.dim)
            self.beta.fill_(1.0)
        else:
            # The last entry of a footprint is the base similarity itself, and beta selects one base. The weights of
            # the other bases are initialized alike, so that their beta has a gradient from the first step.
            self.w.zero_()
            self.w[..., -1] = 1.0
            self.beta.zero_()
            self.beta[..., self.bases.index(self.init)] = 1.0

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Computes the scores ``(..., [H,] L, S)`` of ``query (..., [H,] L, d)`` and ``key (..., [H,] S, d)``.

        Raises:
            AHopError: a shape, dtype or device is invalid.
        """
        return adaptive_similarity(self.unbiased(query), key, self.beta.unsqueeze(-1) * self.w, self.bases)

    def unbiased(self, query: Tensor) -> Tensor:
        """Subtracts the learned bias, if any, from ``query (..., [H,] L, d)``.

        >>> similarity = AdaptiveSimilarity(3, debias=True)
        >>> similarity.unbiased(torch.ones(1, 3)) + similarity.bias
        tensor([[1., 1., 1.]], grad_fn=<AddBackward0>)
        """
        return without_bias(query, self.bias)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        init = "tensor" if isinstance(self.init, Tensor) else repr(self.init)
        debias = self.bias is not None
        return f"{self.dim}, num_heads={self.num_heads}, bases={self.bases}, init={init}, debias={debias}"


def without_bias(query: Tensor, bias: Tensor | None) -> Tensor:
    """Subtracts ``bias ([H,] d)``, if any, from ``query (..., [H,] L, d)``."""
    return query if bias is None else query - bias.unsqueeze(-2).to(query.dtype)


class LazyAdaptiveSimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that infers ``dim`` from the first query."""

    cls_to_become = AdaptiveSimilarity

    def __init__(self, num_heads: int, bases: Sequence[str], init: str | Tensor, debias: bool) -> None:
        super().__init__(1, num_heads, bases, init, debias)
        for name in ("w", "bias") if debias else ("w",):
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Resets all parameters once their shapes are known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Infers ``dim`` from ``query (..., d)`` and initializes the parameters."""
        self.dim = query.shape[-1]
        if self.has_uninitialized_params():
            for parameter, middle in ((self.w, (len(self.bases),)), (self.bias, ())):
                if isinstance(parameter, UninitializedParameter):
                    parameter.materialize((self.num_heads, *middle, self.dim))
            self.reset_parameters()


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


def make_similarity(
    dim: int | None,
    num_heads: int,
    bases: Sequence[str] = ("dis", "dot"),
    init: str | Tensor = "dot",
    debias: bool = False,
    similarity: SimilaritySource | None = None,
) -> nn.Module:
    """Builds the similarity of a layer.

    Args:
        dim: dimension of a head, or None to infer it from the first query.
        num_heads: number of heads.
        bases, init, debias: see :class:`AdaptiveSimilarity`.
        similarity: a module to use instead of an :class:`AdaptiveSimilarity`, or a factory ``f(dim, num_heads)`` that
            returns one.

    Raises:
        AHopError: ``similarity`` is neither, or is given together with ``bases``, ``init`` or ``debias``.

    >>> make_similarity(8, 2)
    AdaptiveSimilarity(8, num_heads=2, bases=('dis', 'dot'), init='dot', debias=False)
    """
    if similarity is None:
        if dim is None and isinstance(init, Tensor) and init.ndim:
            dim = init.shape[-1]
        if dim is None:
            return LazyAdaptiveSimilarity(num_heads, bases, init, debias)
        return AdaptiveSimilarity(dim, num_heads, bases, init, debias)
    if not isinstance(similarity, nn.Module) and not callable(similarity):
        raise AHopError(f"similarity must be a module or a factory f(dim, num_heads), got {similarity!r}")
    if check_bases(bases) != ("dis", "dot") or not isinstance(init, str) or init != "dot" or debias:
        given = f"bases={bases!r}, init={init!r}, debias={debias!r}"
        raise AHopError(f"similarity replaces bases, init and debias, got similarity together with {given}")
    if isinstance(similarity, nn.Module):
        return similarity
    if dim is None:
        raise AHopError("a similarity factory needs the dimension of a head, got a layer that infers it from its input")
    built = similarity(dim, num_heads)
    if not isinstance(built, nn.Module):
        raise AHopError(f"the similarity factory must return a module, got {type(built).__name__}")
    return built


def named_similarities(module: nn.Module) -> dict[str, nn.Module]:
    """Finds the similarity of every adaptive layer in a module, and every other AdaptiveSimilarity, by name.

    >>> import ahop_layers as ah
    >>> list(named_similarities(nn.Sequential(nn.Linear(4, 8), ah.AdaptiveAttention(8, 2))))
    ['1.similarity']
    """
    check_module(module=module)
    parts = dict(module.named_modules())
    owned = {id(getattr(part, "similarity", None)) for part in parts.values() if isinstance(part, Associator)}
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
