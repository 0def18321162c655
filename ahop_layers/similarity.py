"""AdaptiveSimilarity: the learned score as a module, how layers build one, and how to find those of a model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from ahop_layers.errors import AHopError, check_choice, check_floating, check_given_sizes, check_sizes, describe
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import check_bases

INITS = ("dot", "dis", "uniform")

SimilaritySource = nn.Module | Callable[[int, int | None], nn.Module]
"""A module that scores, or a function of ``(dim, num_heads)`` that makes one."""


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise an AHopError; as ``__prepare_scriptable__`` of a module, ``torch.jit.script`` calls it."""
    name = type(module).__name__
    raise AHopError(f"torch.jit.script does not support {name}: use torch.compile or torch.export instead")


class AdaptiveSimilarity(nn.Module):
    """Scores queries against keys by learned weights on their similarity footprints.

    ``score = sum over bases of beta_base * w_base . footprint_base(query - bias, key)``

    Args:
        dim: number of dimensions ``d`` of a query or key (of one head, where there are heads).
        num_heads: ``None`` for one set of weights, or ``H`` for a set per head.
        bases: the base similarities to combine.
        init: ``"dot"`` (the score is exactly the dot product), ``"dis"`` (exactly the negative squared distance),
            ``"uniform"`` (every entry of every footprint weighs 1/d), or a tensor shaped like ``w``.
        debias: learn a vector that is subtracted from every query, zero at the start.
        device, dtype: of the parameters.

    Learns:
        w ``([H,] n_bases, d)``, beta ``([H,] n_bases)``, and with ``debias`` bias ``([H,] d)``.

    Raises:
        AHopError: an argument that does not fit.

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
        # A copy: a parameter of another module must not become one of this.
        self.init = init.detach().clone() if isinstance(init, Tensor) else init
        heads = () if num_heads is None else (num_heads,)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w = nn.Parameter(torch.empty(*heads, len(self.bases), dim, **place))
        self.beta = nn.Parameter(torch.empty(*heads, len(self.bases), **place))
        self.bias = nn.Parameter(torch.empty(*heads, dim, **place)) if debias else None
        self._check_init()
        self.reset_parameters()

    def _check_init(self) -> None:
        if isinstance(self.init, Tensor):
            check_floating(init=self.init)
            if self.init.shape != self.w.shape:
                raise AHopError(f"init must have the shape of w, {describe(self.w)}, got {describe(self.init)}")
            return
        check_choice("init", self.init, INITS)
        if self.init != "uniform" and self.init not in self.bases:
            raise AHopError(f"init={self.init!r} needs {self.init!r} among the bases, got {self.bases}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to what ``init`` says."""
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.init, Tensor):
            self.w.copy_(self.init)
            self.beta.fill_(1.0)
        elif self.init == "uniform":
            self.w.fill_(1.0 / self.dim)
            self.beta.fill_(1.0)
        else:
            # All weight on the last entry of each footprint is the base similarity; beta picks the one base. The other
            # bases keep their unit weight, so their beta has a gradient from the first step.
            self.w.zero_()
            self.w[..., -1] = 1.0
            self.beta.zero_()
            self.beta[..., self.bases.index(self.init)] = 1.0

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Score ``query (..., [H,] L, d)`` against ``key (..., [H,] S, d)``: ``(..., [H,] L, S)``.

        Raises:
            AHopError: a shape, dtype or device that does not fit.
        """
        return adaptive_similarity(self.unbiased(query), key, self.beta.unsqueeze(-1) * self.w, self.bases)

    def unbiased(self, query: Tensor) -> Tensor:
        """``query (..., [H,] L, d)`` without the learned bias.

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
    """``query (..., [H,] L, d)`` less ``bias ([H,] d)``, where there is one."""
    return query if bias is None else query - bias.unsqueeze(-2).to(query.dtype)


class LazyAdaptiveSimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that learns its dimension from the first patterns it sees."""

    cls_to_become = AdaptiveSimilarity

    def __init__(self, num_heads: int, bases: Sequence[str], init: str | Tensor, debias: bool) -> None:
        super().__init__(1, num_heads, bases, init, debias)
        for name in ("w", "bias") if debias else ("w",):
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Wait until the dimension is known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Take the dimension of ``query (..., d)``."""
        self.dim = query.shape[-1]
        if self.has_uninitialized_params():
            for parameter, middle in ((self.w, (len(self.bases),)), (self.bias, ())):
                if isinstance(parameter, UninitializedParameter):
                    parameter.materialize((self.num_heads, *middle, self.dim))
            self.reset_parameters()


