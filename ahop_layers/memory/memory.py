"""AssociativeMemory: retrieval from stored patterns Xi by ``y = Xi sep(sim(mod(Xi), x))``."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, change, dot_product, iterate
from ahop_layers.errors import AHopError, check_callable, check_choice, check_sizes
from ahop_layers.memory.batches import Batches, Pairs, retrieval_batches, seeded_generator, separation_batches
from ahop_layers.memory.energy import choose_energy
from ahop_layers.memory.estimates import best_inverse_temperature, estimate_bias, scale_of
from ahop_layers.memory.fit import Fitted, mean_loss, minimize
from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.memory.labels import labeled_data
from ahop_layers.memory.losses import Measure, class_loss, label_loss, pattern_loss
from ahop_layers.memory.presets import preset_arguments
from ahop_layers.memory.scoring import ScoredPatterns
from ahop_layers.memory.search import Array, as_given, as_queries, from_numpy
from ahop_layers.memory.shards import Rows, all_rows
from ahop_layers.memory.store import unchanged_on_error
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.variants import Variant


class AssociativeMemory(ScoredPatterns):
    """Stores patterns and retrieves the one that a corrupted query was made from.

    Args:
        patterns: ``(N, d)``, a tensor or a NumPy array, not copied. They may be memory-mapped and larger than the
            memory of the machine (``torch.from_file``, ``torch.load(..., mmap=True)``); :meth:`search` and
            :meth:`class_scores` read them block by block. If the similarity has blocks that are not consecutive or not
            of equal width (``blocks`` is a tensor), scoring arranges the patterns by block once and keeps that copy, up
            to 2**28 elements; larger memories are arranged in each call, to save memory. To need neither, permute the
            dimensions so that blocks are consecutive, and give their number. The copy is renewed if ``patterns`` is
            replaced or modified in place, except through ``.data`` or NumPy.
        similarity: ``"dot"``, ``"dis"``, ``"l1"``, ``"adaptive"``, or a module or function that scores queries
            ``(L, d)`` against keys ``(S, d)`` and returns ``(L, S)``.
        separation: a name of :class:`ahop_layers.separation.Separation`, or such a module.
        modulation: a module that transforms patterns ``(S, d)`` before they are scored, or ``None``.
        labels: the class of each pattern, integers ``(N,)``, for :meth:`classify` and :meth:`class_scores`. They need
            not be consecutive.
        prior: learn a log-probability for each pattern that is added to its score, initialized to zero.
        activation: ``"sign"`` for the binary states of the classic networks, or ``None``.
        objective: the loss of :meth:`fit`. ``"retrieval"`` is the loss of the paper, ``"separation"`` the
            :func:`~ahop_layers.memory.kernel.uniformity_loss` of the modulated patterns.
        check: raise if a pattern holds NaN or infinity. False skips the check, which reads all patterns once.
        beta: inverse temperature, the factor of the scores in the separation, the loss and the energy. ``None`` means
            1 until :meth:`fit` sets it; a number is kept. It does not change which score is the largest. A state dict
            has its value, but not whether it was given: a memory that loads one keeps it in a later :meth:`fit` only if
            it was created with a number as well.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns, similarity="dis")
    >>> memory.recall(patterns[:3] + 0.01)
    tensor([0, 1, 2])
    """

    def __init__(
        self,
        patterns: Any,
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
        super().__init__(patterns, similarity, modulation, labels=labels, prior=prior, check=check, beta=beta)
        check_choice("objective", objective, ("retrieval", "separation"))
        if activation not in (None, "sign"):
            raise AHopError(f"activation must be 'sign' or None, got {activation!r}")
        if objective == "separation" and not isinstance(modulation, KernelModulation):
            raise AHopError(f"objective='separation' needs a KernelModulation, got {type(modulation).__name__}")
        self.separation = Separation(separation) if isinstance(separation, str) else separation
        check_callable(separation=self.separation)
        self.activation, self.objective = activation, objective

    @classmethod
    def preset(cls, name: str, patterns: Any, **keywords: Any) -> "AssociativeMemory":
        """Create a network of the paper's first table.

        Args:
            name: Hop, D-Hop, E-Hop, M-Hop, U-Hop, S-Hop, K-Hop (:meth:`fit` separates the patterns), K2-Hop
                (:meth:`fit` minimizes the loss of the paper) or A-Hop.
            patterns: ``(N, d)``, a tensor or a NumPy array.
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
        patterns = from_numpy(patterns)
        return cls(patterns, **preset_arguments(name, patterns, **keywords))

    @torch.no_grad()
    def retrieve(self, x: Array, steps: int = 1) -> Array:
        """Retrieve patterns for queries, without gradients.

        The graph of the gradients would store every block of the patterns. Call the memory itself to compute gradients.

        Args:
            x: queries ``(..., d)``, a tensor or a NumPy array.
            steps: number of updates of the state, at least 1.

        Returns:
            The retrieved patterns ``(..., d)``.

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
        """As :meth:`retrieve`, with gradients.

        Args:
            x: queries ``(..., d)``, a tensor or a NumPy array.
            steps: number of updates of the state, at least 1.
        """
        check_sizes(steps=steps)
        rows, own = self._all_rows(x)
        states = torch.cat([self._update(chunk, steps) for chunk in self._chunks(rows)])
        return as_given(x, states[own].reshape(x.shape))

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
        wide = accumulation_dtype(state.dtype)
        modulated, scores = self._modulated(state).to(wide), self.scores(state).to(wide)
        return as_given(x, energy(state.to(wide), modulated, scores, self.separation, self.beta).to(state.dtype))

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
        depend on the unit of the data. Weights that are given, as a module or as a tensor ``init``, are in that unit:
        if their bases grow with different powers of it, as ``"l1"`` and ``"dot"`` do, the result depends on it.

        A tenth of the pairs, at most 512, is held out; for a variant, 512 further queries. The memory keeps the
        parameters with the smallest of about ten losses on them. ``fit`` warns if none of these is smaller than the
        loss at the start, before or after the bias and ``beta`` are set.

        Args:
            data: a variant, from which every epoch draws ``batch`` queries; or pairs ``(index (n,), query (n, d))``,
                tensors or NumPy arrays, which every epoch splits into shuffled batches. K-Hop needs no data.
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
            AHopError: the memory has no trainable parameters, the patterns are float16 (squared gradients underflow),
                an argument is invalid, or the loss is not finite. The parameters are then unchanged.

        >>> import torch, ahop_layers as ah
        >>> patterns = torch.rand(50, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
        >>> memory = ah.AssociativeMemory.preset("A-Hop", patterns, debias=True)
        >>> losses = memory.fit(ah.variants.Mixed(0.3, 0.1, 0.5), epochs=100, batch=64, progress=False)
        >>> bool(losses[-10:].mean() < losses[:10].mean())
        True
        """
        if torch.is_inference_mode_enabled():
            raise AHopError("fit needs gradients: expected no inference mode, got torch.inference_mode")
        if self.patterns.dtype == torch.float16:
            raise AHopError("fit needs patterns of another dtype, got torch.float16: call memory.float() before")
        check_choice("by", by, ("pattern", "label"))
        if by == "label" and self.objective == "separation":
            raise AHopError("by='label' needs a memory with objective='retrieval', got objective='separation'")
        if isinstance(data, (tuple, list)):
            data = tuple(from_numpy(each, self.patterns.device) for each in data)
        if self.shard is not None and isinstance(data, tuple):
            self.shard.check_equal("data", *(torch.as_tensor(each) for each in data))
        origins: Rows = all_rows(self.patterns, self.shard)
        measure: Measure = partial(pattern_loss, shard=self.shard)
        if by == "label":
            classes = self._given_classes()
            measure = partial(label_loss, classes=classes, shard=self.shard)
            labeled = labeled_data(data, classes, self.patterns, self.shard)
            if labeled is not None:
                data, origins = labeled
                measure = partial(class_loss, classes=classes, shard=self.shard)
        generator = seeded_generator(self.patterns.device, seed)
        with unchanged_on_error(self, self.patterns):
            if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
                batches = separation_batches(origins, epochs, batch, generator)
                return minimize(
                    self, self.modulation.separation_loss, batches, lr, self._shows(progress), shard=self.shard
                ).losses
            batches = retrieval_batches(data, origins, epochs, batch, generator)

            def loss(batch: Pairs) -> Tensor:
                target, query = batch
                return measure(self._logit_blocks(self._rows(query)), target)

            first = mean_loss(loss, batches.held_out)
            bias = self._bias()
            if bias is not None and bias.requires_grad and data is not None:
                estimate_bias(bias, data, origins, batch, generator)
            if self._fits_beta:
                held_out = [(target, self._rows(query)) for target, query in batches.held_out]
                self.beta.copy_(best_inverse_temperature(self._score_blocks, measure, held_out, self.shard))
            fitted = self._minimize(loss, batches, lr, progress)
        first = min(first, fitted.first)
        if not fitted.best < first:
            warnings.warn(
                f"fit did not improve the loss of the held-out queries: expected less than {first:.4g}, got"
                f" {fitted.best:.4g}. Use more epochs, more pairs or another lr",
                stacklevel=2,
            )
        return fitted.losses

    def _minimize(self, loss: Callable[[Pairs], Tensor], batches: Batches, lr: float, progress: bool) -> Fitted:
        """Train in units of the data."""
        scale = scale_of(self.patterns) if self.shard is None else self.shard.scale
        logit = 1 / self.beta.item()
        units = [(self._bias(), scale), (self.prior, logit)]
        units += [(part.table, logit) for part in self.modules() if isinstance(part, TableSimilarity)]
        return minimize(self, loss, batches, lr, self._shows(progress), units=units, scale=scale, shard=self.shard)

    def _shows(self, progress: bool) -> bool:
        """Returns whether this rank shows a progress bar."""
        return progress and (self.shard is None or self.shard.rank == 0)

    def _update(self, rows: Tensor, steps: int) -> Tensor:
        """Retrieve ``rows (L, d) -> (L, d)`` with ``steps`` updates."""
        bias = self._bias()

        def attend(state: Tensor) -> Tensor:
            scores = self._logits(self._all_scores(state.flatten(0, -2))).reshape(*state.shape[:-1], self._count)
            if self.activation == "sign" and self.separation.name == "exponential":
                scores = scores - scores.amax(-1, keepdim=True)  # avoids overflow and leaves the signs unchanged
            weights: Tensor = self.separation(scores, masked=False)
            return weights

        def read(weights: Tensor) -> Tensor:
            shard, weights = self.shard, weights.to(self.patterns.dtype)
            if shard is None:
                output = weights @ self.patterns
            else:
                output = shard.total(weights[..., shard.start : shard.stop] @ self.patterns)
            return output.sign() + (output == 0) if self.activation == "sign" else output  # the sign of 0 is 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity subtracts the bias from its query, so it is added to a state made of patterns.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, int(steps) - 1, 0.0))[0, 0]
