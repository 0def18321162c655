"""The default similarity of a memory: robust before it is fitted, and solved instead of trained."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import accumulation_dtype, unfold
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BaseArgument
from ahop_layers.similarity.protocol import Similarity
from ahop_layers.similarity.widths import beyond, octaves

BASES: tuple[BaseArgument, ...] = ("l1", *(("near", q) for q in (0.02, 0.05, 0.1, 0.2, 0.5)))
PAPER: tuple[BaseArgument, ...] = ("dis", "dot")  # the bases of the paper
SAMPLE_QUERIES = 32  # number of patterns that are asked for, to find the temperature before a fit
SAMPLE_KEYS = 256  # number of patterns that they are compared with
SAMPLE_ELEMENTS = 2**22  # most values that are compared, unless 8 queries need more
REACH = 0.1  # share of the range of a dimension: a value that is farther beyond the stored ones is clamped
LOGIT_MARGIN = 10.0  # by how much the logit of a stored pattern, asked for itself, exceeds all others together


class AutoSimilarity(AdaptiveSimilarity):
    """Counts how many values agree, until :meth:`~ahop_layers.AssociativeMemory.fit` learns how to weigh them.

    Before a fit, the score is the mean of saturating bases of several widths, without ranks: a wrong value costs the
    same however wrong it is. The widths come from the patterns, so the scale of the data does not matter.

    Args:
        patterns: ``(N, d)``.

    >>> import ahop_layers as ah
    >>> patterns = torch.rand(50, 16)
    >>> ah.AssociativeMemory(patterns).similarity
    AutoSimilarity(16, bases=near 0.02, near 0.05, near 0.1, near 0.2, near 0.5)
    """

    _optional = ("units", "bias")
    _ranges: ClassVar[dict[str, str]] = AdaptiveSimilarity._ranges | {"reach": "a number of at least 0"}
    widths: Tensor
    reach: Tensor
    _used: Sequence[int] = ()

    def __init__(self, patterns: Tensor) -> None:
        options: Any = {"device": patterns.device, "dtype": accumulation_dtype(patterns.dtype)}
        super().__init__(patterns.shape[1], None, (*BASES, *reversed(PAPER)), "uniform", **options)
        self.register_buffer("reach", torch.full((), REACH, **options))
        self.fix_scales_(patterns)
        near = [row for row, name in enumerate(self.names) if name == "near"]
        self.widths[near] = self.widths.new_tensor(octaves(self.widths[near].tolist()))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets the score to that before a fit; widths stay, because they come from the patterns."""
        self.units = self.bias = None
        self.beta.fill_(1.0)
        self.w.zero_()
        near = [row for row, name in enumerate(self.names) if name == "near"]
        self.w[near, -1] = 1 / len(near)
        if hasattr(self, "reach"):
            self.reach.fill_(REACH)
        self.refresh()

    @property
    def is_clamped(self) -> bool:
        """Whether a base does not saturate, so that a value far from all patterns can decide a score."""
        return any(self.names[row] != "near" for row in self._used)

    @property
    def is_fused(self) -> bool:
        """True: the operator takes the widths of all bases."""
        return True

    def refresh(self) -> None:
        """Finds the bases whose weights are not all 0: only these are computed.

        >>> similarity = AutoSimilarity(torch.rand(5, 4))
        >>> _ = similarity.w.data.fill_(1.0)
        >>> similarity.refresh()
        >>> similarity
        AutoSimilarity(4, bases=l1, near 0.02, near 0.05, near 0.1, near 0.2, near 0.5, dot, dis)
        """
        self._used = self.w.detach().any(-1).nonzero().flatten().tolist()

    def within(self, query: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Clamps values of ``query (L, d)``, without bias, that are farther beyond ``low`` and ``high`` than the reach.

        The reach is a share of the range ``(d,)`` of the patterns. A value beyond it is wrong, however far away it is,
        and must not decide a score, alone or with others. Bases that saturate need no limit.
        """
        if not self.is_clamped:
            return query
        low, high = (self.biased(each) for each in beyond(low, high, self.reach.to(low)))
        return query.clamp(low.to(query.dtype), high.to(query.dtype))

    @torch.no_grad()
    def set_(
        self, bases: Sequence[BaseArgument], widths: Sequence[float], weights: Tensor, frame: "Frame | None" = None
    ) -> None:
        """Takes over the bases that are used, the width of each, 1 for a base without one, and how values are compared.

        ``weights (n_bases, d)`` belong to sorted similarities, not cumulated.
        """
        bias, units, reach = frame or Frame()
        self.w.zero_()
        self.beta.fill_(1.0)
        self.reach.fill_(reach)
        self.bias, self.units = (None if each is None else each.to(self.w) for each in (bias, units))
        for base, width, folded in zip(bases, widths, weights, strict=True):
            row = self.bases.index(base)
            self.w[row] = unfold(folded)
            self.widths[row] = width
        self.refresh()

    def _score(self, query: Tensor, key: Tensor, numbers: Tensor | None, missing: bool) -> Tensor:
        used = self._used or list(range(len(self.names)))
        weight, names, widths = self.footprint_weight()[used], [self.names[row] for row in used], self.widths[used]
        return adaptive_similarity(query, key, weight, names, widths=widths, missing=missing)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}units" in state_dict:  # which older ones have, too
            state_dict.setdefault(f"{prefix}bias", self.widths.new_empty(0))
            state_dict.setdefault(f"{prefix}reach", torch.full_like(self.reach, REACH))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.refresh()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Moves or converts the similarity; its weights and widths stay in at least float32."""
        w, beta, buffers = self.w.detach(), self.beta.detach(), dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        wide = accumulation_dtype(self.w.dtype)
        if self.w.dtype != wide:
            place: Any = {"device": self.w.device, "dtype": wide}
            self.w, self.beta = (nn.Parameter(each.to(**place)) for each in (w, beta))
            for name in ("widths", "units", "bias", "reach"):
                setattr(self, name, None if (buffer := buffers[name]) is None else buffer.to(**place))
        return self

    def extra_repr(self) -> str:
        """The dimension, the bases in use, and whether there is a bias and units, for ``repr``."""
        names = self.base_names()
        own = "".join(f", {name}" for name in ("bias", "units") if getattr(self, name) is not None)
        return f"{self.dim}, bases={', '.join(names[row] for row in self._used)}{own}"


class Frame(NamedTuple):
    """How an AutoSimilarity compares values: queries without a ``bias (d,)``, in ``units (d,)``, within its ``reach``.

    None is a bias of 0, or units of 1.
    """

    bias: Tensor | None = None
    units: Tensor | None = None
    reach: float = REACH


@torch.no_grad()
def first_inverse_temperature(similarity: Similarity, patterns: Tensor) -> float:
    """Returns the inverse temperature with which a stored pattern retrieves itself, 1 if no two patterns differ."""
    size = min(SAMPLE_KEYS, len(patterns))
    if size < 2:
        return 1.0
    keys = patterns[torch.arange(size, device=patterns.device) * len(patterns) // size]
    queries = keys[: max(8, min(SAMPLE_QUERIES, SAMPLE_ELEMENTS // keys.numel()))]
    scores = similarity(queries, keys, missing=bool(keys.isnan().any())).to(accumulation_dtype(patterns.dtype))
    own = scores.diagonal()[:, None].clone()
    gap = (own - scores.fill_diagonal_(-torch.inf)).amin(-1)
    gap = gap[(gap > 0) & gap.isfinite()]
    return (LOGIT_MARGIN + math.log(len(patterns))) / gap.median().item() if len(gap) else 1.0