class Associator(nn.Module):
    """A module that scores queries against keys by its ``similarity``; None stands for the dot product."""

    __prepare_scriptable__ = refuse_script
    similarity: Any


def make_similarity(
    dim: int | None,
    num_heads: int,
    bases: Sequence[str] = ("dis", "dot"),
    init: str | Tensor = "dot",
    debias: bool = False,
    similarity: SimilaritySource | None = None,
) -> nn.Module:
    """Build the similarity of a layer.

    Args:
        dim: dimension of a head, or None where only the data tells it.
        num_heads: number of heads.
        bases, init, debias: see :class:`AdaptiveSimilarity`.
        similarity: a module to use in its place, or a function of ``(dim, num_heads)`` that makes one.

    Raises:
        AHopError: ``similarity`` is neither, or is given together with the arguments it replaces.

    >>> make_similarity(8, 2)
    AdaptiveSimilarity(8, num_heads=2, bases=('dis', 'dot'), init='dot', debias=False)
    """
    if similarity is None:
        if dim is None and isinstance(init, Tensor):
            dim = init.shape[-1]
        if dim is None:
            return LazyAdaptiveSimilarity(num_heads, bases, init, debias)
        return AdaptiveSimilarity(dim, num_heads, bases, init, debias)
    if isinstance(init, Tensor) or (tuple(bases), init, debias) != (("dis", "dot"), "dot", False):
        raise AHopError(
            f"similarity replaces bases, init and debias, got it together with"
            f" bases={tuple(bases)}, init={init!r}, debias={debias}"
        )
    if isinstance(similarity, nn.Module):
        return similarity
    if not callable(similarity):
        raise AHopError(f"similarity must be a module or a function of (dim, num_heads), got {similarity!r}")
    if dim is None:
        raise AHopError("a similarity made by a function needs the dimension of a head, got a layer without input_size")
    made = similarity(dim, num_heads)
    if not isinstance(made, nn.Module):
        raise AHopError(f"the function given as similarity must return a module, got {type(made).__name__}")
    return made


def named_similarities(module: nn.Module) -> dict[str, nn.Module]:
    """Every similarity inside a module by its name: that of each adaptive layer, and each AdaptiveSimilarity.

    >>> import ahop_layers as ah
    >>> list(named_similarities(nn.Sequential(nn.Linear(4, 8), ah.AdaptiveAttention(8, 2))))
    ['1.similarity']
    """
    parts = dict(module.named_modules())
    owned = {id(part.similarity) for part in parts.values() if isinstance(part, Associator)}
    return {name: part for name, part in parts.items() if id(part) in owned or isinstance(part, AdaptiveSimilarity)}


def similarity_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of every similarity inside a module, for a learning rate of their own.

    See :func:`~ahop_layers.parameter_groups` for an optimizer.

    Args:
        module: a layer or a model with adaptive layers inside.

    Returns:
        The parameters; an empty list where there is no similarity.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> [tuple(parameter.shape) for parameter in similarity_parameters(model)]
    [(1, 2, 8), (1, 2)]
    """
    found = {id(p): p for part in named_similarities(module).values() for p in part.parameters()}
    return list(found.values())


def add_warm_start(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> bool:
    """Complete a checkpoint of the layer that ``module`` replaced by the warm start of what it has besides.

    Nothing is added, and False returned, where the checkpoint has not all that such a layer has: what it is loaded for,
    with ``strict=False``, is then not the whole layer. A layer that has nothing else always gets its warm start.
    """
    added = ("similarity", "separation")
    own = [key for key in module.state_dict() if key != "scaling" and key.partition(".")[0] not in added]
    if not all(prefix + key in state_dict for key in own):
        return False
    device = state_dict[prefix + own[0]].device if own else None
    for name in added:
        part: Any = getattr(module, name)
        if part is not None and not any(key.startswith(f"{prefix}{name}.") for key in state_dict):
            fresh = deepcopy(part)
            if device is not None and any(parameter.is_meta for parameter in fresh.parameters()):
                fresh = fresh.to_empty(device=device)
            fresh.reset_parameters()
            state_dict.update({f"{prefix}{name}.{key}": value for key, value in fresh.state_dict().items()})
    return True
