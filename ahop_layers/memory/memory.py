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
from ahop_layers.memory.labels import Classes, as_labels, class_logsumexp, classes_of, labeled_data, leave_out
from ahop_layers.memory.presets import named_similarity, preset_arguments
from ahop_layers.memory.search import QUERY_ROWS, Array, as_given, as_queries, check_width, top_k
from ahop_layers.memory.shards import Rows, Shard, ShardedRows
from ahop_layers.memory.shortlist import Index, best_of_shortlist, first_stage, linear_scores, sample_index
from ahop_layers.memory.table import TableSimilarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity, Associator
from ahop_layers.variants import Variant

BLOCK_ELEMENTS = 2**21
"""Number of elements of the patterns that are scored at once, to bound the memory that a similarity needs."""

BLOCK_SCORES = 2**23
"""Number of scores that are stored at once where the scores of all patterns are needed."""


GPU_BLOCK_ELEMENTS = 2**26
"""Number of elements of the patterns that a GPU scores at once: one million patterns with 64 dimensions."""


def block_size(dim: int, queries: int, device: str) -> int:
    """Returns the number of patterns of ``dim`` dimensions that are scored at once.

    On a GPU, blocks are as large as the memory of their scores allows, because each call has a fixed cost: blocks for
    the cache of a CPU would spend most of the time of a search for few queries on calls.
    """
    size = max(1, BLOCK_ELEMENTS // dim)
    return max(size, min(GPU_BLOCK_ELEMENTS // dim, BLOCK_SCORES // max(1, queries))) if device == "cuda" else size


class AssociativeMemory(Associator):
    """Stores patterns and retrieves the one that a corrupted query was made from.

    Args:
        patterns: ``(N, d)``, not copied. They may be memory-mapped and larger than the memory of the machine
            (``torch.from_file``, ``torch.load(..., mmap=True)``); :meth:`search` and :meth:`class_scores` read them
            block by block. If the similarity has blocks that are not consecutive or not of equal width
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
    shard: Shard | None = None
    _classes: Classes | None = None  # of all ranks, if sharded
    _index: Index | None = None

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
        rows, own = self._all_rows(x)
        return as_given(x, self._all_scores(rows)[own].reshape(*x.shape[:-1], self._count))

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
        rows, own = self._all_rows(x)
        chunks = torch.split(rows, max(1, BLOCK_SCORES // self._count))
        return as_given(x, torch.cat([self._update(chunk, steps) for chunk in chunks])[own].reshape(x.shape))

    @torch.no_grad()
    def recall(self, x: Array) -> Array:
        """Find the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        return self.search(x)[1].reshape(x.shape[:-1])

    @torch.no_grad()
    def search(self, x: Array, k: int = 1, shortlist: int | None = None) -> tuple[Array, Array]:
        """Find the ``k`` patterns with the largest scores. Memory is independent of N.

        Args:
            x: queries ``(..., d)``, a tensor or a NumPy array.
            k: number of patterns to find for each query.
            shortlist: score only this number of patterns for each query, those with the largest approximate scores. The
                approximation is linear in the patterns and costs one matrix product; after :meth:`build_index`, the
                index finds the patterns. The result is not exact: a pattern that is not on the shortlist is not found.
                None scores all patterns.

        Returns:
            The scores and the indices of the patterns, ``(..., k)`` each, best first. Equal scores are ordered by
            index.

        Raises:
            AHopError: ``x`` does not match the patterns, ``k`` is not an integer from 1 to N, or ``shortlist`` is not
                an integer of at least ``k``.

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
        if k > self._count:
            raise AHopError(f"k must be at most the number of patterns, {self._count}, got {k}")
        if shortlist is not None:
            check_sizes(shortlist=shortlist)
            if shortlist < k:
                raise AHopError(f"shortlist must be at least k = {k}, got {shortlist}")
        rows, own = self._all_rows(x)
        found = zip(*(self._search(chunk, k, shortlist) for chunk in torch.split(rows, QUERY_ROWS)), strict=True)
        scores, indices = (torch.cat(each)[own].reshape(*x.shape[:-1], k) for each in found)
        return as_given(x, scores), as_given(x, indices)

    def _search(self, rows: Tensor, k: int, m: int | None) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores of queries ``rows (L, d)`` and their indices, ``(L, k)`` each."""
        if m is not None and m < self._count:
            return self._search_shortlist(rows, k, m)
        scores, indices = top_k(self._score_blocks(rows), min(k, len(self.patterns)))
        return (scores, indices) if self.shard is None else self.shard.best(scores, indices, k)

    def _search_shortlist(self, rows: Tensor, k: int, m: int) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores out of the patterns with the ``m`` largest approximate scores."""
        sample = self._stored(self.patterns)[sample_index(self._count, rows.device)]
        linear = linear_scores(self.similarity, self._modulated, rows, sample)
        own = min(m, len(self.patterns))
        if self._index is None:
            first, indices = first_stage(linear, self.patterns, self._own_prior(), own)
        else:
            self._index.check(self.patterns)
            first, indices = self._index.shortlist(linear, own)
        scores = self._score_pairs(rows, indices).masked_fill(first == -torch.inf, -torch.inf)
        if self.shard is not None:
            first, scores, indices = self.shard.candidates(first, scores, indices, m=m)
        scores, indices = best_of_shortlist(first, scores, indices, m, k)
        if self._index is not None and (scores == -torch.inf).any():
            raise AHopError(f"the index must find at least k = {k} patterns for a query, got fewer: set its nprobe")
        return scores, indices

    def _score_pairs(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Scores each query ``rows (L, d)`` against its own patterns ``indices (L, m)``: ``(L, m)``."""
        size = max(1, BLOCK_ELEMENTS // (indices.shape[1] * rows.shape[1]))
        parts = []
        for queries, places in zip(torch.split(rows, size), torch.split(indices, size), strict=True):
            key = self._modulated(self.patterns[places.flatten()])
            key = key.reshape(*places.shape, key.shape[-1])
            if isinstance(self.similarity, AdaptiveSimilarity):
                parts.append(self.similarity(queries[:, None], key).squeeze(1))
            else:
                parts += [self.similarity(query[None], each) for query, each in zip(queries, key, strict=True)]
        scores = torch.cat(parts) if parts else rows.new_empty(indices.shape)
        prior = self._own_prior()
        return scores if prior is None else scores + prior[indices]

    def build_index(self, description: str = "HNSW32", metric: str | None = None) -> Any:
        """Build a FAISS index of the patterns, which finds the shortlists of later searches, and return it.

        An index is faster than a matrix product for many patterns, and finds most of what that would find. It is not
        saved. If the patterns change, it must be built again. With shards, each rank builds one of its part.

        Args:
            description: as for ``faiss.index_factory``, such as ``"HNSW32"`` or ``"IVF4096,Flat"``. Set options of the
                index, such as ``nprobe``, on the result.
            metric: ``"dis"`` or ``"dot"``; None means ``"dot"`` for the dot product and ``"dis"`` for all others.

        Raises:
            AHopError: FAISS is not installed (extra ``search``), or an argument is invalid.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.randn(10_000, 32), similarity="dis")
        >>> index = memory.build_index("HNSW32")  # doctest: +SKIP
        >>> memory.search(memory.patterns[:2], shortlist=100)[1].flatten()
        tensor([0, 1])
        """
        metric = metric or ("dot" if self.similarity is dot_product else "dis")
        check_choice("metric", metric, ("dis", "dot"))
        self._index = Index(self.patterns, description, metric)
        return self._index.faiss

    @property
    def classes(self) -> Tensor:
        """The distinct labels in ascending order ``(n_classes,)``.

        Raises:
            AHopError: the memory has no labels.
        """
        return self._given_classes().labels

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
        rows, own = self._all_rows(x)
        scores = [self._class_logsumexp(self._logit_blocks(chunk)) for chunk in torch.split(rows, QUERY_ROWS)]
        return as_given(x, torch.cat(scores)[own].reshape(*x.shape[:-1], len(self.classes)))

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
        return as_given(x, energy(state, self._modulated(state), self.scores(state), self.separation, self.beta))

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
        >>> patterns = torch.rand(50, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
        >>> memory = ah.AssociativeMemory.preset("A-Hop", patterns, debias=True)
        >>> losses = memory.fit(ah.variants.Mixed(0.3, 0.1, 0.5), epochs=30, batch=64, progress=False)
        >>> bool(losses[-5:].mean() < losses[:5].mean())
        True
        """
        check_choice("by", by, ("pattern", "label"))
        if by == "label" and self.objective == "separation":
            raise AHopError("by='label' needs a memory with objective='retrieval', got objective='separation'")
        if self.shard is not None and isinstance(data, (tuple, list)):
            self.shard.check_equal("data", *(torch.as_tensor(each) for each in data))
        origins: Rows = self._stored(self.patterns)
        measure: Measure = self._pattern_loss
        if by == "label":
            measure = self._label_loss
            labeled = labeled_data(data, self._given_classes(), self.patterns, self._total)
            if labeled is not None:
                measure, (data, origins) = self._class_loss, labeled
        generator = seeded_generator(self.patterns.device, seed)
        with unchanged_on_error(self, self.patterns):
            if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
                batches = separation_batches(origins, epochs, batch, generator)
                return minimize(
                    self, self.modulation.separation_loss, batches, lr, self._shows(progress), shard=self.shard
                ).losses
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
            held_out = [(target, self._rows(query)) for target, query in batches.held_out]
            beta = best_inverse_temperature(self._score_blocks, measure, held_out, self.shard)
            if beta is not None:
                self.beta.copy_(beta)
        scale = scale_of(self.patterns) if self.shard is None else self.shard.scale
        logit = 1 / self.beta.item()
        units = [(self._bias(), scale), (self.prior, logit)]
        units += [(part.table, logit) for part in self.modules() if isinstance(part, TableSimilarity)]

        def loss(batch: Pairs) -> Tensor:
            target, query = batch
            return measure(self._logit_blocks(self._rows(query)), target)

        return minimize(self, loss, batches, lr, self._shows(progress), units=units, scale=scale, shard=self.shard)

    def _shows(self, progress: bool) -> bool:
        """Returns whether this rank shows a progress bar."""
        return progress and (self.shard is None or self.shard.rank == 0)

    @torch.no_grad()
    def shard_(self, group: Any = None) -> "AssociativeMemory":
        """Keep only a part of the patterns and labels on each rank of a process group, and return the memory.

        Each rank must call this method with equal patterns, for example from one memory-mapped file, and copies its
        part of them. Afterwards ``patterns`` and ``labels`` are this part. The other methods give on every rank what
        one process gives. They communicate, so all ranks must call them together. Their queries may differ: every rank
        then scores the queries of all ranks. :meth:`fit` needs equal data on all ranks.

        Parameters, the prior included, are copied from the first rank and stay equal in :meth:`fit`. In a model that
        is wrapped in ``DistributedDataParallel``, they are trained as all others. The parts are no buffers, so that it
        does not broadcast them. For the same reason a state dict does not contain them; loading one that has all
        patterns replaces them.

        Args:
            group: a process group of ``torch.distributed`` that supports the device of the patterns, such as gloo or
                NCCL; None for all processes.

        Raises:
            AHopError: the memory is sharded already, ``torch.distributed`` is not initialized, patterns or labels
                differ in shape between the ranks, or there are fewer patterns than ranks.

        >>> import tempfile, torch, ahop_layers as ah
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=0, world_size=1)
        ...     memory = ah.AssociativeMemory(torch.eye(3)).shard_()
        ...     memory.recall(torch.tensor([1.0, 3.0, 2.0]))
        ...     torch.distributed.destroy_process_group()
        tensor(1)
        """
        if self.shard is not None:
            raise AHopError(f"shard_ must be called once, got a memory that is sharded over {self.shard.ranks} ranks")
        shard = Shard(group, len(self.patterns), scale_of(self.patterns))
        shard.check_shapes("patterns", self.patterns)
        shard.check_equal("labels", self.patterns.new_zeros(0) if self.labels is None else self.labels)
        patterns, labels = self.patterns, self.labels
        del self.patterns, self.labels
        shard.copy_from_first_rank(self)
        self._keep(shard, patterns, labels)
        return self

    def _keep(self, shard: Shard, patterns: Tensor, labels: Tensor | None) -> None:
        """Keep a part of all patterns and labels, as attributes that are not buffers."""
        part = slice(shard.start, shard.stop)
        self.shard, self.patterns = shard, patterns[part].clone()
        self.labels = None if labels is None else labels[part].clone()
        self._classes = None
        if labels is not None:
            distinct, counts, index = classes_of(labels)
            self._classes = Classes(distinct, counts, index[part].clone())

    def _apply(self, fn: Any, recurse: bool = True) -> "AssociativeMemory":
        """Move or convert the memory, and the part of a rank, which is not a buffer."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.shard is not None:
            self.patterns = fn(self.patterns)
            self.labels = None if self.labels is None else fn(self.labels)
            self._classes = None if self._classes is None else Classes(*map(fn, self._classes))
        return self

    def _refuse_sharded(self, name: str) -> None:
        if self.shard is not None:
            raise AHopError(f"{name} must be called before shard_, got a memory that is sharded")

    def add(self, patterns: Tensor, check: bool = True, *, labels: Any = None) -> Tensor:
        """Store more patterns without refitting, and return their indices ``(n,)``.

        With a prior, the new patterns get the mean prior.

        Args:
            patterns: ``(n, d)``.
            check: raise if a pattern holds NaN or infinity. False skips the check.
            labels: the class of each new pattern, integers ``(n,)``. Required if and only if the memory has labels.

        Raises:
            AHopError: the patterns do not match those stored, or hold NaN or infinity. Labels are missing, or are
                given to a memory without labels. The memory is sharded.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.add(torch.ones(2, 4))
        tensor([3, 4])
        """
        self._refuse_sharded("add")
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
            AHopError: ``index`` is invalid, no pattern would be left, or the memory is sharded.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3))
        >>> memory.remove([0, 2])
        >>> memory.patterns
        tensor([[0., 1., 0.]])
        """
        self._refuse_sharded("remove")
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

    @property
    def _count(self) -> int:
        """The number of patterns, of all ranks together."""
        return len(self.patterns) if self.shard is None else self.shard.count

    def _own_prior(self) -> Tensor | None:
        """The prior of the patterns of this rank."""
        shard = self.shard
        return self.prior if self.prior is None or shard is None else self.prior[shard.start : shard.stop]

    def _modulated(self, patterns: Tensor) -> Tensor:
        modulated: Tensor = patterns if self.modulation is None else self.modulation(patterns)
        return modulated

    def _given_classes(self) -> Classes:
        """The classes, with the class of each pattern of this rank."""
        if self.labels is None:
            raise AHopError("the memory must have labels, got none: use AssociativeMemory(patterns, labels=...)")
        return classes_of(self.labels) if self._classes is None else self._classes

    def _stored(self, rows: Tensor) -> Rows:
        """Returns rows that belong to the patterns, so that an index into the patterns of all ranks is valid."""
        return rows if self.shard is None else ShardedRows(self.shard, rows)

    def _total(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all ranks."""
        return tensor if self.shard is None else self.shard.total(tensor)

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
        before = self.shard, self.patterns, self.labels, self._classes
        with unchanged_on_error(self, self.patterns):
            try:
                return super().load_state_dict(state_dict, strict, assign)
            except Exception:
                if self.shard is not None:
                    self.shard, self.patterns, self.labels, self._classes = before
                raise

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Take the number of patterns from the state dict."""
        stored, prior = (state_dict.get(prefix + name) for name in ("patterns", "prior"))
        if isinstance(stored, Tensor) and stored.ndim == 2 and stored.shape[1] == self.patterns.shape[1]:
            if len(stored) == 0:
                raise AHopError(f"{prefix}patterns must hold at least one pattern, got {describe(stored)}")
            check_finite_rows(**{f"{prefix}patterns": stored})
            if self.prior is not None and isinstance(prior, Tensor) and prior.shape != stored.shape[:1]:
                raise AHopError(f"{prefix}prior must be (N,) = {describe(stored[:, 0])}, got {describe(prior)}")
            self._load_labels(state_dict, prefix + "labels", len(stored))
            before = self._count
            if self.shard is None:
                # Not the caller's tensor, except with assign: it may be mapped and larger than the memory.
                assigned = local_metadata.get("assign_to_params_buffers", False)
                self.patterns = stored if assigned else self.patterns.new_empty(stored.shape)
            else:
                self._keep_loaded(state_dict, prefix)
            if self.prior is not None and len(stored) != before:
                self._set_prior(self.prior.new_zeros(len(stored)))
        state_dict.setdefault(prefix + "beta", torch.ones_like(self.beta))  # state dicts from before beta existed
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _keep_loaded(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Keep this rank's part of the patterns and labels of a state dict, and remove them from it."""
        patterns = state_dict.pop(prefix + "patterns")
        labels = None if self.labels is None else state_dict.pop(prefix + "labels").to(self.patterns.device)
        if self.shard is not None:
            self._keep(Shard(self.shard.group, len(patterns), scale_of(patterns)), patterns.to(self.patterns), labels)

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
            if self.shard is None:
                self.labels = self.labels.new_empty(count)

    def _rows(self, x: Array) -> Tensor:
        """Returns the queries ``x (..., d)`` as a matrix with the dtype of the patterns, or raises."""
        return as_queries(x, self.patterns).reshape(-1, self.patterns.shape[1])

    def _all_rows(self, x: Array) -> tuple[Tensor, slice]:
        """Returns the queries that this rank scores as a matrix, those of all ranks, and the place of ``x`` in them."""
        rows = self._rows(x)
        return (rows, slice(None)) if self.shard is None else self.shard.queries(rows)

    def _all_scores(self, rows: Tensor) -> Tensor:
        """Scores ``rows (L, d)`` against the patterns of all ranks: ``(L, N)``."""
        scores = torch.cat(list(self._score_blocks(rows)), -1)
        return scores if self.shard is None else self.shard.columns(scores)

    def _block_size(self, queries: int) -> int:
        # Other similarities may need several times the memory of a block.
        large = isinstance(self.similarity, AdaptiveSimilarity) and self.similarity.is_single()
        return block_size(self.patterns.shape[1], queries, self.patterns.device.type if large else "cpu")

    def _score_blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the scores of ``rows (L, d)`` for one block of patterns at a time."""
        size, copies = self._block_size(len(rows)), None
        prior = self._own_prior()
        if isinstance(self.similarity, AdaptiveSimilarity) and self.modulation is None:
            copies = arranged_patterns(self.similarity, self.patterns)
        for start, block in zip(range(0, len(self.patterns), size), torch.split(self.patterns, size), strict=True):
            key = self._modulated(block)
            if copies is None:
                scores = self.similarity(rows, key)
            else:
                end = start + size
                scores = self.similarity(rows, key, [None if copy is None else copy[start:end] for copy in copies])
            yield scores if prior is None else scores + prior[start : start + len(block)]

    def _logit_blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the scores as :meth:`_score_blocks`, multiplied by the inverse temperature."""
        return (self.beta * scores for scores in self._score_blocks(rows))

    def _update(self, rows: Tensor, steps: int) -> Tensor:
        """Retrieve ``rows (L, d) -> (L, d)`` with ``steps`` updates."""
        bias = self._bias()

        def attend(state: Tensor) -> Tensor:
            scores = self.beta * self._all_scores(state.flatten(0, -2)).reshape(*state.shape[:-1], self._count)
            if self.activation == "sign" and self.separation.name == "exponential":
                scores = scores - scores.amax(-1, keepdim=True)  # avoids overflow and leaves the signs unchanged
            weights: Tensor = self.separation(scores, masked=False)
            return weights

        def read(weights: Tensor) -> Tensor:
            part = slice(None) if self.shard is None else slice(self.shard.start, self.shard.stop)
            output = self._total(weights[..., part] @ self.patterns)
            return output.sign() + (output == 0) if self.activation == "sign" else output  # the sign of 0 is 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity subtracts the bias from its query, so it is added to a state made of patterns.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, steps - 1, 0.0))[0, 0]

    def _pattern_loss(self, blocks: Iterable[Tensor], index: Tensor) -> Tensor:
        """The loss of logits ``(L, B)`` of blocks of patterns, for queries of the patterns ``index (L,)``."""
        logits = torch.cat(list(blocks), -1)
        cross_entropy = nn.functional.cross_entropy if self.shard is None else self.shard.cross_entropy
        return cross_entropy(logits, index)

    def _class_loss(self, blocks: Iterable[Tensor], target: Tensor) -> Tensor:
        """The loss for queries of the classes ``target (L,)``, as numbered in ``classes``."""
        return nn.functional.cross_entropy(self._class_logsumexp(blocks), target)

    def _label_loss(self, blocks: Iterable[Tensor], index: Tensor) -> Tensor:
        """The loss for queries of the classes of the patterns ``index (L,)``, each without that pattern.

        A pattern is kept if it is the only one of its class.
        """
        classes = self._given_classes()
        target = self._stored(classes.of_pattern)[index]
        column = index if self.shard is None else index - self.shard.start
        return self._class_loss(leave_out(blocks, column.masked_fill(classes.counts[target] == 1, -1)), target)

    def _class_logsumexp(self, blocks: Iterable[Tensor]) -> Tensor:
        """The log-sum-exp of logits ``(L, B)`` of blocks of patterns for each class: ``(L, n_classes)``."""
        classes = self._given_classes()
        sums = class_logsumexp(blocks, classes.of_pattern, len(classes.labels))
        return sums if self.shard is None else self.shard.gather(sums).logsumexp(0)
