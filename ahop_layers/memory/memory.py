"""AssociativeMemory: retrieval from stored patterns Xi by ``y = Xi sep(sim(mod(Xi), x))``."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, change, dot_product, iterate
from ahop_layers.errors import AHopError, check_callable, check_choice, check_sizes
from ahop_layers.memory import questions
from ahop_layers.memory.auto import AutoSimilarity, first_inverse_temperature
from ahop_layers.memory.batches import (
    Batches,
    Pairs,
    check_pairs,
    retrieval_batches,
    seeded_generator,
    separation_batches,
)
from ahop_layers.memory.candidates import CANDIDATES, MINED, MOST_MINED
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
from ahop_layers.memory.solve import Report, learn, solve_weights
from ahop_layers.memory.store import unchanged_on_error
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.variants import Variant, as_damage


class AssociativeMemory(ScoredPatterns):
    """Stores patterns and retrieves the one that a corrupted query was made from.

    Args:
        patterns: ``(N, d)``, a tensor or a NumPy array, not copied. NaN is an unknown value. They may be memory-mapped
            and larger than the memory of the machine (``torch.from_file``, ``torch.load(..., mmap=True)``);
            :meth:`search` and :meth:`class_scores` read them block by block. If the similarity has blocks that are not
            consecutive or not of equal width (``blocks`` is a tensor), scoring arranges the patterns by block once and
            keeps that copy, up to 2**28 elements; larger memories are arranged in each call, to save memory. To need
            neither, permute the dimensions so that blocks are consecutive, and give their number. The copy is renewed
            if ``patterns`` is replaced or modified in place, except through ``.data`` or NumPy.
        similarity: ``"auto"`` is robust against wrong values, also before :meth:`fit`, see
            :class:`~ahop_layers.memory.auto.AutoSimilarity`. ``"dot"``, ``"dis"`` and ``"l1"`` are fixed, and
            ``"adaptive"`` is the similarity of A-Hop. A module or function scores queries ``(L, d)`` against keys
            ``(S, d)`` and returns ``(L, S)``.
        separation: a name of :class:`ahop_layers.separation.Separation`, or such a module.
        modulation: a module that transforms patterns ``(S, d)`` before they are scored, or ``None``.
        labels: the class of each pattern, integers ``(N,)``, for :meth:`classify` and :meth:`class_scores`. They need
            not be consecutive.
        prior: learn a log-probability for each pattern that is added to its score, initialized to zero.
        activation: ``"sign"`` for the binary states of the classic networks, or ``None``.
        objective: the loss of :meth:`fit`. ``"retrieval"`` is the loss of the paper, ``"separation"`` the
            :func:`~ahop_layers.memory.kernel.uniformity_loss` of the modulated patterns.
        check: raise if a pattern holds infinity, or no known value. False skips the check, which reads all patterns
            once, and promises that there is no NaN.
        beta: inverse temperature, the factor of the scores in the separation, the loss and the energy. ``None`` means
            1, with ``"auto"`` one with which stored patterns retrieve themselves, until :meth:`fit` sets it; a number
            is kept. It does not change which score is the largest. A state dict
            has its value, but not whether it was given: a memory that loads one keeps it in a later :meth:`fit` only if
            it was created with a number as well.

    Raises:
        AHopError: an argument is invalid.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns)
    >>> query = patterns[:3] + 0.01
    >>> query[:, :4], query[:, 4:6] = 5.0, torch.nan
    >>> memory.recall(query)
    tensor([0, 1, 2])
    """

    def __init__(
        self,
        patterns: Any,
        similarity: str | Similarity = "auto",
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
        if isinstance(self.similarity, AutoSimilarity) and beta is None:
            self.beta.fill_(first_inverse_temperature(self.similarity, self.patterns))

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
        >>> memory = ah.AssociativeMemory(torch.eye(4) * 10, "dot")
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
        damage: Any = None,
        epochs: int | None = None,
        lr: float | None = None,
        batch: int | None = None,
        progress: bool = True,
        seed: int = 0,
        by: str | None = None,
    ) -> Report | Tensor:
        """Learn the similarity from damaged queries.

        With ``similarity="auto"``, and with any :class:`~ahop_layers.AdaptiveSimilarity` without heads, the score is
        linear in its weights, and learning them is a small regression that is solved in seconds, without epochs or a
        learning rate: see :mod:`ahop_layers.memory.solve`. The inverse temperature :attr:`beta` is set as well, and for
        ``"auto"`` the widths and the units of dimensions; :meth:`add` keeps all of them. If a simple score such as L1
        is better on held-out queries, it is the result of ``"auto"``; other similarities then keep their weights. A
        bias of zero is first set to its least-squares estimate. A prior is the frequency of the patterns, or classes,
        in given pairs.

        Kernels, tables, parameters that are partly frozen and other modules are trained by gradients, and so is an
        :class:`~ahop_layers.AdaptiveSimilarity` if ``epochs``, ``lr`` or ``batch`` is given. The loss is the negative
        log-likelihood of the pattern that a query was made from, as in the paper. It uses the softmax of the scores for
        every separation, because the logarithm of a sparse weight can be infinite. Bias and inverse temperature start
        at their estimates. Steps are relative to the scale of the patterns and to ``beta``, so that the result does not
        depend on the unit of the data. Weights that are given, as a module or as a tensor ``init``, are in that unit:
        if their bases grow with different powers of it, as ``"l1"`` and ``"dot"`` do, the result depends on it. A tenth
        of the pairs, at most 512, is held out; for a damage, 512 further queries. The memory keeps the parameters with
        the smallest of about ten losses on them. Training warns if none of these is smaller than the loss at the start,
        before or after the bias and ``beta`` are set.

        Args:
            damage: what happens to a pattern before it is a query: a variant, a function ``f(x)`` or
                ``f(x, generator)``, or a list of these, which apply in order (see :mod:`ahop_layers.variants`). Or
                pairs ``(index (n,), query (n, d))`` of queries and the patterns they belong to, tensors or NumPy
                arrays. None, where the weights are solved for, assumes that any share of the values, from none to most,
                may be replaced or missing, and that the others may have a little noise. K-Hop needs no damage.
            epochs: number of epochs of the training, by default 200. Each draws ``batch`` queries of a damage, or
                splits the pairs into shuffled batches.
            lr: maximum learning rate of Adam, by default 0.05. It rises for a tenth of the steps, then falls to zero.
            batch: number of queries per step, by default 512.
            progress: show a progress bar while training, if tqdm is installed.
            seed: seed of all random numbers.
            by: ``"label"`` learns to find the class of a query instead of its ``"pattern"``; pairs are then
                ``(label (n,), query (n, d))``. A query that was made of a stored pattern is scored without that
                pattern, unless it is the only one of its class. None means by label if the memory has labels.

        Returns:
            Where the weights are solved for, a report that prints as a table: the accuracy of simple scores and of the
            learned one on held-out queries. Otherwise the loss of every step.

        Raises:
            AHopError: the memory has no trainable parameters, the patterns are float16 and training would let squared
                gradients underflow, an argument is invalid, or the loss is not finite. The parameters are then
                unchanged.

        >>> import torch, ahop_layers as ah
        >>> patterns = torch.rand(200, 24, generator=torch.Generator().manual_seed(1))
        >>> memory = ah.AssociativeMemory(patterns)
        >>> damage = ah.variants.Replaced((0.0, 0.8), low=0.0, high=1.0)
        >>> index, query = damage.sample(patterns, 300)  # or memory.fit(damage), from more queries
        >>> report = memory.fit((index, query))
        >>> accuracy = dict(report.rows)
        >>> accuracy["learned"] > accuracy["L1"]
        True
        """
        if torch.is_inference_mode_enabled():
            raise AHopError("fit needs gradients: expected no inference mode, got torch.inference_mode")
        by = (
            ("label" if self.labels is not None and self.objective != "separation" else "pattern") if by is None else by
        )
        check_choice("by", by, ("pattern", "label"))
        if isinstance(damage, (tuple, list)):
            given = tuple(from_numpy(each, self.patterns.device) for each in damage)
            damage = given if any(isinstance(each, Tensor) for each in given) else as_damage(damage)
            if isinstance(damage, tuple) and len(damage) != 2:
                raise AHopError(
                    f"data must be a variant or a pair (index, query), got {type(damage).__name__} of {len(damage)}"
                )
        elif damage is not None:
            damage = as_damage(damage)
        options = {"epochs": epochs, "lr": lr, "batch": batch}
        trained = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        linear = self._linear_similarity()
        if trained and isinstance(linear, AutoSimilarity):
            raise AHopError(f"fit solves similarity='auto' without epochs, lr and batch, got {', '.join(trained)}")
        if linear is not None and not trained:
            return self._solve(linear, questions.Anything() if damage is None else damage, by, seed)
        sizes = 200 if epochs is None else epochs, 512 if batch is None else batch
        return self._train(damage, by, *sizes, 0.05 if lr is None else lr, progress, seed)

    def _linear_similarity(self) -> AdaptiveSimilarity | None:
        """Returns the similarity if the scores are linear in its weights, and all of them may be learned."""
        similarity = self.similarity
        if not isinstance(similarity, AdaptiveSimilarity) or similarity.num_heads is not None:
            return None
        fixed = not all(each.requires_grad for each in self.parameters())
        own = type(similarity).forward is AdaptiveSimilarity.forward
        return None if fixed or not own or self.modulation is not None else similarity

    @torch.no_grad()
    def _solve(self, similarity: AdaptiveSimilarity, damage: Any, by: str, seed: int) -> Report:
        """Learn the similarity by solving a regression, and estimate its bias and the prior."""
        generator = seeded_generator(self.patterns.device, seed)
        origins, labels, classes, log_prior = all_rows(self.patterns, self.shard), None, None, None
        if by == "label":
            classes = self._given_classes()
            labels = all_rows(classes.of_pattern, self.shard)
        count = max(CANDIDATES, min(MOST_MINED, MINED // self.patterns.shape[1]))
        kept = torch.randperm(self._count, generator=generator, device=self.patterns.device)[:count]
        if isinstance(damage, Variant):
            stored, own = origins[kept], None if labels is None else labels[kept]
            damage = damage.bind(stored)
            asked = questions.draw(damage, stored, own, generator)
        else:
            if self.shard is not None:
                self.shard.check_equal("data", *(torch.as_tensor(each) for each in damage))
            if classes is not None:
                damage, origins = labeled_data(damage, classes, self.patterns, self.shard) or (damage, origins)
            damage = check_pairs(damage[0], damage[1], origins)
            asked = questions.given(damage, by == "label", generator)
            if by == "pattern":  # the patterns that queries belong to are among those that are kept
                kept = torch.unique(torch.cat([asked.origin, kept]))
                asked = asked._replace(origin=torch.searchsorted(kept, asked.origin))
            if self.prior is not None:
                place = torch.arange(self._count, device=kept.device)
                log_prior = questions.log_frequency(damage[0], place if labels is None else labels[place])
                asked = asked._replace(log_prior=log_prior[kept])
            stored, own = all_rows(self.patterns, self.shard)[kept], None if labels is None else labels[kept]
            asked = questions.with_intact(asked, stored, own, generator)
        with unchanged_on_error(self, self.patterns):
            bias = self._bias()
            if bias is not None:
                estimate_bias(bias, damage, origins, questions.QUERIES, generator)
            if isinstance(similarity, AutoSimilarity):
                learned = learn(stored, own, asked, generator)
                similarity.set_(learned)
                temperature, report = learned.temperature, learned.report
            else:
                weights, temperature, report = solve_weights(similarity, stored, own, asked, generator)
                if weights is not None:
                    similarity.set_ranks_(weights)
            if self._fits_beta:
                self.beta.fill_(1 / temperature)
            if self.prior is not None:
                self.prior.zero_()
                if log_prior is not None:
                    self.prior.copy_(log_prior / self.beta)
        return report

    def _train(self, data: Any, by: str, epochs: int, batch: int, lr: float, progress: bool, seed: int) -> Tensor:
        """Train all parameters by gradients: those of the similarity and the kernel, and the prior."""
        if self.patterns.dtype == torch.float16:
            raise AHopError("fit needs patterns of another dtype, got torch.float16: call memory.float() before")
        if by == "label" and self.objective == "separation":
            raise AHopError("by='label' needs a memory with objective='retrieval', got objective='separation'")
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
                stacklevel=3,
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
            every = weights
            if shard is not None:
                weights = weights[..., shard.start : shard.stop]
            known = None
            if self._unknown:  # each value is averaged over the patterns that know it
                known = weights @ (~self.patterns.isnan()).to(weights.dtype)
            output = weights @ (self.patterns.nan_to_num(0.0) if self._unknown else self.patterns)
            if shard is not None:
                output, known = shard.total(output), None if known is None else shard.total(known)
            if known is not None:
                total = every.sum(-1, keepdim=True)
                output = output * torch.where(known != 0, total / known, torch.nan)
            return output.sign() + (output == 0) if self.activation == "sign" else output  # the sign of 0 is 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity subtracts the bias from its query, so it is added to a state made of patterns.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, int(steps) - 1, 0.0))[0, 0]
