"""AssociativeMemory: retrieval from stored patterns Xi by ``y = Xi sep(sim(mod(Xi), x))``."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, change, dot_product, iterate
from ahop_layers.errors import (
    AHopError,
    check_choice,
    check_finite_rows,
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
    Measure,
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
from ahop_layers.memory.labels import as_labels, class_logsumexp, classes_of, labeled_data, leave_out
from ahop_layers.memory.presets import named_similarity, preset_arguments
from ahop_layers.memory.search import QUERY_ROWS, Array, as_given, as_queries, check_width, top_k
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.ops.reference import accumulation_dtype
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
        labels: the class of each pattern, integers ``(N,)``, for :meth:`classify` and :meth:`class_scores`. They need
            not be consecutive.
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
    labels: Tensor | None

    def __init__(
        self,
        patterns: Tensor,
        similarity: str | Similarity = "dot",
        separation: str | Separation = "softmax",
        modulation: nn.Module | None = None,
        *,
        labels: Any = None,
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
        wide = accumulation_dtype(patterns.dtype)
        self.register_buffer(
            "beta", torch.tensor(1.0 if beta is None else float(beta), dtype=wide, device=patterns.device)
        )
        self._fits_beta = beta is None
        self.register_buffer("labels", None if labels is None else as_labels(labels, len(patterns), patterns.device))
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
            keywords: ``labels``, ``prior``, ``check`` and ``beta`` for all networks; ``degree`` for D-Hop, whose energy
                does not increase for odd degrees; ``features`` for K-Hop and K2-Hop; ``bases``, ``init``, ``debias``,
                ``blocks`` (see :class:`~ahop_layers.AdaptiveSimilarity`) and ``table`` for A-Hop. ``table=True`` adds a
                learned base similarity to the footprints.

        Raises:
            AHopError: the name is unknown, or the network does not have a keyword.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(100, 16) * 2 - 1, debias=True)
        >>> memory.similarity
        AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=True)
        """
        return cls(patterns, **preset_arguments(name, patterns, **keywords))

    def scores(self, x: Array) -> Array:
        """Score ``x (..., d)`` against all patterns: ``(..., N)``.

        Here and in the other methods, queries are converted to the dtype of the patterns. NumPy arrays are accepted,
        and the result is then a NumPy array.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        rows = self._rows(x)
        scores = torch.cat(list(self._score_blocks(rows)), -1)
        return as_given(x, scores.reshape(*x.shape[:-1], len(self.patterns)))

    @torch.no_grad()
    def retrieve(self, x: Array, steps: int = 1) -> Array:
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
        output: Array = self(x, steps)
        return output

    def forward(self, x: Array, steps: int = 1) -> Array:
        """As :meth:`retrieve`, with gradients."""
        check_sizes(steps=steps)
        chunks = torch.split(self._rows(x), max(1, BLOCK_SCORES // len(self.patterns)))
        return as_given(x, torch.cat([self._update(chunk, steps) for chunk in chunks]).reshape(x.shape))

    @torch.no_grad()
    def recall(self, x: Array) -> Array:
        """Find the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        return self.search(x)[1].reshape(x.shape[:-1])

    @torch.no_grad()
    def search(self, x: Array, k: int = 1) -> tuple[Array, Array]:
        """Find the ``k`` patterns with the largest scores. Memory is independent of N.

        Args:
            x: queries ``(..., d)``, a tensor or a NumPy array.
            k: number of patterns to find for each query.

        Returns:
            The scores and the indices of the patterns, ``(..., k)`` each, best first. Equal scores are ordered by
            index.

        Raises:
            AHopError: ``x`` does not match the patterns, or ``k`` is not an integer from 1 to N.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(4))
        >>> scores, indices = memory.search(torch.tensor([[0.5, 2.0, 0.0, 1.0], [1.0, 1.0, 1.0, 3.0]]), k=2)
        >>> scores
        tensor([[2., 1.],
                [3., 1.]])
        >>> indices
        tensor([[1, 3],
                [3, 0]])
        """
        check_sizes(k=k)
        if k > len(self.patterns):
            raise AHopError(f"k must be at most the number of patterns, {len(self.patterns)}, got {k}")
        chunks = torch.split(self._rows(x), QUERY_ROWS)
        found = zip(*(top_k(self._score_blocks(chunk), k) for chunk in chunks), strict=True)
        scores, indices = (torch.cat(each).reshape(*x.shape[:-1], k) for each in found)
        return as_given(x, scores), as_given(x, indices)

    @property
    def classes(self) -> Tensor:
        """The distinct labels in ascending order ``(n_classes,)``.

        Raises:
            AHopError: the memory has no labels.
        """
        return classes_of(self._given_labels())[0]

    def class_scores(self, x: Array) -> Array:
        """Compute the log-sum-exp of the scores over the patterns of each class: ``(..., d) -> (..., n_classes)``.

        The scores are multiplied by :attr:`beta`, and the classes are in the order of ``classes``. The softmax of the
        result is the sum of the softmax weights of the patterns of each class. Without gradients, memory is independent
        of N.

        Raises:
            AHopError: the memory has no labels, or ``x`` does not match the patterns.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3), labels=[4, 7, 7])
        >>> memory.class_scores(torch.tensor([1.0, 2.0, 2.0]))
        tensor([1.0000, 2.6931])
        """
        classes, index = classes_of(self._given_labels())
        chunks = torch.split(self._rows(x), QUERY_ROWS)
        scores = torch.cat([class_logsumexp(self._logit_blocks(chunk), index, len(classes)) for chunk in chunks])
        return as_given(x, scores.reshape(*x.shape[:-1], len(classes)))

    @torch.no_grad()
    def classify(self, x: Array) -> Array:
        """Find the label of the class with the largest score: ``(..., d) -> (...)``.

        Raises:
            AHopError: the memory has no labels, or ``x`` does not match the patterns.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3), labels=[4, 7, 7])
        >>> memory.classify(torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.5, 1.8]]))
        tensor([4, 7])
        """
        best = self.class_scores(as_queries(x, self.patterns)).argmax(-1)
        return as_given(x, self.classes[best])

    def energy(self, x: Array) -> Array:
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
        state = as_queries(x, self.patterns)
        modulated = state if self.modulation is None else self.modulation(state)
        return as_given(x, energy(state, modulated, self.scores(state), self.separation, self.beta))

    def fit(
        self,
        data: Variant | Pairs | None = None,
        epochs: int = 200,
        lr: float = 0.05,
        batch: int = 512,
        progress: bool = True,
        seed: int = 0,
        by: str = "pattern",
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
            by: ``"label"`` maximizes the likelihood of the class of a query instead of its pattern, for a memory with
                labels. Pairs are then ``(label (n,), query (n, d))``. A query that a variant draws from a stored
                pattern is scored without that pattern, unless it is the only one of its class.

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
        check_choice("by", by, ("pattern", "label"))
        if by == "label" and self.objective == "separation":
            raise AHopError("by='label' needs a memory with objective='retrieval', got objective='separation'")
        origins = self.patterns
        measure: Measure = self._pattern_loss
        if by == "label":
            given = data
            data, origins = labeled_data(given, self._given_labels(), self.patterns)
            measure = self._label_loss if data is given else self._class_loss
        generator = seeded_generator(self.patterns.device, seed)
        with unchanged_on_error(self, self.patterns):
            if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
                batches = separation_batches(self.patterns, epochs, batch, generator)
                return minimize(self, self.modulation.separation_loss, batches, lr, progress).losses
            batches = retrieval_batches(data, origins, epochs, batch, generator)
            bias = self._bias()
            if bias is not None and bias.requires_grad and data is not None:
                estimate_bias(bias, data, origins, batch, generator)
            fitted = self._minimize(measure, batches, lr, progress)
        if not fitted.best < fitted.first:
            warnings.warn(
                f"fit did not improve the loss of the held-out queries, {fitted.first:.4g}, and kept the initial"
                " weights: use more epochs, more pairs or another lr",
                stacklevel=2,
            )
        return fitted.losses

    def _minimize(self, measure: Measure, batches: Batches, lr: float, progress: bool) -> Fitted:
        """Set ``beta`` if it was not given, and train in units of the data."""
        if self._fits_beta and batches.held_out:
            beta = best_inverse_temperature(self._score_blocks, measure, batches.held_out)
            if beta is not None:
                self.beta.copy_(beta)
        scale, logit = scale_of(self.patterns), 1 / self.beta.item()
        units = [(self._bias(), scale), (self.prior, logit)]
        units += [(part.table, logit) for part in self.modules() if isinstance(part, TableSimilarity)]

        def loss(batch: Pairs) -> Tensor:
            target, query = batch
            return measure(self._logit_blocks(self._rows(query)), target)

        return minimize(self, loss, batches, lr, progress, units=units, scale=scale)

    def add(self, patterns: Tensor, check: bool = True, *, labels: Any = None) -> Tensor:
        """Store more patterns without refitting, and return their indices ``(n,)``.

        With a prior, the new patterns get the mean prior.

        Args:
            patterns: ``(n, d)``.
            check: raise if a pattern holds NaN or infinity. False skips the check.
            labels: the class of each new pattern, integers ``(n,)``. Required if and only if the memory has labels.

        Raises:
            AHopError: the patterns do not match those stored, or hold NaN or infinity. Labels are missing, or are
                given to a memory without labels.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.add(torch.ones(2, 4))
        tensor([3, 4])
        """
        check_patterns(patterns)
        check_width("patterns", patterns, self.patterns)
        before, added = len(self.patterns), patterns.detach().to(self.patterns)
        if check:
            check_finite_rows(patterns=added)
        if (labels is None) != (self.labels is None):
            expected = "not be given: the memory has none" if self.labels is None else "be given: the memory has labels"
            raise AHopError(f"labels must {expected}, got {'none' if labels is None else 'labels'}")
        if self.labels is not None:
            self.labels = torch.cat([self.labels, as_labels(labels, len(patterns), self.labels.device)])
        self.patterns = torch.cat([self.patterns, added])
        if self.prior is not None:
            self._set_prior(torch.cat([self.prior.detach(), self.prior.detach().mean().expand(len(patterns))]))
        return torch.arange(before, len(self.patterns), device=self.patterns.device)

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Delete patterns, and their labels, by index or by boolean mask. Later patterns move up.

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
        if self.labels is not None:
            self.labels = self.labels[keep]
        if self.prior is not None:
            self._set_prior(self.prior.detach()[keep])

    def _bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity subtracts from a query, if it has one."""
        bias = getattr(self.similarity, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.shape == self.patterns.shape[1:] else None

    def _given_labels(self) -> Tensor:
        if self.labels is None:
            raise AHopError("the memory must have labels, got none: use AssociativeMemory(patterns, labels=...)")
        return self.labels

    def _set_prior(self, values: Tensor) -> None:
        self.prior = nn.Parameter(values, requires_grad=self.prior is not None and self.prior.requires_grad)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, which may hold another number of patterns. If it fails, the memory is unchanged.

        Args:
            state_dict, strict, assign: as for ``nn.Module``.

        Raises:
            AHopError: the state dict holds no pattern, NaN or infinity in a pattern, a prior or labels of another
                length, or the memory has labels and the state dict has none.

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
            self._load_labels(state_dict, prefix + "labels", len(stored))
            before, self.patterns = len(self.patterns), self.patterns.new_empty(stored.shape)  # not the caller's tensor
            if self.prior is not None and len(stored) != before:
                self._set_prior(self.prior.new_zeros(len(stored)))
        state_dict.setdefault(prefix + "beta", torch.ones_like(self.beta))  # state dicts from before beta existed
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled memory, also one from before ``beta`` existed."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers.setdefault("beta", self.patterns.new_ones((), dtype=accumulation_dtype(self.patterns.dtype)))

    def _load_labels(self, state_dict: dict[str, Any], key: str, count: int) -> None:
        """Check the labels of a state dict, and take their number from it."""
        if self.labels is not None:
            if key not in state_dict:
                raise AHopError(f"{key} must be in the state dict, because the memory has labels, got none")
            state_dict[key] = as_labels(state_dict[key], count, name=key)
            self.labels = self.labels.new_empty(count)

    def _rows(self, x: Array) -> Tensor:
        """Returns the queries ``x (..., d)`` as a matrix with the dtype of the patterns, or raises."""
        return as_queries(x, self.patterns).reshape(-1, self.patterns.shape[1])

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

    def _logit_blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the scores as :meth:`_score_blocks`, multiplied by the inverse temperature."""
        return (self.beta * scores for scores in self._score_blocks(rows))

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

    def _pattern_loss(self, blocks: Iterable[Tensor], index: Tensor) -> Tensor:
        """The loss of logits ``(L, B)`` of blocks of patterns, for queries of the patterns ``index (L,)``."""
        return nn.functional.cross_entropy(torch.cat(list(blocks), -1), index)

    def _class_loss(self, blocks: Iterable[Tensor], target: Tensor) -> Tensor:
        """The loss for queries of the classes ``target (L,)``, as numbered in ``classes``."""
        classes, of_pattern = classes_of(self._given_labels())
        return nn.functional.cross_entropy(class_logsumexp(blocks, of_pattern, len(classes)), target)

    def _label_loss(self, blocks: Iterable[Tensor], index: Tensor) -> Tensor:
        """The loss for queries of the classes of the patterns ``index (L,)``, each without that pattern."""
        of_pattern = classes_of(self._given_labels())[1]
        return self._class_loss(leave_out(blocks, index, of_pattern), of_pattern[index])
