"""AssociativeMemory: retrieval from stored patterns Xi by ``y = Xi sep(sim(mod(Xi), x))``."""

import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers import files
from ahop_layers.association import change, energy, iterate
from ahop_layers.errors import (
    AHopError,
    check_callable,
    check_choice,
    check_given_sizes,
    check_numbers,
    check_probability,
    check_same_device,
    check_seed,
    check_sizes,
    describe,
    has_unknown,
)
from ahop_layers.learning import questions
from ahop_layers.learning.auto import AutoSimilarity, first_inverse_temperature
from ahop_layers.learning.candidates import some_patterns
from ahop_layers.learning.questions import Pairs
from ahop_layers.learning.solve import Report, learn, solve_weights
from ahop_layers.memory import fit as gradients
from ahop_layers.memory import storage
from ahop_layers.memory.arrays import Array, as_given, as_indices, as_tensor, check_values, from_numpy
from ahop_layers.memory.confidence import CALIBRATED, Asked, Calibration, Hits, calibrate, contributions
from ahop_layers.memory.labels import as_labels, class_logsumexp
from ahop_layers.memory.presets import KernelModulation, describe_parts, make_parts, named_similarity, preset_arguments
from ahop_layers.memory.search import BLOCK_SCORES, QUERY_ROWS, Scorer
from ahop_layers.memory.shards import Shard, Whole
from ahop_layers.memory.shortlist import Index
from ahop_layers.memory.storage import Stored, as_patterns, make_stored, unchanged_on_error
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import check_state
from ahop_layers.similarity.associator import Associator
from ahop_layers.similarity.fixed import dot_product
from ahop_layers.similarity.protocol import Similarity, fix_scales_, is_solvable
from ahop_layers.similarity.table import TableSimilarity
from ahop_layers.similarity.widths import scale_of
from ahop_layers.training import mean_loss, minimize
from ahop_layers.variants import Variant


