"""AssociativeMemory: retrieval from stored patterns Xi by ``y = Xi sep(sim(mod(Xi), x))``."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, change, dot_product, iterate
from ahop_layers.errors import (
    AHopError,
    check_choice,
    check_finite_rows,
    check_floating,
    check_numbers,
    check_patterns,
    check_sizes,
    describe,
)
from ahop_layers.memory.arranged import arranged_patterns
from ahop_layers.memory.energy import choose_energy
from ahop_layers.memory.fit import (
    Batches,
    Fitted,
    Pairs,
    best_inverse_temperature,
    estimate_bias,
    minimize,
    retrieval_batches,
    scale_of,
    seeded_generator,
    separation_batches,
    unchanged_on_error,
)
from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.memory.presets import named_similarity, preset_arguments
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity, Associator
from ahop_layers.variants import Variant

BLOCK_ELEMENTS = 2**21
"""Number of elements of the patterns that are scored at once, to bound the memory that a similarity needs."""

BLOCK_SCORES = 2**23
"""Number of scores that are stored at once where the scores of all patterns are needed."""


class AssociativeMemory(Associator):
    """Stores patterns and retrieves the one that a corrupted query was made from.

    Args:
        patterns: ``(N, d)``, not copied. If the similarity has blocks that are not consecutive or not of equal width
            (``blocks`` is a tensor), scoring arranges the patterns by block once and keeps that copy, up to 2**28
            elements; larger memories are arranged in each call, to save memory. To need neither, permute the dimensions
            so that blocks are consecutive, and give their number. The copy is renewed if ``patterns`` is replaced or
            modified in place, except through ``.data`` or NumPy.
        similarity: ``"dot"``, ``"dis"``, ``"l1"``, ``"adaptive"``, or a module or function that scores queries
            ``(L, d)`` against keys ``(S, d)`` and returns ``(L, S)``.
        separation: a name of :class:`ahop_layers.separation.Separation`, or such a module.
        modulation: a module that transforms patterns ``(S, d)`` before they are scored, or ``None``.
        prior: learn a log-probability for each pattern that is added to its score, initialized to zero.
        activation: ``"sign"`` for the binary states of the classic networks, or ``None``.
        objective: the loss of :meth:`fit`. ``"retrieval"`` is the loss of the paper, ``"separation"`` the
            :func:`~ahop_layers.memory.kernel.crowding` of the modulated patterns.
        check: raise if a pattern holds NaN or infinity. False skips the check, which reads all patterns once.
        beta: inverse temperature, the factor of the scores in the separation, the loss and the energy. ``None`` means
            1 until :meth:`fit` sets it; a number is kept. It does not change which score is the largest.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns, similarity="dis")
    >>> memory.recall(patterns[:3] + 0.01)
    tensor([0, 1, 2])
    """

    patterns: Tensor
    beta: Tensor
    _fits_beta = True

    def __init__(
        self,
        patterns: Tensor,
        similarity: str | Similarity = "dot",
        separation: str | Separation = "softmax",
        modulation: nn.Module | None = None,
        *,
        prior: bool = False,
        activation: str | None = None,
        objective: str = "retrieval",
        check: bool = True,
        beta: float | None = None,
    ) -> None:
        super().__init__()
        if beta is not None:
            check_numbers("a positive number", beta=beta)
        check_patterns(patterns)
        if check:
            check_finite_rows(patterns=patterns)
        check_choice("objective", objective, ("retrieval", "separation"))
        if activation not in (None, "sign"):
            raise AHopError(f"activation must be 'sign' or None, got {activation!r}")
        if objective == "separation" and not isinstance(modulation, KernelModulation):
            raise AHopError(f"objective='separation' needs a KernelModulation, got {type(modulation).__name__}")
        self.register_buffer("patterns", patterns.detach())
        self.register_buffer("beta", patterns.new_full((), 1.0 if beta is None else beta))
        self._fits_beta = beta is None
        self.similarity = named_similarity(similarity, patterns) if isinstance(similarity, str) else similarity
        if isinstance(self.similarity, AdaptiveSimilarity):
            self.similarity.fix_norms_(self.patterns)  # not per block of patterns
        self.separation = Separation(separation) if isinstance(separation, str) else separation
        self.modulation, self.activation, self.objective = modulation, activation, objective
        for name in ("similarity", "separation") if modulation is None else ("similarity", "separation", "modulation"):
            if not callable(getattr(self, name)):
                raise AHopError(f"{name} must be a module or a function, got {getattr(self, name)!r}")
        self.prior = nn.Parameter(patterns.new_zeros(len(patterns))) if prior else None

    @classmethod
    def preset(cls, name: str, patterns: Tensor, **keywords: Any) -> "AssociativeMemory":
        """Create a network of the paper's first table.

        Args:
            name: Hop, D-Hop, E-Hop, M-Hop, U-Hop, S-Hop, K-Hop (:meth:`fit` separates the patterns), K2-Hop
                (:meth:`fit` minimizes the loss of the paper) or A-Hop.
            patterns: ``(N, d)``.
            keywords: ``prior``, ``check`` and ``beta`` for all networks; ``degree`` for D-Hop, whose energy does not
                increase for odd degrees; ``features`` for K-Hop and K2-Hop; ``bases``, ``init``, ``debias``, ``blocks``
                (see :class:`~ahop_layers.AdaptiveSimilarity`) and ``table`` for A-Hop. ``table=True`` adds a learned
                base similarity to the footprints.

        Raises:
            AHopError: the name is unknown, or the network does not have a keyword.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(100, 16) * 2 - 1, debias=True)
        >>> memory.similarity
        AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=True)
        """
        return cls(patterns, **preset_arguments(name, patterns, **keywords))

    def scores(self, x: Tensor) -> Tensor:
        """Score ``x (..., d)`` against all patterns: ``(..., N)``.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        rows = self._rows(x)
        return torch.cat(list(self._score_blocks(rows)), -1).reshape(*x.shape[:-1], len(self.patterns))

    @torch.no_grad()
    def retrieve(self, x: Tensor, steps: int = 1) -> Tensor:
        """Retrieve patterns for ``x (..., d)`` with ``steps`` updates of the state: ``(..., d)``.

        Runs without gradients, because their graph would store every block of the patterns. Call the memory itself to
        compute gradients.

        Raises:
            AHopError: ``x`` or ``steps`` is invalid.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(4) * 10)
        >>> memory.retrieve(torch.tensor([0.9, 0.2, 0.0, 0.1])).round()
        tensor([10.,  0.,  0.,  0.])
        """
        output: Tensor = self(x, steps)
        return output

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        """As :meth:`retrieve`, with gradients."""
        check_sizes(steps=steps)
        chunks = torch.split(self._rows(x), max(1, BLOCK_SCORES // len(self.patterns)))
        return torch.cat([self._update(chunk, steps) for chunk in chunks]).reshape(x.shape)

    @torch.no_grad()
    def recall(self, x: Tensor) -> Tensor:
        """Find the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        best = []
        for chunk in torch.split(self._rows(x), 256):
            blocks = [block.max(-1) for block in self._score_blocks(chunk)]
            starts = torch.arange(len(blocks), device=x.device) * self._block_size()
            values, places = (torch.stack(each, -1) for each in zip(*blocks, strict=True))
            block = values.argmax(-1, keepdim=True)
            best.append((places + starts).gather(-1, block).squeeze(-1))
        return torch.cat(best).reshape(x.shape[:-1])

    def energy(self, x: Tensor) -> Tensor:
        """Compute the energy of states ``x (..., d)``, as in the paper's first table: ``(...)``.

        Raises:
            AHopError: no energy is defined for this similarity and separation (U-Hop).

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.randn(20, 8), similarity="dis")
        >>> x = torch.randn(5, 8)
        >>> bool((memory.energy(memory.retrieve(x)) <= memory.energy(x)).all())
        True
        """
        energy = choose_energy(self.similarity is dot_product, self.separation)
        scores = self.scores(x)
        return energy(x, x if self.modulation is None else self.modulation(x), scores, self.separation, self.beta)

    def fit(
        self,
        data: Variant | Pairs | None = None,
        epochs: int = 200,
        lr: float = 0.05,
        batch: int = 512,
        progress: bool = True,
        seed: int = 0,
    ) -> Tensor:
        """Train all parameters: those of the similarity and the kernel, and the prior.

        The loss is the negative log-likelihood of the pattern that a query was made from, as in the paper. It uses the
        softmax of the scores for every separation, because the logarithm of a sparse weight can be infinite. A bias of
        zero is first initialized to its least-squares estimate, and the inverse temperature :attr:`beta` to the one of
        the smallest loss. Steps are relative to the scale of the patterns and to ``beta``, so that the result does not
        depend on the unit of the data.

        A tenth of the pairs, at most 512, is held out; for a variant, 512 further queries. The memory keeps the
        parameters with the smallest of about ten losses on them. ``fit`` warns if the first is the smallest.

        Args:
            data: a variant, from which every epoch draws ``batch`` queries; or pairs ``(index (n,), query (n, d))``,
                which every epoch splits into shuffled batches. K-Hop needs no data.
            epochs: number of epochs.
            lr: maximum learning rate of Adam. It rises for a tenth of the steps, then falls to zero.
            batch: number of queries per step.
            progress: show a progress bar if tqdm is installed.
            seed: seed of all random numbers.

        Returns:
            The loss of every step.

        Raises:
            AHopError: the memory has no trainable parameters, an argument is invalid, or the loss is not finite. The
                parameters are then unchanged.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(50, 16) * 2 - 1, debias=True)
        >>> losses = memory.fit(ah.variants.Mixed(0.3, 0.1, 0.5), epochs=30, batch=64, progress=False)
        >>> bool(losses[-5:].mean() < losses[:5].mean())
        True
        """
        generator = seeded_generator(self.patterns.device, seed)
        with unchanged_on_error(self, self.patterns):
            if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
                batches = separation_batches(self.patterns, epochs, batch, generator)
                return minimize(self, self.modulation.separation_loss, batches, lr, progress).losses
            batches = retrieval_batches(data, self.patterns, epochs, batch, generator)
            bias = self._bias()
            if bias is not None and bias.requires_grad and data is not None:
                estimate_bias(bias, data, self.patterns, batch, generator)
            fitted = self._minimize(batches, lr, progress)
        if not fitted.best < fitted.first:
            warnings.warn(
                f"fit did not improve the loss of the held-out queries, {fitted.first:.4g}, and left the parameters"
                " unchanged: use more epochs, more pairs or another lr",
                stacklevel=2,
            )
        return fitted.losses

    def _minimize(self, batches: Batches, lr: float, progress: bool) -> Fitted:
        """Set ``beta`` if it was not given, and train in units of the data."""
        if self._fits_beta and batches.held_out is not None:
            rows = max(1, 4 * BLOCK_SCORES // len(self.patterns))
            index, query = (each[:rows] for each in batches.held_out)
            with torch.no_grad():
                self.beta.copy_(best_inverse_temperature(self.scores(query), index))
        scale, logit = scale_of(self.patterns), 1 / self.beta.item()
        units = [(self._bias(), scale), (self.prior, logit)]
        units += [(part.table, logit) for part in self.modules() if isinstance(part, TableSimilarity)]
        return minimize(self, self._loss, batches, lr, progress, units=units, scale=scale)

    def add(self, patterns: Tensor, check: bool = True) -> Tensor:
        """Store more ``patterns (n, d)`` without refitting, and return their indices ``(n,)``.

        With a prior, the new patterns get the mean prior. ``check=False`` skips the check for NaN and infinity.

        Raises:
            AHopError: the patterns do not match those stored, or hold NaN or infinity.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.add(torch.ones(2, 4))
        tensor([3, 4])
        """
        check_patterns(patterns)
        before, added = len(self.patterns), self._rows(patterns, "patterns").detach().to(self.patterns)
        if check:
            check_finite_rows(patterns=added)
        self.patterns = torch.cat([self.patterns, added])
        if self.prior is not None:
            self._set_prior(torch.cat([self.prior.detach(), self.prior.detach().mean().expand(len(patterns))]))
        return torch.arange(before, len(self.patterns), device=self.patterns.device)

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Delete patterns by index or by boolean mask. Later patterns move up.

        Raises:
            AHopError: ``index`` is invalid, or no pattern would be left.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3))
        >>> memory.remove([0, 2])
        >>> memory.patterns
        tensor([[0., 1., 0.]])
        """
        keep = torch.ones(len(self.patterns), dtype=torch.bool)
        try:
            removed = torch.as_tensor(index).cpu()
            keep[removed if removed.numel() else []] = False
        except (IndexError, RuntimeError, TypeError, ValueError):
            raise AHopError(f"index must be indices or a mask of the {len(keep)} patterns, got {index!r}") from None
        if not keep.any():
            raise AHopError(f"index must leave at least one pattern, got all {len(keep)}")
        keep = keep.to(self.patterns.device)
        self.patterns = self.patterns[keep]
        if self.prior is not None:
            self._set_prior(self.prior.detach()[keep])

    def _bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity subtracts from a query, if it has one."""
        bias = getattr(self.similarity, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.shape == self.patterns.shape[1:] else None

    def _set_prior(self, values: Tensor) -> None:
        self.prior = nn.Parameter(values, requires_grad=self.prior is not None and self.prior.requires_grad)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, which may hold another number of patterns. If it fails, the memory is unchanged.

        Args:
            state_dict, strict, assign: as for ``nn.Module``.

        Raises:
            AHopError: the state dict holds no pattern, NaN or infinity in a pattern, or a prior of another length.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.load_state_dict(ah.AssociativeMemory(torch.ones(2, 4)).state_dict())
        <All keys matched successfully>
        >>> len(memory.patterns)
        2
        """
        with unchanged_on_error(self, self.patterns):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the number of patterns from the state dict."""
        stored, prior = (state_dict.get(prefix + name) for name in ("patterns", "prior"))
        if isinstance(stored, Tensor) and stored.ndim == 2 and stored.shape[1] == self.patterns.shape[1]:
            if len(stored) == 0:
                raise AHopError(f"{prefix}patterns must hold at least one pattern, got {describe(stored)}")
            check_finite_rows(**{f"{prefix}patterns": stored})
            if self.prior is not None and isinstance(prior, Tensor) and prior.shape != stored.shape[:1]:
                raise AHopError(f"{prefix}prior must be (N,) = {describe(stored[:, 0])}, got {describe(prior)}")
            before, self.patterns = len(self.patterns), self.patterns.new_empty(stored.shape)  # not the caller's tensor
            if self.prior is not None and len(stored) != before:
                self._set_prior(self.prior.new_zeros(len(stored)))
        state_dict.setdefault(prefix + "beta", torch.ones_like(self.beta))  # state dicts from before beta existed
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled memory, also one from before ``beta`` existed."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers.setdefault("beta", self.patterns.new_ones(()))

    def _rows(self, x: Tensor, name: str = "x") -> Tensor:
        """Reshape ``x`` to a matrix. Raises an AHopError if it does not match the patterns."""
        check_floating(**{name: x})
        if x.ndim < 1 or x.shape[-1] != self.patterns.shape[1]:
            raise AHopError(f"{name} must be (..., d) with d = {self.patterns.shape[1]}, got {describe(x)}")
        return x.reshape(-1, x.shape[-1])

    def _block_size(self) -> int:
        return max(1, BLOCK_ELEMENTS // self.patterns.shape[1])

    def _score_blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the scores of ``rows (L, d)`` for one block of patterns at a time."""
        size, copies = self._block_size(), None
        if isinstance(self.similarity, AdaptiveSimilarity) and self.modulation is None:
            copies = arranged_patterns(self.similarity, self.patterns)
        for start, block in zip(range(0, len(self.patterns), size), torch.split(self.patterns, size), strict=True):
            key = block if self.modulation is None else self.modulation(block)
            if copies is None:
                scores = self.similarity(rows, key)
            else:
                end = start + size
                scores = self.similarity(rows, key, [None if copy is None else copy[start:end] for copy in copies])
            yield scores if self.prior is None else scores + self.prior[start : start + size]

    def _update(self, rows: Tensor, steps: int) -> Tensor:
        """Retrieve ``rows (L, d) -> (L, d)`` with ``steps`` updates."""
        bias = self._bias()

        def attend(state: Tensor) -> Tensor:
            scores = self.beta * self.scores(state)
            if self.activation == "sign" and self.separation.name == "exponential":
                scores = scores - scores.amax(-1, keepdim=True)  # avoids overflow and leaves the signs unchanged
            weights: Tensor = self.separation(scores, masked=False)
            return weights

        def read(weights: Tensor) -> Tensor:
            output = weights @ self.patterns
            return output.sign() + (output == 0) if self.activation == "sign" else output  # the sign of 0 is 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity subtracts the bias from its query, so it is added to a state made of patterns.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, steps - 1, 0.0))[0, 0]

    def _loss(self, batch: Pairs) -> Tensor:
        index, query = batch
        return nn.functional.cross_entropy(self.beta * self.scores(query), index)
