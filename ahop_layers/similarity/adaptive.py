"""Similarities: AdaptiveSimilarity, how layers build one, and how to find those of a model."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import lcm
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from ahop_layers.errors import (
    AHopError,
    broadcast_batch,
    check_choice,
    check_floating,
    check_given_sizes,
    check_module,
    check_pair,
    check_sizes,
    describe,
)
from ahop_layers.ops.operators import score_pairs
from ahop_layers.ops.reference import BASES, block_sums, check_bases, fold, known_blocks, pair_values, stretched, unfold
from ahop_layers.separation import Separation
from ahop_layers.similarity.blocks import Blocks, arrange, known_constant, normalize, resolutions, restore, stored_norm
from ahop_layers.similarity.widths import differences, quantiles

INITS = ("dot", "dis", "l1", "uniform")  # built-in values of ``init``; the name of a registered base is one as well
Init = str | Tensor | Sequence[Tensor]
"""The initial similarity: the name of a base, ``"uniform"``, or weights; for several resolutions a list of weights."""
# The name of a base, or ``("near", q)``: a base that saturates, and a quantile of differences that is its width.
BaseArgument = str | tuple[str, float]
BlocksArgument = Any
"""None, an integer, an integer tensor or array, a :class:`~ahop_layers.Blocks`, or a list or tuple of these."""
SimilaritySource = nn.Module | Callable[[int, int | None], nn.Module]
"""A similarity module, or a factory ``f(dim, num_heads)`` that returns one."""


def refuse_script(module: nn.Module) -> NoReturn:
    """Raises an AHopError; as ``__prepare_scriptable__`` of a module, ``torch.jit.script`` calls it."""
    name = type(module).__name__
    raise AHopError(f"torch.jit.script does not support {name}: use torch.compile or torch.export instead")


class AdaptiveSimilarity(nn.Module):
    """Scores queries against keys as a learned weighted sum of their similarity footprints.

    ``score = sum over bases of beta_base * w_base . footprint_base(query - bias, key)``

    Args:
        dim: dimension ``d`` of a query or key; with heads, the dimension of one head.
        num_heads: ``None`` for one set of weights, or ``H`` for one set per head.
        bases: names of the base similarities to combine. ``("near", q)`` is a base that saturates: a wrong value costs
            the same however wrong it is. Its width is the quantile q, between 0 and 1, of the differences between the
            keys of :meth:`fix_widths_`; a memory calls it for its patterns. Several widths may be combined.
        init: the name of one of the bases (the score equals that base similarity, for ``"dot"`` the dot product),
            ``"uniform"`` (every footprint entry has weight 1/n), a tensor with the shape of ``w``, or for several
            resolutions a list of such tensors.
        debias: whether to subtract a learned vector from every query. It is initialized to zero.
        blocks: the blocks of dimensions over which similarities are summed before they are sorted. None makes every
            dimension a block. An integer n, a divisor of d, means n consecutive blocks of equal width. An integer
            tensor or array ``(dim,)`` names the block of each dimension, from 0 to n - 1; see
            :func:`~ahop_layers.patches`. :class:`~ahop_layers.Blocks` has further options. A list or tuple of these
            means several resolutions: their scores are added, and each has its own weights. The name of a base as
            ``init`` then applies to the first one, and the others have ``beta`` 0.
        device, dtype: device and dtype of the parameters.

    Attributes:
        w: learned weights of the footprint entries, ``([H,] n_bases, n)``; for several resolutions ``w_0``, ``w_1``, …
        beta: learned factors of the bases, ``([H,] n_bases)``; for several resolutions ``beta_0``, ``beta_1``, …
        bias: with ``debias``, the learned vector ``([H,] d)``; otherwise None.
        widths: the width of each base ``(n_bases,)``, 1 for a base without one; None if no base saturates.
        units: the unit of each dimension ``(d,)``, in which query and key are compared; None if all units are 1.
        blocks: one :class:`~ahop_layers.Blocks` for each resolution.

    >>> import torch, ahop_layers as ah
    >>> similarity = ah.AdaptiveSimilarity(16)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-5)
    True
    >>> similarity
    AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=False)
    """

    __prepare_scriptable__ = refuse_script
    w: nn.Parameter
    beta: nn.Parameter
    blocks: tuple[Blocks, ...]
    widths: Tensor | None
    units: Tensor | None

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        bases: Sequence[BaseArgument] = ("dis", "dot"),
        init: Init = "dot",
        debias: bool = False,
        blocks: BlocksArgument = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim)
        check_given_sizes(num_heads=num_heads)
        self.dim, self.num_heads, self.bases = dim, num_heads, _check_bases(bases)
        self.names = tuple(base if isinstance(base, str) else base[0] for base in self.bases)
        self.blocks = resolutions(blocks)
        # Copies, because assigning another module's parameter would register it here as well.
        self.init = _map_tensors(lambda tensor: tensor.detach().clone(), init)
        heads = () if num_heads is None else (num_heads,)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for index, (entry, (w, beta)) in enumerate(zip(self.blocks, self.parameter_names(), strict=True)):
            weights = nn.Parameter(torch.empty(*heads, len(self.bases), entry.count(dim), **factory))
            self.register_parameter(w, weights)
            self.register_parameter(beta, nn.Parameter(torch.empty(*heads, len(self.bases), **factory)))
            if entry.named is not None:
                self.register_buffer(f"blocks_{index}", torch.empty_like(entry.named, device=weights.device))
                self.register_buffer(f"_gather_{index}", None, persistent=False)
            if entry.normalize:
                self.register_buffer(f"norm_{index}", torch.zeros((), **factory))
        self.bias = nn.Parameter(torch.empty(*heads, dim, **factory)) if debias else None
        saturates = any(BASES[name].saturates for name in self.names)
        self.register_buffer("widths", torch.ones(len(self.bases), **factory) if saturates else None)
        self.register_buffer("units", None)
        self._check_init()
        self.reset_parameters()

    def parameter_names(self) -> list[tuple[str, str]]:
        """Returns the names of the weights and of the factors of every resolution."""
        several = [(f"w_{index}", f"beta_{index}") for index in range(len(self.blocks))]
        return several if len(several) > 1 else [("w", "beta")]

    def footprint_weight(self, resolution: int = 0) -> Tensor:
        """Returns ``beta * w`` of one resolution, ``([H,] n_bases, n)``.

        >>> AdaptiveSimilarity(6, blocks=2).footprint_weight()
        tensor([[0., 0.],
                [0., 1.]], grad_fn=<MulBackward0>)
        """
        w, beta = (getattr(self, name) for name in self.parameter_names()[resolution])
        return beta.unsqueeze(-1) * w

    @torch.no_grad()
    def set_ranks_(self, weights: Sequence[Tensor]) -> None:
        """Sets the weights of sorted similarities, which are not cumulated: ``([H,] n_bases, n)`` for each resolution.

        >>> similarity = AdaptiveSimilarity(3, bases=("l1",), init="l1")
        >>> similarity.set_ranks_([torch.tensor([[1.0, 1.0, 0.0]])])
        >>> similarity(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 9.0]])).item()
        -3.0
        """
        for (w, beta), folded in zip(self.parameter_names(), weights, strict=True):
            getattr(self, w).copy_(unfold(folded))
            getattr(self, beta).fill_(1.0)

    def _check_init(self) -> None:
        if isinstance(self.init, str):
            check_choice("init", self.init, tuple(dict.fromkeys((*INITS, *BASES))))
            if self.init != "uniform" and self.init not in self.bases:
                raise AHopError(f"init={self.init!r} needs {self.init!r} among the bases, got {self.bases}")
            return
        if not isinstance(self.init, (Tensor, list, tuple)):
            raise AHopError(f"init must be a string or a tensor, got {type(self.init).__name__}")
        tensors, names = [self.init] if isinstance(self.init, Tensor) else self.init, self.parameter_names()
        if len(tensors) != len(names):
            raise AHopError(f"init must have one tensor for each of {len(names)} resolutions, got {len(tensors)}")
        for (name, _), tensor in zip(names, tensors, strict=True):
            check_floating(init=tensor)
            shape = tuple(getattr(self, name).shape)
            if tensor.shape != shape:
                raise AHopError(f"init must have the shape of {name}, {shape}, got {describe(tensor)}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values."""
        if self.bias is not None:
            self.bias.zero_()
        if self.widths is not None:
            self.widths.fill_(1.0)
        for index, (entry, names) in enumerate(zip(self.blocks, self.parameter_names(), strict=True)):
            w, beta = (getattr(self, name).fill_(1.0) for name in names)
            if not isinstance(self.init, str):
                w.copy_(self.init if isinstance(self.init, Tensor) else self.init[index])
            elif self.init == "uniform":
                w.fill_(1.0 / w.shape[-1])
            else:
                # The last entry of a footprint is the base similarity itself, and beta selects one base of the first
                # resolution. The weights of the others are initialized alike, so that their beta has a gradient from
                # the first step.
                w[..., :-1] = 0.0
                beta.zero_()
                beta[..., self.bases.index(self.init)] = float(index == 0)
            if entry.named is not None:
                getattr(self, f"blocks_{index}").copy_(entry.named)
            if entry.normalize:
                getattr(self, f"norm_{index}").zero_()
        self._set_gathers()

    def _set_gathers(self) -> None:
        """Derives the index that arranges dimensions as consecutive blocks from the blocks of each resolution."""
        for index, entry in enumerate(self.blocks):
            if entry.named is not None:
                gather, device = entry.gather(), getattr(self, f"blocks_{index}").device
                setattr(self, f"_gather_{index}", None if gather is None else gather.to(device))

    def base_names(self) -> list[str]:
        """Returns the bases as text, such as ``near 0.1``."""
        return [base if isinstance(base, str) else f"{base[0]} {base[1]!r}" for base in self.bases]

    def get_extra_state(self) -> Tensor:
        """Returns the names of the bases in UTF-8, which a state dict contains under ``_extra_state``."""
        return torch.tensor(list(",".join(self.base_names()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raises unless a state dict names the bases of this similarity."""
        given = bytes(state.to(torch.uint8).flatten().tolist()).decode(errors="replace").split(",")
        if given != self.base_names():
            expected, got = ", ".join(self.base_names()), ", ".join(given)
            raise AHopError(f"the state dict must have the bases {expected}, got {got}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads a state dict, and takes over other blocks of the same number.

        Raises before anything is changed if the bases or the number of blocks differ, or a value is not finite.
        """
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        given = {name: value for name, value in given.items() if isinstance(value, Tensor) and not is_lazy(value)}
        if "_extra_state" in given:
            self.set_extra_state(given["_extra_state"])
        blocks = list(self.blocks)
        for index, (entry, (w, _)) in enumerate(zip(self.blocks, self.parameter_names(), strict=True)):
            weight, numbers = self._parameters.get(w), given.get(f"blocks_{index}")
            if w in given and weight is not None and not is_lazy(weight):
                _check_count(prefix + w, given[w].shape[-1:].numel(), weight.shape[-1])
            if numbers is not None and not numbers.is_meta:
                blocks[index] = Blocks(numbers, entry.normalize)
                _check_count(f"{prefix}blocks_{index}", blocks[index].count(self.dim), entry.count(self.dim))
        check_state(self, state_dict, prefix)
        units = given.get("units")
        self.units = None if units is None else torch.empty_like(units, device=next(self.parameters()).device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.blocks = tuple(blocks)
        self._set_gathers()

    def gathers(self) -> list[Tensor | None]:
        """Returns the index of each resolution that arranges its blocks, or None where they are consecutive."""
        return [self._buffers.get(f"_gather_{index}") for index in range(len(self.blocks))]

    def sources(self) -> list[Tensor]:
        """Returns the tensors by which :meth:`arrange` makes copies of keys; none if no copy is needed."""
        return [gather for gather in self.gathers() if gather is not None]

    def arrange(self, key: Tensor) -> list[Tensor | None]:
        """Returns the keys as each resolution arranges them, or None where its blocks are consecutive."""
        return [None if gather is None else arrange(key, gather) for gather in self.gathers()]

    def forward(
        self, query: Tensor, key: Tensor, arranged: Sequence[Tensor | None] | None = None, missing: bool = False
    ) -> Tensor:
        """Computes the scores ``(..., [H,] L, S)`` of ``query (..., [H,] L, d)`` and ``key (..., [H,] S, d)``.

        Args:
            query, key: floating-point tensors whose batch dimensions broadcast.
            arranged: what :meth:`arrange` returned for the keys, so that keys that do not change need not be arranged
                in each call; None arranges them.
            missing: NaN is an unknown value, see :func:`~ahop_layers.adaptive_similarity`; False gives NaN. Blocks are
                then normalized by the values that both sides know. A pair without a known block in one of the
                resolutions has the score -inf.
        """
        query, key = self._compared(query, key)
        keys = [None] * len(self.blocks) if arranged is None else arranged
        scores = [self._score(index, query, key, keys[index], missing) for index in range(len(self.blocks))]
        return reduce(torch.add, scores)

    def _compared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Checks query and key, subtracts the bias, and divides by the units."""
        self._check_rows(query, key)
        query = self.unbiased(query)
        if self.units is None:
            return query, key
        return (query / self.units).to(query.dtype), (key / self.units).to(key.dtype)

    def is_single(self) -> bool:
        """Returns whether :attr:`w`, :attr:`beta` and :meth:`compared` are all that a score needs.

        That is so for one resolution of built-in bases without widths, whose blocks are then consecutive.
        """
        built_in = all(BASES[name].slopes is not None for name in self.names) and self.widths is self.units is None
        own = all(getattr(type(self), name) is getattr(AdaptiveSimilarity, name) for name in ("forward", "_score"))
        return own and len(self.blocks) == 1 and built_in

    def _score(self, index: int, query: Tensor, key: Tensor, arranged: Tensor | None, missing: bool = False) -> Tensor:
        """Computes the scores of one resolution for a query without bias."""
        weight = self.footprint_weight(index)
        query, key, numbers, _ = self._arranged(index, query, key, arranged, missing)
        return score_pairs(query, key, weight, self.names, numbers, self.widths, missing)

    def _arranged(
        self, index: int, query: Tensor, key: Tensor, arranged: Tensor | None = None, missing: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Normalizes query and key if asked to, and arranges them as consecutive blocks of equal width.

        Where values are missing, blocks are normalized pair by pair, and padding would count as known. The third
        result is None, or the block of each dimension if the rows are not arranged; the fourth the constant of
        normalized blocks of partly unknown values.
        """
        gather, norm, constant = self.gathers()[index], self._buffers.get(f"norm_{index}"), None
        padded = None if gather is None or len(gather) == self.dim else gather
        if norm is not None and missing:
            constant = known_constant(key, self.blocks[index].count(self.dim), norm, gather)
        if missing and padded is not None:
            return query, key, getattr(self, f"blocks_{index}"), constant
        if gather is not None:
            query, key = arrange(query, gather), arrange(key, gather) if arranged is None else arranged
        if norm is not None and not missing:
            broadcast_batch(query.shape[:-2], key.shape[:-2])
            n = getattr(self, self.parameter_names()[index][0]).shape[-1]
            query, key = normalize(query, key, n, norm, None if padded is None else padded < self.dim)
        # Zero padding is exact only for bases whose similarity of 0 and 0 is known to be 0.
        if padded is None or all(BASES[name].slopes and not BASES[name].saturates for name in self.names):
            return query, key, None, constant
        query, key = restore(query, padded, self.dim), restore(key, padded, self.dim)
        return query, key, getattr(self, f"blocks_{index}"), constant

    def block_similarities(self, query: Tensor, key: Tensor, base: BaseArgument, resolution: int = 0) -> Tensor:
        """Computes the similarity of every block before sorting, to inspect a few pairs: ``(..., [H,] L, S, n)``.

        Query and key are those of :meth:`forward`; NaN is an unknown value, and the similarity of a block without a
        known one. ``base`` is one of the bases, and ``resolution`` an index. A tensor of size L x S x d is formed.

        >>> similarity = AdaptiveSimilarity(4, blocks=2)
        >>> similarity.block_similarities(torch.ones(1, 4), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "dot")
        tensor([[[3., 7.]]])
        """
        if base not in self.bases:
            raise AHopError(f"base must be one of {', '.join(map(str, self.bases))}, got {base!r}")
        query, key = self._compared(query, key)
        at, n = self.bases.index(base), self.blocks[resolution].count(self.dim)
        width = None if self.widths is None else self.widths[at]
        missing = bool(query.isnan().any() or key.isnan().any())
        query, key, numbers, _ = self._arranged(resolution, query, key, missing=missing)
        if not missing:
            return block_sums(pair_values(query, key, self.names[at], width), n, numbers)
        widths = None if width is None else width[None]
        (values,), known = known_blocks(query, key, (self.names[at],), n, numbers, widths)
        return values.masked_fill(~known, torch.nan)

    def compared(self, query: Tensor, key: Tensor, resolution: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns rows without unknown values as one resolution compares them, and the block of each dimension.

        Their blocks are consecutive, and the blocks are then None, wherever possible.
        """
        return self._arranged(resolution, *self._compared(query, key))[:3]

    def _check_rows(self, query: Tensor, key: Tensor) -> None:
        check_pair(query, key)
        if query.shape[-1] != self.dim:
            got = f"query {describe(query)} and key {describe(key)}"
            raise AHopError(f"query and key must have the last dimension dim = {self.dim}, got {got}")

    @torch.no_grad()
    def fix_norms_(self, key: Tensor) -> "AdaptiveSimilarity":
        """Computes the constant of normalized blocks from ``key (..., S, d)``, and keeps it for all further calls.

        A constant that is set already stays. Until it is set, each call computes it from its own keys, for each
        batch entry. A score then depends slightly on the other keys, masked ones included; with a fixed constant it
        depends on its query and key alone.

        >>> import ahop_layers as ah
        >>> similarity = AdaptiveSimilarity(6, blocks=ah.Blocks(2, normalize=True))
        >>> similarity.fix_norms_(torch.arange(12.0).reshape(2, 6)).norm_0
        tensor(1.4142)
        """
        self._check_rows(key, key)
        for index, (entry, gather) in enumerate(zip(self.blocks, self.gathers(), strict=True)):
            if entry.normalize and not getattr(self, f"norm_{index}").any():
                getattr(self, f"norm_{index}").copy_(stored_norm(key, entry.count(self.dim), gather))
        return self

    @torch.no_grad()
    def fix_widths_(self, key: Tensor) -> "AdaptiveSimilarity":
        """Sets the widths of the bases ``("near", q)`` to quantiles of the differences between ``key (..., S, d)``.

        Widths that are set already stay. Differences are in :attr:`units`, if there are any. Equal keys, or a single
        one, give the width 1.

        >>> similarity = AdaptiveSimilarity(1, bases=("l1", ("near", 0.5)), init="l1")
        >>> similarity.fix_widths_(torch.tensor([[0.0], [4.0]])).widths
        tensor([1., 2.])
        """
        self._check_rows(key, key)
        if self.widths is not None and bool((self.widths == 1).all()):
            sample = differences(key if self.units is None else key / self.units)
            rows = [row for row, base in enumerate(self.bases) if not isinstance(base, str)]
            found = quantiles(sample, [self.bases[row][1] for row in rows])  # type: ignore[misc]
            self.widths[rows] = torch.tensor(found, dtype=torch.float64).to(self.widths)
        return self

    @torch.no_grad()
    def contributions(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each dimension adds to the score of ``query (L, 1, d)`` and ``key (L, 1, d)``: ``(L, d)``.

        That of a block is divided equally among its known dimensions. An unknown value adds 0.
        """
        total, known = torch.zeros_like(query[:, 0]), ~(query.isnan() | key.isnan()).squeeze(1)
        for (resolution, entry), base in product(enumerate(self.blocks), self.bases):
            folded = fold(self.footprint_weight(resolution))[self.bases.index(base)]
            if not folded.any():
                continue
            values = self.block_similarities(query, key, base, resolution)[:, 0, 0]
            order = values.masked_fill(values.isnan(), -torch.inf).argsort(-1, descending=True)
            weight = stretched(folded.to(values.dtype), (~values.isnan()).sum(-1))
            added = torch.zeros_like(values).scatter(-1, order, weight) * values
            numbers = entry.numbers(self.dim).to(query.device)
            size = torch.zeros_like(values).index_add(-1, numbers, known.to(values.dtype)).clamp(min=1)
            total += (added / size).nan_to_num(0.0)[:, numbers].masked_fill(~known, 0.0)
        return total

    def parts(self) -> list["AdaptiveSimilarity"]:
        """Returns the similarities of the views of a pattern: this one, see :class:`~ahop_layers.ImageSimilarity`."""
        return [self]

    def views(self, rows: Tensor) -> list[Tensor]:
        """Returns what each of the :meth:`parts` compares of ``rows (..., d)``."""
        return [rows]

    def spread(self, shares: Sequence[Tensor]) -> Tensor:
        """Returns the sum over views of what their values add to a score, for each dimension ``(..., d)``."""
        return shares[0]

    def unbiased(self, query: Tensor) -> Tensor:
        """Subtracts the learned bias, if any, from ``query (..., [H,] L, d)``."""
        return without_bias(query, self.bias)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        init = repr(_map_tensors(lambda tensor: "tensor", self.init))
        init = init if isinstance(self.init, str) else init.replace("'", "")
        text = f"{self.dim}, num_heads={self.num_heads}, bases={self.bases}, init={init}"
        entries = [entry.short() for entry in self.blocks]
        blocks = entries[0] if len(entries) == 1 else f"({', '.join(entries)})"
        return f"{text}, debias={self.bias is not None}" + ("" if blocks == "None" else f", blocks={blocks}")


def _map_tensors(function: Callable[[Tensor], Any], init: Any) -> Any:
    """Applies a function to a tensor, or to the tensors of a list or tuple; other values are returned unchanged."""
    if isinstance(init, (list, tuple)):
        return [_map_tensors(function, entry) for entry in init]
    return function(init) if isinstance(init, Tensor) else init


def _check_bases(bases: Sequence[BaseArgument]) -> tuple[BaseArgument, ...]:
    """Returns ``bases`` as a tuple of names and of pairs of a name and a quantile."""
    given = (bases,) if isinstance(bases, str) else bases
    if not isinstance(given, (tuple, list)):
        raise AHopError(f"bases must be a tuple or list of base names, got {bases!r}")
    pairs = [base for base in given if isinstance(base, (tuple, list))]
    names = check_bases(tuple(base[0] if base in pairs and len(base) == 2 else base for base in given))
    for base in pairs:
        if not BASES[base[0]].saturates:
            raise AHopError(f"a quantile is for a base that saturates, such as ('near', 0.1), got {base!r}")
        if not isinstance(base[1], (int, float)) or not 0 < base[1] <= 1:
            raise AHopError(f"the quantile of a base must be above 0 and at most 1, got {base!r}")
    checked = tuple((name, float(base[1])) if base in pairs else name for name, base in zip(names, given, strict=True))
    if len(set(checked)) < len(checked):
        raise AHopError(f"each base may appear once in bases, got {bases!r}")
    return checked


def _check_count(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise AHopError(f"the state dict must have {expected} blocks, as the similarity, got {name} with {count}")


def check_state(module: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Raises unless a state dict has finite numbers for all parameters of a module, and for its own buffers."""
    for name, own in {**dict(module.named_parameters()), **module._buffers}.items():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor) or is_lazy(given) or given.is_meta:
            continue
        if own is not None and not own.dtype.is_floating_point:
            continue
        if not given.is_floating_point():
            raise AHopError(f"{prefix}{name} must have a floating-point dtype, got {given.dtype}")
        if not given.isfinite().all():
            raise AHopError(f"{prefix}{name} must be finite, got NaN or infinity")


def without_bias(query: Tensor, bias: Tensor | None) -> Tensor:
    """Subtracts ``bias ([H,] d)``, if any, from ``query (..., [H,] L, d)``."""
    return query if bias is None else query - bias.unsqueeze(-2).to(query.dtype)


class LazyAdaptiveSimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that infers ``dim`` from the first query."""

    cls_to_become = AdaptiveSimilarity

    def __init__(
        self, num_heads: int, bases: Sequence[str], init: Init, debias: bool, blocks: BlocksArgument = None
    ) -> None:
        # A dimension that every number of blocks divides stands in for the unknown one.
        counts = [entry.assignment for entry in resolutions(blocks) if entry.assignment is not None]
        super().__init__(2 * lcm(*counts) if counts else 1, num_heads, bases, init, debias, blocks)
        entries = zip(self.parameter_names(), self.blocks, strict=True)
        unknown = [w for (w, _), entry in entries if entry.assignment is None]
        for name in [*unknown, "bias"] if debias else unknown:
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}_extra_state"] = self.get_extra_state()  # which LazyModuleMixin omits

    def reset_parameters(self) -> None:
        """Resets all parameters once their shapes are known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Infers ``dim`` from ``query (..., d)`` and initializes the parameters."""
        check_pair(query, key)
        for entry in self.blocks:
            entry.count(query.shape[-1])  # raises if the blocks do not fit
        self.dim = query.shape[-1]
        if self.has_uninitialized_params():
            for name, parameter in list(self.named_parameters(recurse=False)):
                if isinstance(parameter, UninitializedParameter):
                    middle = () if name == "bias" else (len(self.bases),)
                    parameter.materialize((self.num_heads or 1, *middle, self.dim))
            self.reset_parameters()


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

    __prepare_scriptable__ = refuse_script
    similarity: Any
    _added: ClassVar[tuple[str, ...]] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        """Adds initial similarity and separation values to a state dict of the original layer, then loads it.

        A state dict that lacks a key of the original layer is loaded unchanged: with ``strict=False``, a part of a
        layer must not reset its similarity. If that layer has no keys, only metadata tell whether it was there.
        """
        original = [key for key in self.state_dict() if key.partition(".")[0] not in self._added]
        if all(prefix + key in state_dict for key in original):
            device = state_dict[prefix + original[0]].device if original else None
            for name in self._added:
                part = getattr(self, name, None)
                if isinstance(part, nn.Parameter):
                    state_dict.setdefault(prefix + name, part.detach())
                elif isinstance(part, nn.Module) and not any(key.startswith(f"{prefix}{name}.") for key in state_dict):
                    values = _initial_values(part, device) if original or metadata else part.state_dict()
                    state_dict.update({f"{prefix}{name}.{key}": value for key, value in values.items()})
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


@dataclass(frozen=True, eq=False)
class SimilarityOptions:
    """From what an adaptive layer makes its similarity and its separation.

    Public functions and classes build it from their keywords; :class:`~ahop_layers.AdaptiveHopfield` explains them.
    None, or False, means that an option is not given.
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
        """Returns the similarity of a layer; ``dim`` is that of a head, or None to infer it from the first query."""
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
    dims = [len(entry.named) for entry in entries if entry.named is not None]
    for entry, tensor in zip(entries, init if isinstance(init, (list, tuple)) else [init], strict=False):
        if entry.assignment is None and isinstance(tensor, Tensor) and tensor.ndim:
            dims.append(tensor.shape[-1])
    return dims[0] if dims else None


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