class AssociativeMemory(Associator):
    """Stores patterns and finds the one that a damaged query was made from.

    Threads may search while another one adds or removes patterns: each search sees one state of the memory. An invalid
    argument raises an :class:`~ahop_layers.AHopError`, here and in all methods, and leaves the memory unchanged.

    Args:
        patterns: ``(N, d)``, or images ``(N, H, W)`` or ``(N, C, H, W)``: a tensor, an array, a data frame or a list. A
            tensor or array of floating-point numbers or uint8 is not copied; do not modify it. NaN is an unknown value.
            Patterns may be memory-mapped and larger than the memory of the machine (``torch.from_file``,
            ``torch.load(..., mmap=True)``). If ``blocks`` of the similarity is a tensor, scoring arranges the patterns
            by block once and keeps that copy, up to 2**28 elements.
        similarity: ``"auto"`` is robust against wrong values, also before :meth:`fit`, see
            :class:`~ahop_layers.learning.auto.AutoSimilarity`. ``"dot"``, ``"dis"`` and ``"l1"`` are fixed, and
            ``"adaptive"`` is the similarity of A-Hop. A module or function scores queries ``(L, d)`` against keys
            ``(S, d)`` and returns ``(L, S)``.
        separation: a name of :class:`ahop_layers.separation.Separation`, or such a module.
        modulation: a module that transforms patterns ``(S, d)`` before they are scored, or ``None``.
        labels: the class of each pattern ``(N,)``, integers or strings, for :meth:`classify`, :meth:`class_scores` and
            the confidence of hits. Integers need not be consecutive.
        ids: a name of each pattern ``(N,)``, strings or integers, all different.
        prior: learn a log-probability for each pattern that is added to its score, initialized to zero.
        activation: ``"sign"`` for the binary states of the classic networks, or ``None``.
        objective: the loss of :meth:`fit`. ``"retrieval"`` is the loss of the paper, ``"separation"`` the
            :func:`~ahop_layers.memory.presets.uniformity_loss` of the modulated patterns.
        check: raise if a pattern holds infinity, or no known value. False skips the check, which reads all patterns
            once, and promises that there is no NaN.
        beta: inverse temperature, the factor of the scores in the separation, the loss and the energy. ``None`` means
            1, with ``"auto"`` one with which stored patterns retrieve themselves, until :meth:`fit` sets it.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns, ids=[f"pattern {i}" for i in range(100)])
    >>> query = patterns[:3] + 0.01
    >>> query[:, :4], query[:, 4:6] = 5.0, torch.nan
    >>> hits = memory.search(query)
    >>> hits.ids
    [['pattern 0'], ['pattern 1'], ['pattern 2']]
    """

    beta: Tensor
    calibration: Tensor
    foreign: Tensor
    _stored: Stored
    _index: Index | None = None
    _calibrated_for: float = math.inf  # the number of patterns of a calibration without a fit

    def __init__(
        self,
        patterns: Any,
        similarity: str | Similarity = "auto",
        separation: str | Separation = "softmax",
        modulation: nn.Module | None = None,
        *,
        labels: Any = None,
        ids: Any = None,
        prior: bool = False,
        activation: str | None = None,
        objective: str = "retrieval",
        check: bool = True,
        beta: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("objective", objective, ("retrieval", "separation"))
        if activation not in (None, "sign"):
            raise AHopError(f"activation must be 'sign' or None, got {activation!r}")
        if objective == "separation" and not isinstance(modulation, KernelModulation):
            raise AHopError(f"objective='separation' needs a KernelModulation, got {type(modulation).__name__}")
        rows, shape = as_patterns(patterns)
        self._writing = threading.RLock()
        stored = make_stored(rows, shape, labels, ids, check)
        wide = accumulation_dtype(stored.dtype)
        zeros = torch.zeros(len(rows), device=rows.device, dtype=stored.dtype)
        self._set(replace(stored, prior=nn.Parameter(zeros) if prior else None))
        self._fits_beta = beta is None
        if beta is not None:
            check_numbers("a positive number", beta=beta)
        self.register_buffer("beta", torch.tensor(float(beta or 1.0), dtype=wide, device=rows.device))
        if not rows.is_meta and not 0 < self.beta < torch.inf:
            raise AHopError(f"beta must be a positive number within the range of {wide}, got {beta!r}")
        self.register_buffer("calibration", torch.zeros(4, dtype=torch.float64, device=rows.device))  # none yet
        self.register_buffer("foreign", torch.zeros(CALIBRATED, device=rows.device))
        sample = rows if rows.dtype == stored.dtype else stored.sample(stored.spread())
        self.similarity = named_similarity(similarity, sample, shape) if isinstance(similarity, str) else similarity
        self.modulation = modulation
        self.separation = Separation(separation) if isinstance(separation, str) else separation
        check_callable(similarity=self.similarity, separation=self.separation)
        if modulation is not None:
            check_callable(modulation=modulation)
        self.activation, self.objective = activation, objective
        if stored.unknown:
            self._scorer().check_missing("patterns")
        if not sample.is_meta:
            fix_scales_(self.similarity, sample)  # not per block of patterns
            if similarity == "auto" and beta is None and is_solvable(self.similarity):
                self.beta.fill_(first_inverse_temperature(self.similarity, sample))

    @classmethod
    def preset(cls, name: str, patterns: Any, **keywords: Any) -> "AssociativeMemory":
        """Creates a network of the paper's first table for ``patterns``.

        Args:
            name: Hop, D-Hop, E-Hop, M-Hop, U-Hop, S-Hop, K-Hop (:meth:`fit` separates the patterns), K2-Hop
                (:meth:`fit` minimizes the loss of the paper) or A-Hop.
            keywords: ``labels``, ``ids``, ``prior``, ``check`` and ``beta`` for all networks; ``degree`` for D-Hop;
                ``features`` for K-Hop and K2-Hop; ``bases``, ``init``, ``debias``, ``blocks`` (see
                :class:`~ahop_layers.AdaptiveSimilarity`) and ``table``, a learned base similarity, for A-Hop.

        >>> memory = AssociativeMemory.preset("A-Hop", torch.rand(100, 16) * 2 - 1, debias=True)
        >>> memory.similarity
        AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=True)
        """
        rows, _ = as_patterns(patterns)
        own = {key: keywords.pop(key) for key in ("labels", "ids", "prior", "check", "beta") if key in keywords}
        if own.get("check", True) and keywords.get("table"):  # which depends on the range of the patterns
            has_unknown(patterns=rows)
        _, largest = storage.read_values("patterns", rows, check=False)
        sample = rows.to(storage.scoring_dtype(rows.dtype, rows.shape[1], largest))
        return cls(patterns, **preset_arguments(name, sample, **keywords), **own)

    def __len__(self) -> int:
        return self._stored.count

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_writing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._writing = threading.RLock()  # each copy has its own

    @property
    def patterns(self) -> Tensor:
        """The patterns in the shape in which they were given; of a sharded memory, those of this rank."""
        return self._stored.shaped(self._stored.patterns)

    @patterns.setter
    def patterns(self, patterns: Any) -> None:
        rows, shape = as_patterns(patterns)
        stored = self._stored
        alone = all(each is None for each in (stored.labels, stored.ids, stored.prior, self.shard))
        if shape != stored.shape or not (alone or len(rows) == len(stored.patterns)):
            expected = (len(stored.patterns), *stored.shape)
            raise AHopError(f"patterns must be {expected}, as those stored, got {describe(rows)}: use add and remove")
        unknown, largest = storage.read_values("patterns", rows)
        if unknown:
            self._scorer().check_missing("patterns")
        self.calibration = torch.zeros_like(self.calibration)
        ranks = Whole(len(rows)) if alone else stored.ranks
        self._stored = replace(stored, patterns=rows, unknown=unknown, largest=largest, ranks=ranks)

    @property
    def labels(self) -> Any:
        """The class of each pattern ``(N,)``, a list if they are strings; None if there are none."""
        stored = self._stored
        return None if stored.labels is None else stored.named(stored.labels)

    @labels.setter
    def labels(self, labels: Any) -> None:
        stored = self._unsharded("labels")
        codes, names = as_labels(labels, stored.count, stored.patterns.device)
        self.calibration = torch.zeros_like(self.calibration)
        self._stored = replace(stored, labels=codes, names=names, classes=None)

    @property
    def ids(self) -> list[str | int] | None:
        """The name of each pattern, or None."""
        return None if self._stored.ids is None else list(self._stored.ids)

    @property
    def classes(self) -> Any:
        """The distinct labels in ascending order ``(n_classes,)``, a list if they are strings; None without labels."""
        stored = self._stored
        return None if stored.classes is None else stored.named(stored.classes.labels)

    @property
    def shard(self) -> Shard | None:
        """The part of the patterns that this rank keeps, if the memory is sharded."""
        return self._stored.ranks if isinstance(self._stored.ranks, Shard) else None

    # Search.

    def scores(self, x: Array) -> Array:
        """Scores ``x (..., d)`` against all patterns: ``(..., N)``.

        Here and in the other methods, queries may have the shape of the patterns, such as ``(..., H, W)``, and are
        converted to their dtype. NumPy arrays are accepted, and the result is then a NumPy array. NaN in a query or a
        pattern is an unknown value, and a pair is scored by the values that both know: see
        :func:`~ahop_layers.adaptive_similarity`. Without any, the score is -inf. Values whose squares would overflow
        or underflow are scored in float32 or float64, which is then the dtype of the scores.

        >>> AssociativeMemory(torch.eye(3), "dot").scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        scorer = self._scorer("scores")
        asked = scorer.queries(x)
        return as_given(x, asked.result(scorer.scores(asked.rows, asked.missing)))

    @torch.no_grad()
    def recall(self, x: Array) -> Array:
        """Finds the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        >>> AssociativeMemory(torch.eye(3), "dot").recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        indices: Array = self.search(x)[1]
        return indices[..., 0]

    @torch.no_grad()
    def search(self, x: Any, k: int = 1, shortlist: int | None = None) -> Hits:
        """Finds the ``k`` patterns with the largest scores. Memory is independent of N.

        Args:
            x: queries ``(..., d)``, or in the shape of the patterns.
            k: number of patterns to find for each query.
            shortlist: score only this number of patterns for each query, at least ``k``: those with the largest
                approximate scores. The approximation is linear in the patterns and costs one matrix product; after
                :meth:`build_index`, the index finds the patterns. The result is not exact: a pattern that is not on the
                shortlist is not found. None scores all patterns.

        Returns:
            The scores and the indices of the patterns, ``(..., k)`` each, best first. Equal scores are ordered by
            index. :class:`~ahop_layers.memory.confidence.Hits` have their ids, labels and confidence as well.

        >>> scores, indices = AssociativeMemory(torch.eye(4), "dot").search(torch.tensor([0.5, 2.0, 0.0, 1.0]), k=2)
        >>> scores, indices
        (tensor([2., 1.]), tensor([1, 3]))
        """
        scorer, index = self._scorer(f"search(k={k}, shortlist={shortlist})"), self._index
        count = scorer.stored.count
        check_sizes(k=k)
        check_given_sizes(shortlist=shortlist)
        if k > count:
            raise AHopError(f"k must be at most the number of patterns, {count}, got {k}")
        if shortlist is not None and shortlist < k:
            raise AHopError(f"shortlist must be at least k = {k}, got {shortlist}")
        asked = scorer.queries(x)
        # PyTorch does not accept all integers of NumPy.
        found = scorer.search(asked, int(k), None if shortlist is None else int(shortlist), index)
        scores, indices = (as_given(x, asked.result(each[:, : found.k])) for each in found[:2])
        if torch.compiler.is_compiling():
            return scores, indices  # type: ignore[return-value]
        return Hits(scores, indices, Asked(x, scorer, asked, found, self._calibrated))

    def class_scores(self, x: Array) -> Array:
        """Computes the log-sum-exp of the scores over the patterns of each class: ``(..., d) -> (..., n_classes)``.

        The scores are multiplied by :attr:`beta`, and the classes are in the order of ``classes``. The softmax of the
        result is the sum of the softmax weights of the patterns of each class.

        >>> AssociativeMemory(torch.eye(3), "dot", labels=[4, 7, 7]).class_scores(torch.tensor([1.0, 2.0, 2.0]))
        tensor([1.0000, 2.6931])
        """
        scores, stored = self._class_scores(x)
        return as_given(x, scores.to(stored.dtype))

    @torch.no_grad()
    def classify(self, x: Any) -> Any:
        """Finds the label of the class with the largest score: ``(..., d) -> (...)``, nested lists for strings.

        >>> memory = AssociativeMemory(torch.eye(3), "dot", labels=["cat", "dog", "dog"])
        >>> memory.classify(torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.5, 1.8]]))
        ['cat', 'dog']
        """
        scores, stored = self._class_scores(x)
        return as_given(x, stored.named(stored.given_classes().labels[scores.argmax(-1)]))

    def _class_scores(self, x: Any) -> tuple[Tensor, Stored]:
        """Computes the :meth:`class_scores` in the accumulation dtype, because they can exceed float16."""
        scorer = self._scorer("class_scores")
        asked, classes, ranks = scorer.queries(x), scorer.stored.given_classes(), scorer.stored.ranks
        chunks = torch.split(asked.rows, QUERY_ROWS)
        blocks = (map(self._logits, scorer.blocks(chunk, asked.missing)) for chunk in chunks)
        return asked.result(torch.cat([class_logsumexp(each, classes, ranks) for each in blocks])), scorer.stored

    def build_index(self, description: str | None = "HNSW32", metric: str | None = None) -> Any:
        """Builds a FAISS index of the patterns, which finds the shortlists of later searches, and returns it.

        An index is faster than a matrix product for many patterns, and finds most of what that would find. It is not
        saved. If the patterns change, for example by :meth:`add` or ``.double()``, it must be built again or removed
        before the next shortlist. With shards, each rank builds one of its part. Needs
        ``pip install ahop-layers[search]``, and patterns without NaN, with equal priors and not of inference mode.

        Args:
            description: as for ``faiss.index_factory``, such as ``"HNSW32"`` or ``"IVF4096,Flat"``. Set options of the
                index, such as ``nprobe``, on the result. None removes the index.
            metric: ``"dis"`` or ``"dot"``; None means ``"dot"`` for the dot product and ``"dis"`` for all others.

        >>> memory = AssociativeMemory(torch.randn(10_000, 32), similarity="dis")
        >>> index = memory.build_index("HNSW32")  # doctest: +SKIP
        >>> memory.search(memory.patterns[:2], shortlist=100)[1].flatten()
        tensor([0, 1])
        """
        if description is None:
            self._index = None
            return None
        metric = metric or ("dot" if self.similarity is dot_product else "dis")
        check_choice("metric", metric, ("dis", "dot"))
        self._index = Index(self._stored, description, metric)
        return self._index.faiss

    # Confidence and reasons.

    def threshold(self, false_accepts: float = 0.01) -> float:
        """Returns the confidence that a share ``false_accepts`` of unknown queries exceeds.

        Unknown queries are damaged copies of stored patterns whose pattern, and class, is left out. The damage is that
        of the last :meth:`fit`; without one, any share of the values may be replaced or missing.

        >>> memory = AssociativeMemory(patterns := torch.rand(200, 24))
        >>> hits = memory.search(torch.cat([patterns[:2], torch.rand(2, 24)]))
        >>> hits.confidence[:, 0] > memory.threshold(false_accepts=0.05)
        tensor([ True,  True, False, False])
        """
        check_probability(false_accepts=false_accepts)
        foreign = self._calibrated().foreign
        if not len(foreign):
            raise AHopError("threshold needs patterns of at least two classes, or two different patterns, got fewer")
        return foreign.float().quantile(1 - false_accepts).item()

    @torch.no_grad()
    def explain(self, x: Array, index: Any = None) -> Array:
        """Computes what each value of a query adds to the score of a pattern: ``(..., d)``, or the shape of images.

        The sum over all values, plus the prior if there is one, is the score. A value adds 0 if it is ignored: because
        it is unknown, or because its rank has no weight. That of a block is divided among its dimensions. ``index`` has
        the pattern of each query ``(...)``; None means the one with the largest score. Tables and other modules are
        refused: their scores are no sum that is known.

        >>> AssociativeMemory(torch.tensor([[1.0, 2.0, 3.0]]), "l1").explain(torch.tensor([2.0, 2.0, 9.0]))
        tensor([-1., -0., -6.])
        """
        scorer = self._scorer("explain")
        asked, count = scorer.queries(x), scorer.stored.count
        if index is None:
            place = scorer.search(asked, 1, None, None).indices[:, 0]
        else:
            place = as_indices(index, count, asked.rows.device, tuple(asked.batch)).flatten()
            if self.shard is not None and len(place) != len(asked.rows):
                raise AHopError("index needs the same queries on all ranks of a sharded memory, got different ones")
        pairs = zip(torch.split(asked.rows, QUERY_ROWS), torch.split(place, QUERY_ROWS), strict=True)
        parts = [contributions(scorer, rows, at) for rows, at in pairs]
        return as_given(x, scorer.stored.shaped(asked.result(torch.cat(parts))))

    def _calibrated(self) -> Calibration:
        """Returns the calibration of the last fit, or one from the stored patterns alone, renewed when they double."""
        check_values("patterns", self._stored.patterns)
        factor, *weights = self.calibration.tolist()
        if factor and len(self) < 2 * self._calibrated_for:
            return Calibration(factor, (weights[0], weights[1], weights[2]), self.foreign)
        damage = questions.any_damage(self._stored.shape, self._scorer().allows_missing())
        with self._writing:
            by = "pattern" if self._stored.classes is None else "label"
            return self._calibrate(damage, by, 0, fitted=False)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _calibrate(self, damage: Variant | Pairs, by: str, seed: int, fitted: bool = True) -> Calibration:
        scorer = self._scorer()
        stored = scorer.stored
        if stored.classes is not None and by == "pattern" and not isinstance(damage, Variant):
            damage = stored.class_of(damage[0]), damage[1]
        found = calibrate(scorer, damage, by == "label", self._generator(seed ^ 0x2545F491))
        self._calibrated_for = math.inf if fitted else stored.count
        self.calibration = torch.zeros_like(self.calibration)
        if len(found.foreign):  # else there are too few patterns
            shares = torch.linspace(0, 1, CALIBRATED, dtype=found.foreign.dtype, device=found.foreign.device)
            self.foreign = found.foreign.quantile(shares).to(self.foreign)
            self.calibration = self.calibration.new_tensor([found.factor, *found.weights])
        return found

    # Retrieval.

    @torch.no_grad()
    def retrieve(self, x: Array, steps: int = 1) -> Array:
        """Retrieves patterns for queries, in the shape of ``x``, with ``steps`` updates.

        Call the memory itself to compute gradients: their graph stores every block of the patterns.

        >>> AssociativeMemory(torch.eye(4) * 10, "dot").retrieve(torch.tensor([0.9, 0.2, 0.0, 0.1])).round()
        tensor([10.,  0.,  0.,  0.])
        """
        output: Array = self(x, steps)
        return output

    def forward(self, x: Array, steps: int = 1) -> Array:
        """As :meth:`retrieve`, with gradients."""
        scorer = self._scorer(f"retrieve(steps={steps})")
        check_sizes(steps=steps)
        asked = scorer.queries(x)
        size = max(1, BLOCK_SCORES // scorer.stored.count)
        states = torch.cat([self._update(scorer, chunk, steps) for chunk in torch.split(asked.rows, size)])
        stored = scorer.stored
        values = asked.result(states).to(stored.patterns.dtype if stored.patterns.is_floating_point() else stored.dtype)
        return as_given(x, values.reshape(tuple(getattr(x, "shape", values.shape))))

    def _update(self, scorer: Scorer, rows: Tensor, steps: int) -> Tensor:
        """Retrieves ``rows (L, d) -> (L, d)`` with ``steps`` updates."""
        bias, stored, ranks = self._bias(), scorer.stored, scorer.stored.ranks

        def attend(state: Tensor) -> Tensor:
            scores = self._logits(scorer.scores(state.flatten(0, -2))).reshape(*state.shape[:-1], stored.count)
            if self.activation == "sign" and self.separation.name == "exponential":
                scores = scores - scores.amax(-1, keepdim=True)  # avoids overflow and leaves the signs unchanged
            weights: Tensor = self.separation(scores, masked=False)
            return weights

        def read(weights: Tensor) -> Tensor:
            every = weights.to(stored.dtype)
            weights = every[..., ranks.start : ranks.stop]
            output = ranks.total(stored.product(weights))
            if stored.unknown:  # each value is averaged over the patterns that know it
                known = ranks.total(stored.product(weights, known=True))
                output = output * torch.where(known != 0, every.sum(-1, keepdim=True) / known, torch.nan)
            return output.sign() + (output == 0) if self.activation == "sign" else output  # the sign of 0 is 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity subtracts the bias from its query, so it is added to a state made of patterns.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, int(steps) - 1, 0.0))[0, 0]

    def energy(self, x: Array) -> Array:
        """Computes the energy of states ``x (..., d)``, as in the paper's first table, which has none for U-Hop.

        >>> memory = AssociativeMemory(torch.randn(20, 8), similarity="dis")
        >>> x = torch.randn(5, 8)
        >>> bool((memory.energy(memory.retrieve(x)) <= memory.energy(x)).all())
        True
        """
        scorer = self._scorer("energy")
        asked = scorer.queries(x)
        wide = accumulation_dtype(asked.rows.dtype)
        modulated, scores = scorer.modulated(asked.rows).to(wide), scorer.scores(asked.rows).to(wide)
        dot = self.similarity is dot_product
        values = energy(asked.rows.to(wide), modulated, scores, self.separation, self.beta, dot)
        return as_given(x, asked.result(values.to(asked.rows.dtype)))

    # Learning.

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
        """Learns the similarity from damaged queries.

        With ``similarity="auto"``, and with any :class:`~ahop_layers.AdaptiveSimilarity` without heads, the score is
        linear in its weights, and learning them is a small regression that is solved in seconds, without epochs or a
        learning rate: see :mod:`ahop_layers.learning.solve`. The inverse temperature :attr:`beta` and the confidence of
        hits are set as well, and for ``"auto"`` the widths and the units of dimensions; :meth:`add` keeps all of them.
        If a simple score such as L1 is better on held-out queries, it is the result of ``"auto"``; other similarities
        then keep their weights. A bias of zero is first set to its least-squares estimate. A prior is the frequency of
        the patterns, or classes, in given pairs.

        Kernels, tables, parameters that are partly frozen and other modules are trained by gradients, and so is an
        :class:`~ahop_layers.AdaptiveSimilarity` if ``epochs``, ``lr`` or ``batch`` is given. The loss is the negative
        log-likelihood of the pattern that a query was made from, as in the paper, with the softmax of the scores for
        every separation. Bias and inverse temperature start at their estimates, and steps are relative to the scale of
        the patterns and to ``beta``. The memory keeps the parameters with the smallest of about ten losses on queries
        that are held out: a tenth of the pairs, or 512 queries of a damage. Training warns if none of these is smaller
        than the loss at the start.

        Args:
            damage: what happens to a pattern before it is a query: a variant, a function ``f(x)`` or
                ``f(x, generator)``, or a list of these, which apply in order (see :mod:`ahop_layers.variants`). Or
                pairs ``(index (n,), query (n, d))`` of the patterns that queries belong to and queries. None, where the
                weights are solved for, assumes that any share of the values may be replaced or missing, and that the
                others may have a little noise. K-Hop needs no damage.
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
            learned one on held-out queries. Otherwise the loss of every step. Training of float16 patterns is refused,
            because squared gradients would underflow.

        >>> import torch, ahop_layers as ah
        >>> patterns = torch.rand(200, 24, generator=torch.Generator().manual_seed(1))
        >>> memory = AssociativeMemory(patterns)
        >>> damage = ah.variants.Replaced((0.0, 0.8), low=0.0, high=1.0)
        >>> report = memory.fit(damage.sample(patterns, 300))  # or memory.fit(damage), from more queries
        >>> dict(report.rows)["learned"] > dict(report.rows)["L1"]
        True
        """
        if torch.is_inference_mode_enabled():
            raise AHopError("fit needs gradients: expected no inference mode, got torch.inference_mode")
        stored = self._stored
        call = f"fit(epochs={epochs!r}, lr={lr!r}, batch={batch!r}, seed={seed}, by={by!r})"
        stored.ranks.agree(call, stored.patterns.device)
        check_values("patterns", stored.patterns)
        check_seed(seed=seed)
        labeled = stored.labels is not None and self.objective != "separation"
        by = ("label" if labeled else "pattern") if by is None else by
        check_choice("by", by, ("pattern", "label"))
        data = gradients.as_data(damage, stored.patterns.device)
        options = {"epochs": epochs, "lr": lr, "batch": batch}
        trained = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        similarity = self.similarity
        linear = is_solvable(similarity) and self.modulation is None
        linear = linear and all(each.requires_grad for each in self.parameters())
        if trained and linear and isinstance(similarity, AutoSimilarity):
            raise AHopError(f"fit solves similarity='auto' without epochs, lr and batch, got {', '.join(trained)}")
        if linear and not trained:
            return self._solve(questions.any_damage(stored.shape) if data is None else data, by, int(seed))
        epochs, batch = 200 if epochs is None else epochs, 512 if batch is None else batch
        check_sizes(epochs=epochs, batch=batch)
        return self._train(data, by, int(epochs), int(batch), 0.05 if lr is None else lr, progress, int(seed))

    def _generator(self, seed: int) -> torch.Generator:
        """Returns a random generator on the device of the patterns."""
        # Other numbers than those of the seed itself: patterns drawn with it would be values that replace others.
        return torch.Generator(self._stored.patterns.device).manual_seed(seed ^ 0x5851F42D4C957F2D)

    @torch.no_grad()
    def _solve(self, data: Variant | Pairs, by: str, seed: int) -> Report:
        """Learns the similarity by solving a regression, and estimates its bias, the prior and the confidence."""
        stored, similarity, generator = self._stored, self.similarity, self._generator(seed)
        kept = some_patterns(stored.count, stored.dim, generator)
        means, log_prior = None, None

        def some(kept: Tensor) -> tuple[Tensor, Tensor | None]:
            return stored.sample(kept), stored.class_of(kept) if by == "label" else None

        if isinstance(data, Variant):
            patterns, own = some(kept)
            data = data.bind(patterns)
            # Weights of several views need more queries.
            count = questions.MOST_QUERIES if len(similarity.parts()) > 1 else questions.QUERIES
            asked = questions.draw(data, patterns, own, generator, count)
        else:
            data, means = self._pairs(stored, data, by)
            asked = questions.given(data, by == "label", generator)
            if by == "pattern":  # the patterns that queries belong to are among those that are kept
                kept = torch.unique(torch.cat([asked.origin, kept]))
                asked = asked._replace(origin=torch.searchsorted(kept, asked.origin))
            if self.prior is not None:
                place = torch.arange(stored.count, device=kept.device)
                log_prior = questions.log_frequency(data[0], place if by == "pattern" else stored.class_of(place))
                asked = asked._replace(log_prior=log_prior[kept])
            patterns, own = some(kept)
            asked = questions.with_intact(asked, patterns, own, generator)
        with unchanged_on_error(self):
            self._set_bias(stored, data, means, questions.QUERIES, generator)
            if isinstance(similarity, AutoSimilarity):
                asked = asked._replace(query=self._scorer().clamped(asked.query))
                learned = learn(patterns, own, asked, generator)
                similarity.set_(learned)
                temperature, report = learned.temperature, learned.report
            else:
                weights, temperature, report = solve_weights(similarity, patterns, own, asked, generator)
                if weights is not None:
                    similarity.set_ranks_(weights)
            if self._fits_beta:
                self.beta.fill_(1 / temperature)
            if self.prior is not None:
                self.prior.copy_(torch.zeros_like(self.prior) if log_prior is None else log_prior / self.beta)
            self._calibrate(data, by, seed)
        return report

    def _pairs(self, stored: Stored, data: Pairs, by: str) -> tuple[Pairs, Tensor | None]:
        """Returns the index, or the class, and the query of given pairs; and the mean pattern of each class."""
        target, query = data
        query = as_tensor("query", query, stored.patterns.device)
        check_same_device(query=query, patterns=stored.patterns)
        query = query.to(torch.promote_types(query.dtype, stored.dtype))
        query = query.flatten(1) if query.ndim == 1 + len(stored.shape) > 2 else query
        stored.ranks.check_equal("data", query)
        means = None
        if by == "label":
            classes, patterns = stored.given_classes(), stored.patterns.to(accumulation_dtype(stored.dtype))
            count = len(query) if query.ndim else 0
            given, names = as_labels(target, count, query.device, "labels of data", "query", stored.names)
            index = torch.searchsorted(classes.labels, given).clamp(max=len(classes.labels) - 1)
            unknown = given[classes.labels[index] != given].tolist()
            if unknown:
                got = unknown[0] if names is None else repr(names[unknown[0]])
                raise AHopError(f"labels of data must be labels of stored patterns, got {got}")
            sums = patterns.new_zeros(len(classes.labels), stored.dim).index_add(0, classes.of_pattern, patterns)
            means = (stored.ranks.total(sums) / classes.counts[:, None]).to(stored.dtype)
        else:
            index = as_indices(target, stored.count, query.device)
        if index.ndim != 1 or query.shape != (len(index), stored.dim) or not len(index):
            rule = f"data must be index (n,) and query (n, d) with d = {stored.dim} and n >= 1"
            raise AHopError(f"{rule}, got {describe(index)} and {describe(query)}")
        has_unknown(query=query)
        stored.ranks.check_equal("data", index)
        return (index, query), means

    def _set_bias(self, stored: Stored, data: Any, means: Tensor | None, batch: int, draw: torch.Generator) -> None:
        """Estimates a bias of zero from queries, and the patterns that they belong to or the ``means`` of classes."""
        bias = self._bias()
        if bias is not None and bias.requires_grad and not bias.any():
            index, query = gradients.sample_pairs(data, stored, 8 * batch, draw) if isinstance(data, Variant) else data
            gradients.estimate_bias(bias, stored.sample(index) if means is None else means[index], query)

    def _train(
        self, data: Variant | Pairs | None, by: str, epochs: int, batch: int, lr: float, progress: bool, seed: int
    ) -> Tensor:
        """Trains all parameters by gradients: those of the similarity and the kernel, and the prior."""
        scorer, generator = self._scorer(), self._generator(seed)
        stored, ranks = scorer.stored, scorer.stored.ranks
        if stored.dtype == torch.float16:
            raise AHopError("fit needs patterns of another dtype, got torch.float16: call memory.float() before")
        shows, average = progress and ranks.rank == 0, ranks.average_gradients
        if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
            if by == "label":
                raise AHopError("by='label' needs a memory with objective='retrieval', got objective='separation'")
            with unchanged_on_error(self):
                self.calibration = torch.zeros_like(self.calibration)
                batches = gradients.separation_batches(stored, epochs, batch, generator)
                return minimize(self, self.modulation.separation_loss, batches, lr, shows, average)[0]
        if data is None:
            raise AHopError("data must be a variant or a pair (index, query), got NoneType")
        classes = stored.given_classes() if by == "label" else None
        means = None
        if not isinstance(data, Variant):
            data, means = self._pairs(stored, data, by)
        elif ranks.alone:
            data = data.bind(stored.patterns.to(stored.dtype))
        measure = gradients.measure_of(classes, ranks, isinstance(data, Variant))

        def loss(batch: Pairs) -> Tensor:
            target, query = batch
            return measure(map(self._logits, scorer.blocks(query.to(stored.dtype))), target)

        with unchanged_on_error(self):
            batches = gradients.retrieval_batches(data, stored, epochs, batch, generator)
            first = mean_loss(loss, batches.held_out)
            self._set_bias(stored, data, means, batch, generator)
            if self._fits_beta:
                held_out = [(target, query.to(stored.dtype)) for target, query in batches.held_out]
                self.beta.copy_(gradients.best_inverse_temperature(scorer.blocks, measure, held_out, ranks))
            scale, logit = scale_of(stored.sample(stored.spread())), 1 / self.beta.item()
            units = [(self._bias(), scale), (self.prior, logit)]
            units += [(part.table, logit) for part in self.modules() if isinstance(part, TableSimilarity)]
            losses, start, best = minimize(self, loss, batches, lr, shows, average, units, scale)
            self._calibrate(data, by, seed)
        if not best < min(first, start):
            rule = f"expected less than {min(first, start):.4g}, got {best:.4g}"
            advice = "Use more epochs, more pairs or another lr"
            warnings.warn(f"fit did not improve the loss of the held-out queries: {rule}. {advice}", stacklevel=3)
        return losses

    def _bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity subtracts from a query, if it has one."""
        bias = getattr(self.similarity, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.shape == (self._stored.dim,) else None

    def _logits(self, scores: Tensor) -> Tensor:
        """Multiplies scores by the inverse temperature, in the accumulation dtype, because the product can be large."""
        return self.beta * scores.to(accumulation_dtype(scores.dtype))

    def _scorer(self, call: str | None = None) -> Scorer:
        """Returns what scores queries against what is stored now. All ranks of a sharded memory must make the call."""
        stored = self._stored
        if call is not None:
            stored.ranks.agree(call, stored.patterns.device)
        if self.prior is not None and self.prior is not stored.prior and len(self.prior) == stored.count:
            stored = replace(stored, prior=self.prior)  # for example of torch.func.functional_call
        return Scorer(stored, self.similarity, self.modulation)

    # What is stored.

    def add(
        self, patterns: Any, check: bool = True, *, labels: Any = None, ids: Any = None, replace: bool = False
    ) -> Tensor:
        """Stores more patterns without refitting, and returns their indices ``(n,)``. They get the mean prior.

        Args:
            patterns: in the shape of those stored.
            check: as for :class:`AssociativeMemory`.
            labels, ids: of each new pattern ``(n,)``. Required if and only if the memory has labels, or ids.
            replace: whether a pattern whose id is stored already takes its place, with its new label.

        >>> AssociativeMemory(torch.zeros(3, 4)).add(torch.ones(2, 4))
        tensor([3, 4])
        """
        with self._writing:
            stored = self._unsharded("add")
            rows, shape = as_patterns(patterns)
            if shape not in (stored.shape, (stored.dim,)):
                expected = ", ".join(map(str, ("n", *stored.shape)))
                raise AHopError(f"patterns must be ({expected}), as those stored, got patterns of the shape {shape}")
            if replace and stored.ids is None:
                raise AHopError("replace=True needs a memory with ids, got none")
            for name, given, own in (("labels", labels, stored.labels), ("ids", ids, stored.ids)):
                if (given is None) != (own is None):
                    rule = "not be given: the memory has none" if own is None else f"be given: the memory has {name}"
                    raise AHopError(f"{name} must {rule}, got {'none' if given is None else name}")
            rows = storage.converted(rows, stored.patterns)
            added = make_stored(rows, stored.shape, labels, ids, check, stored.names)
            if added.unknown:
                self._scorer().check_missing("patterns")
            joined, place = stored.joined(added, replace)
            self._set(joined)
            return place

    def remove(self, index: Any = None, *, ids: Any = None) -> None:
        """Deletes patterns, with all that belongs to them, by index, by boolean mask or by id. Later ones move up.

        >>> memory = AssociativeMemory(torch.eye(3), "dot", ids=["a", "b", "c"])
        >>> memory.remove(ids=["a", "c"])
        >>> memory.patterns
        tensor([[0., 1., 0.]])
        """
        with self._writing:
            stored = self._unsharded("remove")
            if (index is None) == (ids is None):
                raise AHopError(f"remove takes an index or ids, got {'neither' if index is None else 'both'}")
            keep = torch.ones(len(stored.patterns), dtype=torch.bool)
            index = index if ids is None else stored.places(ids)
            try:
                removed = torch.as_tensor(from_numpy(index)).cpu()
                keep[removed if removed.numel() else []] = False
            except (IndexError, RuntimeError, TypeError, ValueError):
                kind = describe(index) if isinstance(index, Tensor) else type(index).__name__
                raise AHopError(f"index must be indices or a mask of the {len(keep)} patterns, got {kind}") from None
            if not keep.any():
                raise AHopError(f"index must leave at least one pattern, got all {len(keep)}")
            self._set(stored.only(keep.nonzero().flatten().to(stored.patterns.device)))

    def _unsharded(self, name: str) -> Stored:
        if self.shard is not None:
            raise AHopError(f"{name} must be called before shard_, got a memory that is sharded")
        return self._stored

    def _set(self, stored: Stored) -> None:
        """Replaces what is stored. Threads that search see the old state or the new one."""
        self.prior = stored.prior
        self._stored = stored

    @torch.no_grad()
    def shard_(self, group: Any = None) -> "AssociativeMemory":
        """Keeps only a part of the patterns and labels on each rank of a process group, and returns the memory.

        ``group`` is a process group of ``torch.distributed`` that supports the device of the patterns, such as gloo or
        NCCL; None means all processes. Each rank must call this method with equal patterns, for example from one
        memory-mapped file, and copies its part of them. Afterwards ``patterns`` and ``labels`` are this part. The other
        methods give on every rank what one process gives. They communicate, so all ranks must call them together. Their
        queries may differ: every rank then scores the queries of all ranks. :meth:`fit` needs equal data on all ranks.

        Parameters, the prior included, are copied from the first rank. In ``DistributedDataParallel``, they are trained
        as all others. A state dict does not contain the parts; loading one that has all patterns replaces them.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=0, world_size=1)
        ...     memory = AssociativeMemory(torch.eye(3), "dot").shard_()
        ...     memory.recall(torch.tensor([1.0, 3.0, 2.0]))
        ...     torch.distributed.destroy_process_group()
        tensor(1)
        """
        stored = self._stored
        if self.shard is not None:
            raise AHopError(f"shard_ must be called once, got a memory that is sharded over {stored.ranks.ranks} ranks")
        shard = Shard(group, stored.count, stored.patterns.device)
        shard.check_shapes("patterns", stored.patterns)
        shard.check_equal("patterns", stored.sample(stored.spread()))
        shard.check_equal("labels", stored.patterns.new_zeros(0) if stored.labels is None else stored.labels)
        shard.copy_from_first_rank(self)
        self._stored = stored.sharded(shard)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "AssociativeMemory":
        """Moves or converts the memory. ``beta`` can exceed float16, and stays in at least float32."""
        before, moved = (self.beta, self.calibration, self.foreign), self._stored.moved(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._stored = replace(moved, prior=self.prior)
        self.beta = before[0].to(self.beta.device, accumulation_dtype(self._stored.dtype))
        self.calibration, self.foreign = (each.to(self.calibration.device) for each in before[1:])
        return self

    # State dicts and files.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds what is stored, unless it is a part of a sharded memory."""
        with self._writing:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if self.shard is None:
                destination.update({prefix + name: tensor for name, tensor in self._stored.tensors().items()})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, which may hold another number of patterns. If it fails, the memory is unchanged.

        Args:
            state_dict: of a memory that has labels, names of classes, ids and a prior if and only if this one does.
            strict, assign: as for ``nn.Module``.

        >>> memory = AssociativeMemory(torch.zeros(3, 4))
        >>> memory.load_state_dict(AssociativeMemory(torch.ones(2, 4)).state_dict())
        <All keys matched successfully>
        >>> len(memory)
        2
        """
        with unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *args: Any
    ) -> None:
        """Takes what is stored, and the number of patterns, from the state dict."""
        before, beta, prior = self._stored, state_dict.get(prefix + "beta"), state_dict.get(prefix + "prior")
        check_state(self, state_dict, prefix)
        given = {name: state_dict.pop(prefix + name, None) for name in storage.STORED}
        for name in ("calibration", "foreign"):  # need not be there
            state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        self._calibrated_for = math.inf
        if isinstance(beta, Tensor) and not beta.is_meta and not bool((beta > 0).all()):
            raise AHopError(f"{prefix}beta must be a positive number, got {beta.tolist()!r}")
        if given["patterns"] is not None:
            stored = before.loaded(prefix, given, local_metadata.get("assign_to_params_buffers", False))
            if stored.unknown:
                self._scorer().check_missing(f"{prefix}patterns")
            if self.prior is not None:
                if isinstance(prior, Tensor) and prior.shape != (stored.count,):
                    raise AHopError(f"{prefix}prior must be (N,) = ({stored.count},), got {describe(prior)}")
                if stored.count != before.count:
                    values = self.prior.new_zeros(stored.count)
                    self.prior = nn.Parameter(values, requires_grad=self.prior.requires_grad)
            if isinstance(before.ranks, Shard):
                stored = stored.sharded(Shard(before.ranks.group, stored.count, stored.patterns.device))
            self._stored = stored
        elif strict and self.shard is None:
            args[0].append(prefix + "patterns")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *args)
        self._stored = replace(self._stored, prior=self.prior)

    def save(self, path: str | Path) -> None:
        """Saves the whole memory in one file: patterns, labels, ids, similarity, temperature and confidence.

        The file has the safetensors format. It replaces an older one when it is complete. The ranks of a sharded memory
        save one file each, ``name-00001-of-00004.safetensors``; :meth:`load` reads them all. Similarity, separation and
        modulation must be of this package. Needs ``pip install ahop-layers[save]``.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AssociativeMemory(torch.eye(3), labels=["a", "b", "b"]).save(f"{folder}/memory.safetensors")
        ...     AssociativeMemory.load(f"{folder}/memory.safetensors").classify(torch.eye(3))
        ['a', 'b', 'b']
        """
        with self._writing:
            stored, tensors = self._stored, {**self.state_dict(), **self._stored.tensors()}
        path = files.as_path(path)
        header = describe_parts(self) | {"prior": self.prior is not None, "fits_beta": self._fits_beta}
        header |= {"version": storage.VERSION, "activation": self.activation, "objective": self.objective}
        header["frozen"] = [name for name, each in self.named_parameters() if not each.requires_grad]
        if self.shard is not None:
            path = storage.part_path(path, stored.ranks.rank, stored.ranks.ranks)
            number = torch.randint(2**62, (), device=stored.patterns.device)
            header["save"] = int(stored.ranks.gather(number)[0])
        files.write(path, storage.KEY, tensors, header)

    @classmethod
    def load(cls, path: str | Path, check: bool = True) -> "AssociativeMemory":
        """Loads a memory that :meth:`save` saved. The patterns are memory-mapped: call ``.to(device)`` to move them.

        ``check`` is that of :class:`AssociativeMemory`.
        """
        path = files.as_path(path)
        tensors, header = storage.read(path)
        try:
            options = {name: header[name] for name in ("prior", "activation", "objective")}
            memory = cls(**storage.stored_from(tensors), **make_parts(header, tensors), **options, check=check)
            rest = {name: tensor for name, tensor in tensors.items() if name not in storage.STORED}
            keys = memory.load_state_dict(rest, strict=False)
            if keys.missing_keys != ["patterns"] or keys.unexpected_keys:  # which the memory has already
                raise AHopError(f"expected other tensors, got {keys}")
            for name in header["frozen"]:
                memory.get_parameter(name).requires_grad_(False)
            memory._fits_beta = bool(header["fits_beta"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            message = f"path must be a file that AssociativeMemory.save wrote, got {str(path)!r}: {error}"
            raise AHopError(message) from error
        return memory
