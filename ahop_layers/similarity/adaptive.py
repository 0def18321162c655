"""AdaptiveSimilarity: a learned weighted sum of similarity footprints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from ahop_layers.errors import (
    AHopError,
    broadcast_batch,
    check_choice,
    check_divides,
    check_floating,
    check_given_sizes,
    check_numbers,
    check_pair,
    check_sizes,
    describe,
)
from ahop_layers.ops.operators import adaptive_similarity
from ahop_layers.ops.reference import BASES, block_sums, check_bases, fold, known_blocks, stretched, unfold
from ahop_layers.similarity.blocks import Blocks, BlocksArgument, arrange, as_blocks, normalize, restore, stored_norm
from ahop_layers.similarity.protocol import Similarity
from ahop_layers.similarity.widths import differences, quantiles

INITS = ("dot", "dis", "l1", "uniform")  # built-in values of ``init``; the name of a registered base is one as well
Init = str | Tensor
"""The initial similarity: the name of a base, ``"uniform"``, or weights."""
BaseArgument = str | tuple[str, float]
"""The name of a base, or ``("near", q)``: a base that saturates, and a quantile of differences as its width."""


@contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[None]:
    """Restores all parameters, buffers and attributes of a module and its parts if the body raises an Exception."""
    owners = [owner for part in module.modules() for owner in (vars(part), part._parameters, part._buffers)]
    before = [dict(owner) for owner in owners]
    tensors = [each for owner in before for each in owner.values() if isinstance(each, Tensor) and not is_lazy(each)]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except Exception:
        for owner, attributes in zip(owners, before, strict=True):
            owner.update(attributes)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.shape == value.shape:
                    tensor.copy_(value)
                else:  # another number of blocks
                    tensor.data = value
        raise


class Restored(nn.Module):
    """A module that a state dict which cannot be loaded leaves unchanged."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict as ``nn.Module`` does. If it fails, nothing is changed."""
        with unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)


