"""AssociativeMemory: search of stored patterns Xi by a learned similarity, and retrieval ``y = Xi sep(sim(Xi, x))``."""

import copy
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ahop_layers import files
from ahop_layers.errors import AHopError, check_callable, check_choice, check_numbers, check_seed, check_sizes
from ahop_layers.memory import storage
from ahop_layers.memory.arrays import Array, as_given, as_indices, column_names
from ahop_layers.memory.confidence import Hits
from ahop_layers.memory.fit import fit, progress_line
from ahop_layers.memory.learn.auto import first_inverse_temperature
from ahop_layers.memory.learn.solve import FitReport
from ahop_layers.memory.parts import describe_parts, is_own, make_parts, named_similarity, overwrite_
from ahop_layers.memory.repair import NEIGHBORS, Repaired, repair
from ahop_layers.memory.shards import Shards
from ahop_layers.memory.state import Fitted, State, check_tensors
from ahop_layers.memory.storage import Stored, as_patterns, make_stored
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import check_state, unchanged_on_error
from ahop_layers.similarity.associator import Associator
from ahop_layers.similarity.protocol import OwnSimilarity, ScoreFunction, Similarity

CHANGES_UNTIL_FIT = 0.5  # patterns added or removed since a fit, as a share of those fitted, until another one is due


class AssociativeMemory(Associator):
    """Stores patterns and finds the one that a damaged query was made from.

    Threads may search while another one changes, fits or loads the memory: each search sees one state of it. Without
    gradients, scores come from a copy of the similarity, which is renewed when an optimizer or a state dict changed it,
    but not when its ``parameter.data`` was written to; a module of yours is not copied. An invalid argument raises an
    :class:`~ahop_layers.AHopError`, here and in all methods, and leaves the memory unchanged.

    Args:
        patterns: ``(N, d)``, or images ``(N, H, W)`` or ``(N, C, H, W)``: a tensor, an array, a data frame or a list. A
            tensor or array of floating-point numbers or uint8 is not copied; do not modify it. NaN is an unknown value,
            and so is what a masked array masks. If the patterns are a data frame, the columns of other data frames,
            queries too, are arranged by their names; the values of arrays keep their order.
            Patterns may be memory-mapped and larger than the memory of the machine (``torch.from_file``,
            ``torch.load(..., mmap=True)``). If ``blocks`` of the similarity is a tensor, scoring arranges the patterns
            by block once and keeps that copy, up to 2**28 elements.
        similarity: ``"auto"`` is robust against wrong values, also before :meth:`fit`, see
            :class:`~ahop_layers.memory.learn.auto.AutoSimilarity`. ``"dot"``, ``"dis"`` and ``"l1"`` are fixed, and
            ``"adaptive"`` is an :class:`~ahop_layers.AdaptiveSimilarity` with its default arguments, the network A-Hop
            of the paper. A module or function scores queries ``(L, d)`` against keys ``(S, d)``: ``(L, S)``.
        labels: the class of each pattern ``(N,)``, integers or strings, for :meth:`classify`, :meth:`class_scores` and
            the confidence of hits. Integers need not be consecutive.
        ids: a name of each pattern ``(N,)``, strings or integers, all different.
        separation: the function of :meth:`retrieve` from scores to weights, a name of
            :class:`~ahop_layers.Separation` or such a module.
        beta: inverse temperature, the factor of the scores in the separation and in :meth:`class_scores`. ``None``
            means 1, with ``"auto"`` one with which stored patterns retrieve themselves, until :meth:`fit` sets it.
        check: raise if a pattern holds infinity, or no known value. False skips the check, which reads all patterns
            once, and promises that there is no NaN.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns, ids=[f"pattern {i}" for i in range(100)])
    >>> query = patterns[:3] + 0.01
    >>> query[:, :4], query[:, 4:6] = 5.0, torch.nan
    >>> hits = memory.search(query)
    >>> hits.ids
    [['pattern 0'], ['pattern 1'], ['pattern 2']]
    """

    _state: State

    def __init__(
        self, patterns: Any, similarity: str | ScoreFunction = "auto", *, labels: Any = None, ids: Any = None,
        separation: str | Separation = "softmax", beta: float | None = None, check: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        columns = column_names("patterns", patterns)
        rows, shape = as_patterns(patterns)
        stored = make_stored(rows, shape, labels, ids, check, columns=columns)
        wide = accumulation_dtype(stored.dtype)
        self._fits_beta = beta is None
        if beta is not None:
            check_numbers("a positive number", beta=beta)
        factor = torch.tensor(float(beta or 1.0), dtype=wide, device=rows.device)
        if not 0 < factor < torch.inf:
            raise AHopError(f"beta must be a positive number within the range of {wide}, got {beta!r}")
        sample = stored.sample(torch.arange(0, len(rows), max(1, rows.numel() // 2**21), device=rows.device))
        sample = rows if rows.dtype == stored.dtype else sample
        self.similarity = named_similarity(similarity, sample, shape) if isinstance(similarity, str) else similarity
        self.separation = Separation(separation) if isinstance(separation, str) else separation
        check_callable(similarity=self.similarity, separation=self.separation)
        self._changing, self._pending = threading.RLock(), cast(State | None, None)
        live = self._live()
        if stored.unknown and not live.allows_missing:
            raise AHopError("patterns must not hold NaN for this similarity, got NaN: similarity='auto' allows it")
        live.fix_scales_(sample)  # not per chunk of patterns
        if similarity == "auto" and beta is None:
            factor.fill_(first_inverse_temperature(live, sample))
        self._publish(State(stored, live, live, factor, Fitted.none(stored.dim, wide, rows.device)))
        # A module that contains the memory loads its parts after the memory itself.
        self.register_load_state_dict_post_hook(_publish_loaded)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self._state.stored.count

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_changing"} | {"_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._changing = threading.RLock()  # each copy has its own

    # The state. A method reads it once, in its first line; what changes it holds the lock, and replaces it at the end.

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "similarity" and "_state" in self.__dict__:
            with self._changing:
                self._publish(self._state)

    def _live(self) -> Similarity:
        """Returns the similarity as the package asks it."""
        return self.similarity if isinstance(self.similarity, Similarity) else OwnSimilarity(self.similarity)

    def _publish(self, state: State) -> None:
        """Replaces the state, with a copy of the similarity as it is now."""
        live, own, frozen = self._live(), is_own(self.similarity), state.frozen
        if not own:
            frozen = live
        elif frozen is live or live is not state.live or not state.follows(live):
            frozen = copy.deepcopy(live)
        self._state = State.made(state, self.similarity, live, frozen)

    def _read(self) -> State:
        """Returns the state, after it has followed a similarity that was trained, loaded or changed."""
        state = self._state
        if torch.compiler.is_compiling() or state.is_of(self.similarity):
            return state
        with self._changing:
            state = self._state
            if not state.is_of(self.similarity):
                self._publish(replace(state, stored=replace(state.stored)))
            return self._state

    @property
    def beta(self) -> Tensor:
        """The inverse temperature, a scalar. It can be set to a positive number."""
        return self._state.beta

    @beta.setter
    def beta(self, value: float | Tensor) -> None:
        check_numbers("a positive number", beta=value.item() if isinstance(value, Tensor) else value)
        with self._changing:
            self._state = replace(self._state, beta=torch.as_tensor(value).to(self._state.beta))

    @property
    def patterns(self) -> Tensor:
        """The patterns in the shape in which they were given; of a sharded memory, the part of this rank."""
        stored = self._state.stored
        return stored.shaped(stored.patterns)

    @property
    def labels(self) -> Any:
        """The class of each pattern ``(N,)``, a list if they are strings; None if there are none."""
        stored = self._state.stored
        return None if stored.labels is None else stored.named(stored.labels)

    @property
    def ids(self) -> list[str | int] | None:
        """The name of each pattern, or None."""
        ids = self._state.stored.ids
        return None if ids is None else list(ids)

    @property
    def columns(self) -> list[str] | None:
        """The names of the columns of the data frame that the patterns were, or None."""
        columns = self._state.stored.columns
        return None if columns is None else list(columns)

    @property
    def classes(self) -> Any:
        """The distinct labels in ascending order ``(n_classes,)``, a list if they are strings; None without labels."""
        stored = self._state.stored
        return None if stored.classes is None else stored.named(stored.classes.labels)

    @property
    def shards(self) -> Shards | None:
        """Which part of the patterns this rank keeps, if the memory is sharded."""
        return self._state.stored.shards

    # Search.

    def scores(self, x: Array) -> Array:
        """Scores ``x (..., d)`` against all patterns: ``(..., N)``.

        Here and in the other methods, queries may have the shape of the patterns, such as ``(..., H, W)``, and are
        converted to their dtype. NumPy arrays are accepted, and the result is then a NumPy array. NaN in a query or a
        pattern is an unknown value, and a pair is scored by the values that both know: see
        :func:`~ahop_layers.adaptive_similarity`. Without any, the score is -inf. Values of float16 whose squares
        would overflow or underflow are scored in float32, which is then the dtype of the scores.

        >>> AssociativeMemory(torch.eye(3), "dot").scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        state = self._read()
        asked = state.queries(x, "scores")
        return as_given(x, asked.result(state.scores(asked.rows, asked.missing)))

    @torch.no_grad()
    def recall(self, x: Array, shortlist: int | str | None = None) -> Array:
        """Finds the index of the pattern with the largest score: ``(..., d) -> (...)``. Memory is independent of N.

        ``shortlist`` is the argument of :meth:`search`.

        >>> AssociativeMemory(torch.eye(3), "dot").recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        return self.search(x, shortlist=shortlist).indices[..., 0]

    @torch.no_grad()
    def search(self, x: Any, k: int = 1, shortlist: int | str | None = None) -> Hits:
        """Finds the ``k`` patterns with the largest scores. Memory is independent of N.

        Args:
            x: queries ``(..., d)``, or in the shape of the patterns.
            k: number of patterns to find for each query.
            shortlist: number of patterns whose scores are computed: those whose codes are nearest, see
                :meth:`build_codes`. ``"auto"`` is a number that finds 99 % of what an exact search finds with the
                damage of the last :meth:`fit`, and needs codes before that fit; an exact search if it takes no
                longer. None computes all scores. On a GPU all searches are exact.

        Returns:
            The scores and the indices of the patterns, ``(..., k)`` each, best first. Equal scores are ordered by
            index; scores of equal patterns may differ in the last bit if a single query is asked by ``"dot"`` or
            ``"dis"``. :class:`~ahop_layers.memory.Hits` have their ids, labels and confidence as well.

        >>> scores, indices = AssociativeMemory(torch.eye(4), "dot").search(torch.tensor([0.5, 2.0, 0.0, 1.0]), k=2)
        >>> scores, indices
        (tensor([2., 1.]), tensor([1, 3]))
        """
        state = self._read()
        check_sizes(k=k)
        if k > state.stored.count:
            raise AHopError(f"k must be at most the number of patterns, {state.stored.count}, got {k}")
        state, length = self._with_codes(state, shortlist, int(k))  # PyTorch does not accept all integers of NumPy
        options = f"k={k}" if length is None else f"k={k}, shortlist={length}"
        asked = state.queries(x, f"search({options})")
        scores, indices = (as_given(x, asked.result(each)) for each in state.search(asked, int(k), length))
        return Hits(scores, indices, x, state, asked)

    def build_codes(self, bits: int = 8) -> None:
        """Makes codes of the patterns, by which a search with a ``shortlist`` finds patterns to score.

        A code has ``bits`` bits for each value, a multiple of 8. More bits find more and take more time and memory:
        with 8, a code has a quarter of the size of a pattern in float32. The first search with a shortlist makes codes
        if there are none. :meth:`add` and :meth:`remove` keep them up to date. They follow the score, so a
        :meth:`fit` makes new ones; it then also measures how long a shortlist must be, for ``shortlist="auto"`` and its
        report. They are not saved, because making them again takes seconds for a million patterns. Needs FAISS:
        ``pip install ahop-layers[search]``. Images have no codes, nor have patterns on a GPU, where searches are exact.

        >>> memory = AssociativeMemory(torch.randn(100, 8))
        >>> memory.build_codes()
        >>> memory.search(memory.patterns[:2], shortlist=20).indices.flatten()
        tensor([0, 1])
        """
        check_sizes(bits=bits)
        if bits % 8:
            raise AHopError(f"bits must be a multiple of 8, got {bits}")
        with self._changing:
            self._state = self._read().with_codes(int(bits))

    def _with_codes(self, state: State, shortlist: Any, least: int) -> tuple[State, int | None]:
        """Returns the state with codes, and the length of a shortlist of at least so many patterns, or None."""
        if isinstance(shortlist, str):
            check_choice("shortlist", shortlist, ("auto",))
        elif shortlist is not None:
            check_sizes(shortlist=shortlist)
            if shortlist < least:
                raise AHopError(f"shortlist must be at least k = {least}, got {shortlist}")
        if shortlist is None or state.stored.patterns.device.type != "cpu":
            return state, None
        if isinstance(shortlist, str):
            if not state.fitted.shortlist:
                raise AHopError("shortlist='auto' needs memory.build_codes() and then memory.fit(), got no such fit")
            shortlist = max(state.fitted.shortlist, least)
        if state.codes is None and shortlist < state.stored.count:
            self.build_codes()
            state = self._read()
        return state, int(shortlist)

    def class_scores(self, x: Array) -> Array:
        """Computes the log-sum-exp of the scores over the patterns of each class: ``(..., d) -> (..., n_classes)``.

        The scores are multiplied by :attr:`beta`, and the classes are in the order of ``classes``. The softmax of the
        result is the sum of the softmax weights of the patterns of each class.

        >>> AssociativeMemory(torch.eye(3), "dot", labels=[4, 7, 7]).class_scores(torch.tensor([1.0, 2.0, 2.0]))
        tensor([1.0000, 2.6931])
        """
        state = self._read()
        return as_given(x, self._class_scores(state, x).to(state.stored.dtype))

    @torch.no_grad()
    def classify(self, x: Any) -> Any:
        """Finds the label of the class with the largest score: ``(..., d) -> (...)``, nested lists for strings.

        >>> memory = AssociativeMemory(torch.eye(3), "dot", labels=["cat", "dog", "dog"])
        >>> memory.classify(torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.5, 1.8]]))
        ['cat', 'dog']
        """
        state = self._read()
        labels = state.stored.given_classes().labels[self._class_scores(state, x).argmax(-1)]
        return as_given(x, state.stored.named(labels))

    def _class_scores(self, state: State, x: Any) -> Tensor:
        """Computes the :meth:`class_scores` in the accumulation dtype."""
        asked = state.queries(x, "class_scores")
        return asked.result(state.logsumexp(asked, state.beta, by_class=True))

    # Confidence and reasons.

    def threshold(self, false_accepts: float = 0.01) -> float:
        """Returns the confidence that a share ``false_accepts`` of unknown queries exceeds.

        Unknown queries are copies of stored patterns, with the damage of the last :meth:`fit`, whose pattern, and
        class, is left out.

        >>> memory = AssociativeMemory(patterns := torch.rand(40, 24))
        >>> report = memory.fit()
        >>> hits = memory.search(torch.cat([patterns[:2], torch.rand(2, 24)]))
        >>> hits.confidence[:, 0] > memory.threshold(false_accepts=0.05)
        tensor([ True,  True, False, False])
        """
        fitted = self._read().fitted
        check_numbers("a number between 0 and 1", false_accepts=false_accepts)
        if fitted.calibration is None:
            rule = "threshold needs a fit of patterns of at least two classes, or of two different patterns"
            raise AHopError(f"{rule}, got none: call memory.fit()")
        return fitted.foreign.quantile(1 - false_accepts).item()

    @torch.no_grad()
    def explain(self, x: Array, index: Any = None) -> Array:
        """Computes what each value of a query adds to the score of a pattern: ``(..., d)``, or the shape of images.

        The sum over all values is the score. A value adds 0 if it is ignored: because it is unknown, or because its
        rank has no weight. What a block adds is divided among its dimensions. ``index`` has the pattern of each query
        ``(...)``; None means the one with the largest score. Modules of the user are refused: their scores are no sum
        that is known.

        >>> AssociativeMemory(torch.tensor([[1.0, 2.0, 3.0]]), "l1").explain(torch.tensor([2.0, 2.0, 9.0]))
        tensor([-1., -0., -6.])
        """
        state = self._unsharded("explain")
        stored, asked = state.stored, state.queries(x, "explain")
        if index is None:
            place = state.search(asked, 1)[1][:, 0]
        else:
            place = as_indices(index, stored.count, asked.rows.device, tuple(asked.batch)).flatten()
        return as_given(x, stored.shaped(asked.result(state.explain(asked.rows, place))), stored.columns)

    # Retrieval.

    @torch.no_grad()
    def retrieve(self, x: Array, steps: int = 1) -> Array:
        """Retrieves patterns for queries, in the shape of ``x``, with ``steps`` updates.

        Call the memory itself to compute gradients: their graph stores every block of the patterns.

        >>> AssociativeMemory(torch.eye(4) * 10, "dot").retrieve(torch.tensor([0.9, 0.2, 0.0, 0.1])).round()
        tensor([10.,  0.,  0.,  0.])
        """
        return self(x, steps)

    def forward(self, x: Array, steps: int = 1) -> Array:
        """As :meth:`retrieve`, with gradients."""
        state = self._unsharded("retrieve")
        stored = state.stored
        check_sizes(steps=steps)
        asked = state.queries(x, "retrieve")
        values = asked.result(state.retrieve(asked.rows, int(steps), self.separation))
        values = values.to(stored.patterns.dtype if stored.patterns.is_floating_point() else stored.dtype)
        return as_given(x, values.reshape(tuple(getattr(x, "shape", values.shape))), stored.columns)

    def repair(self, x: Any, shortlist: int | str | None = None) -> Repaired:
        """Replaces values that are wrong or unknown by what similar patterns have in their place, with gradients.

        Use it before a network that was trained on clean rows and is not to be trained again:
        :class:`~ahop_layers.Repair` is the layer. A query in which nothing is suspicious keeps all values but NaN, and
        so do all queries if the last :meth:`fit` found that repair brings damaged patterns no nearer to the truth.
        Values beyond the range of the patterns are first moved into it.

        Args:
            x: queries ``(..., d)``, or in the shape of the patterns.
            shortlist: the argument of :meth:`search`.

        Returns:
            ``values``, in the shape and dtype of ``x``, and ``intact``, the probability of each given value.

        >>> rows = torch.rand(200, 2) @ torch.rand(2, 16)
        >>> memory = AssociativeMemory(rows[:190], "l1")
        >>> report = memory.fit()
        >>> query = rows[190:].clone()
        >>> query[:, 0], query[:, 1] = torch.nan, 9.0
        >>> values, intact = memory.repair(query)
        >>> bool((values - rows[190:]).abs().max() < 1.0), bool((intact[:, 1] < 0.5).all())
        (True, True)
        """
        state = self._unsharded("repair")
        return repair(*self._with_codes(state, shortlist, min(NEIGHBORS, state.stored.count)), x)

    # Learning.

    def fit(self, damage: Any = None, by: str | None = None, *, seed: int = 0, progress: bool = True) -> FitReport:
        """Learns the similarity from damaged queries.

        With ``similarity="auto"``, and with any :class:`~ahop_layers.AdaptiveSimilarity` without heads, the score is
        linear in its weights, and learning them is a small regression that is solved in seconds, without epochs or a
        learning rate. ``"auto"`` becomes what finds the most held-out queries among all stored patterns: L1 with
        saturating bases, the paper's ``dis`` and ``dot``, all of them, or a simple score, with a bias, units and a
        reach beyond the patterns where these pay. The inverse temperature :attr:`beta` and the confidence of hits are
        set as well; :meth:`add` and :meth:`remove` keep all of this, and warn once if their patterns are more than half
        of the number at the fit. Other similarities keep their weights if learned ones are no better. A bias of zero is
        first set to its least-squares estimate. A similarity without weights to solve for, such as
        ``"dot"`` or a module of yours, is calibrated only.

        Args:
            damage: what happens to a pattern before it is a query: one of :mod:`ahop_layers.memory.variants`, a
                function ``f(x)`` or ``f(x, generator)``, or a list of these, which apply in order. Or pairs
                ``(index (n,), query (n, d))`` of the patterns that queries belong to and queries. None assumes that
                any share of the values may be replaced or missing, and that the others may have a little noise.
            by: ``"label"`` learns to find the class of a query instead of its ``"pattern"``; pairs are then
                ``(label (n,), query (n, d))``. A query that was made of a stored pattern is scored without that
                pattern, unless it is the only one of its class. None means by label if the memory has labels.
            seed: seed of all random numbers.
            progress: whether a terminal shows what is being done. Files and pipes are not written to.

        Returns:
            A report that prints as a table: the accuracy of simple scores and of the learned one on held-out queries,
            and the share of stored patterns that find themselves. A score that finds fewer of them than before is not
            taken.

        >>> import torch, ahop_layers as ah
        >>> patterns = torch.rand(200, 24, generator=torch.Generator().manual_seed(1))
        >>> memory = AssociativeMemory(patterns)
        >>> damage = ah.variants.Replaced((0.0, 0.8), low=0.0, high=1.0)
        >>> report = memory.fit(damage.sample(patterns, 300))  # or memory.fit(damage), from more queries
        >>> dict(report.rows)["learned"] > dict(report.rows)["L1"]
        True
        """
        check_seed(seed=seed)
        with self._changing, torch.inference_mode(False), torch.no_grad(), progress_line(progress) as show:
            self._publish(replace(self._state, source=None))  # also what was written to the data of parameters
            state = self._unsharded("fit")
            by = ("pattern" if state.stored.labels is None else "label") if by is None else by
            check_choice("by", by, ("pattern", "label"))
            fitted, report = fit(state, damage, by == "label", int(seed), self._fits_beta, show)
            overwrite_(self.similarity, fitted.frozen)
            self._publish(fitted)
        return report

    # What is stored.

    def add(
        self, patterns: Any, check: bool = True, *, labels: Any = None, ids: Any = None, replace: bool = False
    ) -> Tensor:
        """Stores more patterns without refitting, and returns their indices ``(n,)``.

        Args:
            patterns: in the shape of those stored.
            check: as for :class:`AssociativeMemory`.
            labels, ids: of each new pattern ``(n,)``. Required if and only if the memory has labels, or ids.
            replace: whether a pattern whose id is stored already takes its place, with its new label.

        >>> AssociativeMemory(torch.zeros(3, 4)).add(torch.ones(2, 4))
        tensor([3, 4])
        """
        with self._changing:
            state = self._unsharded("add")
            added = state.stored.others(patterns, labels, ids, check, replace)
            if added.unknown:
                state.check_missing("patterns")
            joined, place = state.stored.joined(added, replace)
            codes = None if state.codes is None else state.codes.added(added.patterns, place, len(joined.patterns))
            self._change(state, joined, codes, len(added.patterns))
            return place

    def remove(self, index: Any = None, *, ids: Any = None) -> None:
        """Deletes patterns, with all that belongs to them, by index, by boolean mask or by id. Later ones move up.

        >>> memory = AssociativeMemory(torch.eye(3), "dot", ids=["a", "b", "c"])
        >>> memory.remove(ids=["a", "c"])
        >>> memory.patterns
        tensor([[0., 1., 0.]])
        """
        with self._changing:
            state = self._unsharded("remove")
            rest, codes = state.stored.without(index, ids), state.codes
            codes = None if codes is None else codes._replace(packed=codes.packed[rest])
            self._change(state, state.stored.only(rest), codes, state.stored.count - len(rest))

    def _change(self, state: State, stored: Stored, codes: Any, count: int) -> None:
        """Stores other patterns, counts those that changed since the last fit, and warns when another one is due."""
        fitted, before = state.fitted.count, state.fitted.changes
        self._publish(replace(state, stored=stored, codes=codes, fitted=replace(state.fitted, changes=before + count)))
        if fitted and before <= CHANGES_UNTIL_FIT * fitted < before + count:
            changed = f"{before + count} patterns were added or removed since the fit of {fitted}"
            warnings.warn(f"{changed}: call memory.fit() again, for the score and its confidence", stacklevel=3)

    def _unsharded(self, name: str) -> State:
        """Reads the state, or raises if the memory is sharded."""
        state = self._read()
        if state.stored.shards is not None:
            raise AHopError(f"{name} must be called before shard_, got a memory that is sharded")
        return state

    def shard_(self, group: Any = None) -> "AssociativeMemory":
        """Keeps only a part of the patterns on each rank of a process group, and returns the memory.

        Fit the memory before, for example on a sample of the patterns. Each rank must call this method with equal
        patterns, for example from one memory-mapped file, and copies its part of them; parameters are copied from the
        first rank. Afterwards ``patterns`` is this part. :meth:`search`, :meth:`recall`, :meth:`scores`,
        :meth:`class_scores` and :meth:`classify` give on every rank what one process gives. They communicate, so all
        ranks must call them together, with equal queries. Other methods raise.

        ``group`` is a process group of ``torch.distributed`` that supports the device of the patterns, such as gloo or
        NCCL; None means all processes.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=0, world_size=1)
        ...     memory = AssociativeMemory(torch.eye(3), "dot").shard_()
        ...     memory.recall(torch.tensor([1.0, 3.0, 2.0]))
        ...     torch.distributed.destroy_process_group()
        tensor(1)
        """
        with self._changing:
            state = self._unsharded("shard_")
            stored = state.stored
            shards = Shards(group, stored.count, stored.patterns.device)
            labels = None if stored.labels is None else stored.labels.tolist()
            part = shards.take(stored.patterns, f"labels {labels} and ids {stored.ids}")
            own = state.tensors()
            fitted = {name: shards.gather(each)[0] for name, each in own.items()}
            with torch.no_grad():
                for tensor in (*self.parameters(), *self.buffers()):
                    tensor.copy_(shards.gather(tensor)[0])
            self._publish(
                replace(state.loaded(fitted), stored=replace(stored, patterns=part, shards=shards), codes=None)
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "AssociativeMemory":
        """Moves or converts the memory. ``beta`` can exceed float16, and stays in at least float32."""
        with self._changing:
            state = self._state.moved(fn)
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._publish(state)
        return self

    # State dicts and files.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the state; of a sharded memory, without what is stored."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self._read()
        stored = {} if state.stored.shards else state.stored.tensors()
        destination.update({prefix + name: tensor for name, tensor in (state.tensors() | stored).items()})

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Returns the state dict of ``nn.Module``; no other thread changes the memory meanwhile.

        >>> sorted(AssociativeMemory(torch.eye(3), "dot").state_dict())[:3]
        ['beta', 'calibration', 'fit_counts']
        """
        with self._changing:
            return super().state_dict(*args, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict, which may hold another number of patterns. If it fails, the memory is unchanged.

        What a state dict does not name is kept and reported as missing, or refused if ``strict``. A memory without a
        fit says so: its ``calibration`` is 0, and its ``similarity.units`` and ``similarity.bias`` are empty.

        Args:
            state_dict: of a memory that has labels, names of classes, ids and columns if and only if this one does.
            strict, assign: as for ``nn.Module``.

        >>> memory = AssociativeMemory(torch.zeros(3, 4))
        >>> memory.load_state_dict(AssociativeMemory(torch.ones(2, 4)).state_dict())
        <All keys matched successfully>
        >>> len(memory)
        2
        """
        with self._changing, unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        """Takes the state from the state dict; it is published when the similarity is loaded, too."""
        check_state(self, state_dict, prefix)
        state = self._state
        names = [*state.tensors(), *(() if state.stored.shards else state.stored.tensors())]
        if prefix + "mixture.gate" in state_dict:  # which older ones have, too
            state_dict.setdefault(prefix + "mixture.least", torch.zeros(()))
        missing += [prefix + name for name in names if prefix + name not in state_dict]
        if prefix + "patterns" in state_dict:
            belongings = {name: state_dict.pop(prefix + name, None) for name in storage.STORED}
            self._unsharded("load_state_dict")
            stored = state.stored.loaded(prefix, belongings, metadata.get("assign_to_params_buffers", False))
            if stored.unknown:
                state.check_missing(f"{prefix}patterns")
            state = replace(state, stored=stored).moved(lambda tensor: tensor)  # to the dtype of the patterns
        own = state.tensors()
        given = {name: state_dict.pop(prefix + name) for name in own if prefix + name in state_dict}
        self._pending = replace(state.loaded(own | check_tensors(own, given, prefix)), codes=None)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)

    def save(self, path: str | Path) -> None:
        """Saves the whole memory in one file: patterns, labels, ids, similarity, temperature and confidence.

        The file has the safetensors format. It replaces an older one when it is complete. Similarity and separation
        must be of this package. Needs ``pip install ahop-layers[save]``.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AssociativeMemory(torch.eye(3), labels=["a", "b", "b"]).save(f"{folder}/memory.safetensors")
        ...     AssociativeMemory.load(f"{folder}/memory.safetensors").classify(torch.eye(3))
        ['a', 'b', 'b']
        """
        with self._changing:  # parameters are modified in place, also while the file is written
            self._unsharded("save")
            header = describe_parts(self) | {"version": storage.FILE_VERSION, "fits_beta": self._fits_beta}
            tensors = {name: each if name == "patterns" else each.clone() for name, each in self.state_dict().items()}
        files.write(files.as_path(path), storage.FILE_KEY, tensors, header)

    @classmethod
    def load(cls, path: str | Path, check: bool = True) -> "AssociativeMemory":
        """Loads a memory that :meth:`save` saved. The patterns are memory-mapped: call ``.to(device)`` to move them.

        ``check`` is the argument of :class:`AssociativeMemory`.
        """
        path = files.as_path(path)
        tensors, header = files.read(path, storage.FILE_KEY, "AssociativeMemory.save")
        if (version := header.get("version")) != storage.FILE_VERSION:
            rule = f"the file must have the version {storage.FILE_VERSION} of this ahop-layers"
            raise AHopError(f"{rule}, got {version!r}")
        try:
            own, parts = storage.belongings(tensors), make_parts(header, tensors)
            columns = own.pop("columns")
            memory = cls(tensors["patterns"], **own, **parts, check=check)
            memory._publish(replace(memory._state, stored=replace(memory._state.stored, columns=columns)))
            rest = {name: tensor for name, tensor in tensors.items() if name not in storage.STORED}
            keys = memory.load_state_dict(rest, strict=False)
            if not set(storage.STORED).issuperset(keys.missing_keys) or keys.unexpected_keys:  # it has them already
                raise AHopError(f"expected other tensors, got {keys}")
            memory._fits_beta = bool(header["fits_beta"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            message = f"path must be a file that AssociativeMemory.save wrote, got {str(path)!r}: {error}"
            raise AHopError(message) from error
        return memory


def _publish_loaded(memory: AssociativeMemory, _: Any) -> None:
    """Publishes what a state dict had for a memory, all of whose parts are loaded now."""
    with memory._changing:
        pending, memory._pending = memory._pending, None
        if pending is not None:
            memory._publish(pending)