class AdaptiveSimilarity(Restored, Similarity):
    """Scores queries against keys as a learned weighted sum of their similarity footprints.

    ``score = sum over bases of beta_base * w_base . footprint_base(query - bias, key)``

    Args:
        dim: dimension ``d`` of a query or key; with heads, the dimension of one head.
        num_heads: ``None`` for one set of weights, or ``H`` for one set per head.
        bases: names of the base similarities to combine. ``("near", q)`` is a base that saturates: a wrong value costs
            the same however wrong it is. Its width is the quantile q, between 0 and 1, of the differences between the
            keys of :meth:`fix_widths_`; a memory calls it for its patterns. Several widths may be combined.
        init: the name of one of the bases (the score equals that base similarity, for ``"dot"`` the dot product),
            ``"uniform"`` (every footprint entry has weight 1/n), or a tensor with the shape of ``w``.
        debias: whether to subtract a learned vector from every query. It is initialized to zero.
        blocks: the blocks of dimensions over which similarities are summed before they are sorted. None makes every
            dimension a block. An integer n, a divisor of d, means n consecutive blocks of equal width. An integer
            tensor or array ``(dim,)`` names the block of each dimension, from 0 to n - 1; see
            :func:`~ahop_layers.patches`. ``"auto"`` is the number of ``init`` if it is a tensor, else the smallest n
            from 4 to 8, see :class:`~ahop_layers.Blocks`, which has further options.
        device, dtype: device and dtype of the parameters.

    Attributes:
        w: learned weights of the footprint entries, ``([H,] n_bases, n)``.
        beta: learned factors of the bases, ``([H,] n_bases)``.
        bias: with ``debias``, the learned vector ``([H,] d)``; otherwise None.
        widths: the width of each base ``(n_bases,)``, 1 for a base without one; None if no base saturates.
        units: the unit of each dimension ``(d,)``, in which query and key are compared; None if all units are 1.
        blocks: the :class:`~ahop_layers.Blocks`, with the number that ``"auto"`` chose.
        block_numbers: the block of each dimension ``(d,)``; None unless ``blocks`` names it.
        norm: the root mean square norm of the stored blocks, 0 if it is unknown; None unless blocks are normalized.

    >>> import torch, ahop_layers as ah
    >>> similarity = ah.AdaptiveSimilarity(16)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-5)
    True
    >>> similarity
    AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=False)
    """

    allows_missing = True
    _ranges: ClassVar[dict[str, str]] = {
        "widths": "a positive number",
        "units": "a positive number",
        "norm": "a number of at least 0",
    }
    _optional: ClassVar[tuple[str, ...]] = ("units",)  # buffers (d,), empty in a state dict that has none
    w: nn.Parameter
    beta: nn.Parameter
    block_numbers: Tensor | None
    norm: Tensor | None
    widths: Tensor | None
    units: Tensor | None
    bias: Tensor | None
    _gather: Tensor | None

    def __init__(
        self, dim: int, num_heads: int | None = None, bases: Sequence[BaseArgument] = ("dis", "dot"),
        init: Init = "dot", debias: bool = False, blocks: BlocksArgument = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(dim=dim)
        check_given_sizes(num_heads=num_heads)
        self.dim, self.num_heads, self.bases = dim, num_heads, _check_bases(bases)
        self.names = tuple(base if isinstance(base, str) else base[0] for base in self.bases)
        blocks, given = as_blocks(blocks), init.shape[-1] if isinstance(init, Tensor) and init.ndim else None
        self.blocks = blocks.chosen(dim, given)
        self.takes_blocks = blocks.is_auto and given is None  # a state dict replaces the number that "auto" chose
        # A copy, because assigning another module's parameter would register it here as well.
        self.init = init.detach().clone() if isinstance(init, Tensor) else init
        heads = () if num_heads is None else (num_heads,)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w = nn.Parameter(torch.empty(*heads, len(self.bases), self.blocks.count(dim), **factory))
        self.beta = nn.Parameter(torch.empty(*heads, len(self.bases), **factory))
        numbers = self.blocks.named
        self.register_buffer("block_numbers", None if numbers is None else numbers.to(self.w.device, copy=True))
        self.register_buffer("_gather", None, persistent=False)
        self.register_buffer("norm", torch.zeros((), **factory) if self.blocks.normalize else None)
        if debias:
            self.bias = nn.Parameter(torch.empty(*heads, dim, **factory))
        else:
            self.register_buffer("bias", None)  # which a fit of a memory may set
        saturates = any(BASES[name].saturates for name in self.names)
        self.register_buffer("widths", torch.ones(len(self.bases), **factory) if saturates else None)
        self.register_buffer("units", None)
        self._check_init()
        self.reset_parameters()

    def footprint_weight(self) -> Tensor:
        """Returns ``beta * w``, ``([H,] n_bases, n)``.

        >>> AdaptiveSimilarity(6, blocks=2).footprint_weight()
        tensor([[0., 0.],
                [0., 1.]], grad_fn=<MulBackward0>)
        """
        return self.beta.unsqueeze(-1) * self.w

    @torch.no_grad()
    def set_ranks_(self, weights: Sequence[Tensor]) -> None:
        """Sets the weights of sorted similarities, which are not cumulated: one tensor ``([H,] n_bases, n)``.

        >>> similarity = AdaptiveSimilarity(3, bases=("l1",), init="l1")
        >>> similarity.set_ranks_([torch.tensor([[1.0, 1.0, 0.0]])])
        >>> similarity(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 9.0]])).item()
        -3.0
        """
        (folded,) = weights
        self.w.copy_(unfold(folded))
        self.beta.fill_(1.0)

    def _check_init(self) -> None:
        if isinstance(self.init, str):
            check_choice("init", self.init, tuple(dict.fromkeys((*INITS, *BASES))))
            if self.init != "uniform" and self.init not in self.bases:
                raise AHopError(f"init={self.init!r} needs {self.init!r} among the bases, got {self.bases}")
            return
        if not isinstance(self.init, Tensor):
            raise AHopError(f"init must be a string or a tensor, got {type(self.init).__name__}")
        check_floating(init=self.init)
        if self.init.shape != self.w.shape:
            raise AHopError(f"init must have the shape of w, {describe(self.w)}, got {describe(self.init)}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values."""
        self.w.fill_(1.0 / self.w.shape[-1])
        self.beta.fill_(1.0)
        if isinstance(self.init, Tensor):
            self.w.copy_(self.init)
        elif self.init != "uniform":
            # The last entry of a footprint is the base similarity itself, and beta selects one base. The weights of
            # all bases are initialized alike, so that every beta has a gradient from the first step.
            self.w.zero_()
            self.w[..., -1] = 1.0
            self.beta.zero_()
            self.beta[..., self.bases.index(self.init)] = 1.0
        if self.bias is not None:
            self.bias.zero_()
        if self.widths is not None:
            self.widths.fill_(1.0)
        if self.norm is not None:
            self.norm.zero_()
        if self.block_numbers is not None and self.blocks.named is not None:
            self.block_numbers.copy_(self.blocks.named)
        self._set_gather()

    def _set_gather(self) -> None:
        """Derives the index that arranges dimensions as consecutive blocks."""
        gather = self.blocks.gather()
        self._gather = gather if gather is None else gather.to(self.w.device)

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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._mark_absent(destination, prefix)

    def _mark_absent(self, destination: dict[str, Any], prefix: str) -> None:
        """Adds empty tensors to the state dict for buffers that this similarity could have, but has not."""
        for name in self._optional:
            if self.widths is not None and getattr(self, name) is None:
                destination[prefix + name] = self.widths.new_empty(0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads a state dict, and takes over its units, or that there are none, and other blocks of the same number.

        A similarity that was built with ``"auto"`` also takes over another number. Raises before anything is changed if
        the bases or the number of blocks differ, or a value is out of range.
        """
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        given = {name: value for name, value in given.items() if isinstance(value, Tensor) and not is_lazy(value)}
        if "_extra_state" in given:
            self.set_extra_state(given["_extra_state"])
        blocks, numbers = self.blocks, given.get("block_numbers")
        count = given["w"].shape[-1:].numel() if "w" in given and not is_lazy(self.w) else None
        if count is not None and not (self.takes_blocks and count and self.dim % count == 0):
            _check_count(f"{prefix}w", count, self.w.shape[-1])
        if numbers is not None and blocks.named is not None and not numbers.is_meta:
            blocks = Blocks(numbers, blocks.normalize)
            _check_count(f"{prefix}block_numbers", blocks.count(self.dim), self.blocks.count(self.dim))
        check_state(self, state_dict, prefix)
        if count is not None and self.takes_blocks:
            self.take_blocks_(count)
            blocks = self.blocks
        for name in self._optional:
            if name in given:
                setattr(self, name, torch.empty_like(given[name], device=next(self.parameters()).device))
            elif self.widths is not None and getattr(self, name) is None:
                setattr(self, name, self.widths.new_empty(0))  # which is missing
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self._optional:
            if (buffer := getattr(self, name)) is not None and not len(buffer):
                setattr(self, name, None)
        self.blocks = blocks
        self._set_gather()

    @torch.no_grad()
    def take_blocks_(self, n: int) -> None:
        """Changes the number of blocks that ``"auto"`` chose to n; ``w`` becomes zero, but stays the same parameter."""
        if n != self.w.shape[-1]:
            check_divides(n, self.dim)
            self.blocks = Blocks("auto", self.blocks.normalize).chosen(self.dim, n)
            self.w.data, self.w.grad = self.w.new_zeros(*self.w.shape[:-1], n), None

    def prepare(self, key: Tensor) -> list[Tensor]:
        """Returns the keys ``(..., S, d)`` with consecutive blocks, so that keys that stay are arranged once."""
        return [] if self._gather is None else [arrange(key, self._gather)]

    def forward(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Computes the scores ``(..., [H,] L, S)`` of ``query (..., [H,] L, d)`` and ``key (..., [H,] S, d)``.

        Args:
            query, key: floating-point tensors whose batch dimensions broadcast.
            missing: NaN is an unknown value, see :func:`~ahop_layers.adaptive_similarity`, and
                :class:`~ahop_layers.Blocks` for normalized blocks; False gives NaN. A pair without a common known
                dimension has the score -inf.
            prepared: what :meth:`prepare` returned for the keys; None prepares them.
        """
        scores = self._score(*self.compared(query, key, missing, prepared), missing)
        if missing and self.norm is not None:
            common = (~query.isnan()).to(scores.dtype) @ (~key.isnan()).to(scores.dtype).mT
            scores = scores.masked_fill(common == 0, -torch.inf)
        return scores

    @property
    def is_attended(self) -> bool:
        """Whether :attr:`w`, :attr:`beta` and :meth:`compared` are all that a score needs.

        That is so for built-in bases without widths, whose blocks are then consecutive.
        """
        built_in = all(BASES[name].slopes is not None for name in self.names) and self.widths is self.units is None
        own = all(getattr(type(self), name) is getattr(AdaptiveSimilarity, name) for name in ("forward", "_score"))
        return own and built_in

    is_fused = is_attended  # what a memory asks

    @property
    def is_solvable(self) -> bool:
        """Whether the score is linear in weights that can be solved for."""
        return self.num_heads is None and type(self).forward is AdaptiveSimilarity.forward

    def _score(self, query: Tensor, key: Tensor, numbers: Tensor | None, missing: bool) -> Tensor:
        """Computes the scores of rows that :meth:`compared` returned."""
        weight, missing = self.footprint_weight(), missing and self.norm is None
        return adaptive_similarity(query, key, weight, self.names, numbers, widths=self.widths, missing=missing)

    def compared(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns rows as a score compares them: without bias, in units, and normalized, in consecutive blocks.

        The third result is None, or the block of each dimension if blocks are not consecutive.
        """
        self._check_rows(query, key)
        query = self.unbiased(query)
        if self.units is not None:
            query, key = (query / self.units).to(query.dtype), (key / self.units).to(key.dtype)
        gather, norm = self._gather, self.norm
        padded = None if gather is None or len(gather) == self.dim else gather
        if missing and norm is None and padded is not None:
            return query, key, self.block_numbers  # padding would count as known
        if gather is not None:
            query, key = arrange(query, gather), prepared[0] if prepared else arrange(key, gather)
        if norm is not None:
            broadcast_batch(query.shape[:-2], key.shape[:-2])
            real = None if padded is None else padded < self.dim
            query, key = normalize(query, key, self.w.shape[-1], norm, real, missing)
        # Zero padding is exact only for bases whose similarity of 0 and 0 is known to be 0.
        if padded is None or all(BASES[name].slopes and not BASES[name].saturates for name in self.names):
            return query, key, None
        return restore(query, padded, self.dim), restore(key, padded, self.dim), self.block_numbers

    def _check_rows(self, query: Tensor, key: Tensor) -> None:
        check_pair(query, key)
        if query.shape[-1] != self.dim:
            got = f"query {describe(query)} and key {describe(key)}"
            raise AHopError(f"query and key must have the last dimension dim = {self.dim}, got {got}")

    @torch.no_grad()
    def fix_scales_(self, key: Tensor) -> "AdaptiveSimilarity":
        """Takes over the scales of ``key (..., S, d)`` for all further calls: the norm of blocks, and widths.

        Scales that are set already stay. Until the norm of normalized blocks is set, each call computes it from its
        own keys, for each batch entry. A score then depends slightly on the other keys, masked ones included. The
        widths of the bases ``("near", q)`` are quantiles of the differences between keys, in :attr:`units` if there
        are any. Equal keys, or a single one, give the width 1.

        >>> import ahop_layers as ah
        >>> similarity = AdaptiveSimilarity(6, blocks=ah.Blocks(2, normalize=True))
        >>> similarity.fix_scales_(torch.arange(12.0).reshape(2, 6)).norm
        tensor(1.4142)
        >>> similarity = AdaptiveSimilarity(1, bases=("l1", ("near", 0.5)), init="l1")
        >>> similarity.fix_scales_(torch.tensor([[0.0], [4.0]])).widths
        tensor([1., 2.])
        """
        self._check_rows(key, key)
        if self.norm is not None and not self.norm.any():
            self.norm.copy_(stored_norm(key, self.w.shape[-1], self._gather))
        if self.widths is not None and bool((self.widths == 1).all()):
            sample = differences(key if self.units is None else key / self.units)
            rows = [row for row, base in enumerate(self.bases) if not isinstance(base, str)]
            found = quantiles(sample, [self.bases[row][1] for row in rows])  # type: ignore[misc]
            self.widths[rows] = torch.tensor(found, dtype=torch.float64).to(self.widths)
        return self

    @torch.no_grad()
    def explain(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each dimension adds to the score of ``query (L, d)`` and ``key (L, d)``: ``(L, d)``.

        The value of a block is divided equally among its known dimensions, or among all if it has none. Blocks of equal
        similarity share the mean of the weights of their ranks.
        """
        if self.num_heads is not None:
            raise AHopError(f"explain needs a similarity without heads, got num_heads={self.num_heads}")
        n, numbers = self.w.shape[-1], self.blocks.numbers(self.dim).to(query.device)
        known = ~(query.isnan() | key.isnan())
        rows, others, blocks = self.compared(query[:, None], key[:, None], missing=not known.all())
        values, found = known_blocks(rows, others, self.names, n, blocks, self.widths)
        found = found[:, 0, 0]
        known |= (block_sums(known.int(), n, numbers) == 0)[:, numbers]
        size, total = block_sums(known.to(query.dtype), n, numbers), torch.zeros_like(query)
        for folded, each in zip(fold(self.footprint_weight()), values, strict=True):
            each = each[:, 0, 0]
            ordered, order = each.masked_fill(~found, -torch.inf).sort(-1, descending=True)
            weight = _shared(stretched(folded.to(each.dtype), found.sum(-1)), ordered)
            added = torch.zeros_like(each).scatter(-1, order, weight) * each
            total += (added / size).nan_to_num(0.0)[:, numbers].masked_fill(~known, 0.0)
        return total

    def parts(self) -> list["AdaptiveSimilarity"]:
        """Returns the similarities of the views of a pattern: this one, see :class:`~ahop_layers.ImageSimilarity`."""
        return [self]

    def unbiased(self, query: Tensor) -> Tensor:
        """Subtracts the learned bias, if any, from ``query (..., [H,] L, d)``."""
        return query if self.bias is None else query - self.bias.unsqueeze(-2).to(query.dtype)

    def biased(self, query: Tensor) -> Tensor:
        """Adds the learned bias, if any, to ``query (..., [H,] L, d)``."""
        return query if self.bias is None else query + self.bias.unsqueeze(-2).to(query.dtype)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        init = repr(self.init) if isinstance(self.init, str) else "tensor"
        text = f"{self.dim}, num_heads={self.num_heads}, bases={self.bases}, init={init}"
        blocks = self.blocks.short()
        return f"{text}, debias={self.bias is not None}" + ("" if blocks == "None" else f", blocks={blocks}")


def _shared(weight: Tensor, ordered: Tensor) -> Tensor:
    """Returns the mean of the ``weight (L, n)`` of equal values, which are ``ordered (L, n)``."""
    tie = functional.pad((ordered[:, 1:] != ordered[:, :-1]).long().cumsum(-1), (1, 0))
    total, count = (torch.zeros_like(weight).scatter_add(-1, tie, each) for each in (weight, torch.ones_like(weight)))
    return (total / count).gather(-1, tie)


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
    """Raises unless a state dict has finite numbers for the parameters of a module and its parts, and for its buffers.

    Buffers are checked where a class has ``_ranges``, by the rule of :func:`check_numbers` that these name.
    """
    for path, part in module.named_modules():
        ranges: dict[str, str] | None = getattr(part, "_ranges", None)
        for name, own in {**part._parameters, **({} if ranges is None else part._buffers)}.items():
            key = f"{prefix}{path}.{name}" if path else prefix + name
            if isinstance(given := state.get(key), Tensor) and not is_lazy(given) and not given.is_meta:
                check_tensor(key, given, own, (ranges or {}).get(name))


def check_tensor(key: str, given: Any, own: Tensor | None, rule: str | None) -> None:
    """Raises unless a tensor has finite numbers of the kind of ``own``, None for floating-point ones, and by a rule."""
    if not isinstance(given, Tensor):
        raise AHopError(f"{key} must be a tensor, got {type(given).__name__}")
    if given.is_floating_point() != (floating := own is None or own.dtype.is_floating_point):
        raise AHopError(f"{key} must have {'a floating-point' if floating else 'an integer'} dtype, got {given.dtype}")
    if not given.isfinite().all():
        raise AHopError(f"{key} must be finite, got NaN or infinity")
    for end in given.aminmax() if rule and given.numel() else ():
        check_numbers(rule or "", **{key: end.item()})
