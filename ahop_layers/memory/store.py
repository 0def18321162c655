"""Stored patterns with labels and a prior: adding, removing, sharding and state dicts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ahop_layers.errors import AHopError, check_numbers, check_patterns, describe, has_unknown
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.estimates import scale_of
from ahop_layers.memory.labels import Classes, as_labels, classes_of
from ahop_layers.memory.search import check_width, from_numpy
from ahop_layers.memory.shards import Shard
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity import Associator

Store = TypeVar("Store", bound="PatternStore")


class PatternStore(Associator):
    """The tensors of an associative memory. See :class:`ahop_layers.AssociativeMemory` for the arguments."""

    patterns: Tensor
    beta: Tensor
    labels: Tensor | None
    shard: Shard | None = None
    _unknown: bool  # whether a pattern holds NaN
    _classes: Classes | None = None  # of all ranks, if sharded

    def __init__(self, patterns: Any, labels: Any, prior: bool, check: bool, beta: float | None) -> None:
        super().__init__()
        if beta is not None:
            check_numbers("a positive number", beta=beta)
        patterns = from_numpy(patterns)
        check_patterns(patterns)
        self._unknown = has_unknown(patterns=patterns) if check else False
        self.register_buffer("patterns", patterns.detach())
        wide = accumulation_dtype(patterns.dtype)
        temperature = torch.tensor(1.0 if beta is None else float(beta), dtype=wide, device=patterns.device)
        if not temperature.is_meta and not 0 < temperature < torch.inf:
            raise AHopError(f"beta must be a positive number within the range of {wide}, got {beta!r}")
        self.register_buffer("beta", temperature)
        self._fits_beta = beta is None
        self.register_buffer("labels", None if labels is None else as_labels(labels, len(patterns), patterns.device))
        self.prior = nn.Parameter(patterns.new_zeros(len(patterns))) if prior else None

    @property
    def classes(self) -> Tensor:
        """The distinct labels in ascending order ``(n_classes,)``.

        Raises:
            AHopError: the memory has no labels.
        """
        return self._given_classes().labels

    @torch.no_grad()
    def shard_(self: Store, group: Any = None) -> Store:
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
        ...     memory = ah.AssociativeMemory(torch.eye(3), "dot").shard_()
        ...     memory.recall(torch.tensor([1.0, 3.0, 2.0]))
        ...     torch.distributed.destroy_process_group()
        tensor(1)
        """
        if self.shard is not None:
            raise AHopError(f"shard_ must be called once, got a memory that is sharded over {self.shard.ranks} ranks")
        shard = Shard(group, len(self.patterns), scale_of(self.patterns), self.patterns.device)
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

    def _apply(self: Store, fn: Any, recurse: bool = True) -> Store:
        """Move or convert the memory, and the part of a rank, which is not a buffer. ``beta`` can exceed float16."""
        beta = self.beta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.shard is not None:
            self.patterns = fn(self.patterns)
            self.labels = None if self.labels is None else fn(self.labels)
            self._classes = None if self._classes is None else Classes(*map(fn, self._classes))
        wide = accumulation_dtype(self.patterns.dtype)
        if self.beta.dtype != wide:
            self.beta = beta.to(self.beta.device, wide)
        return self

    def _refuse_sharded(self, name: str) -> None:
        if self.shard is not None:
            raise AHopError(f"{name} must be called before shard_, got a memory that is sharded")

    def add(self, patterns: Any, check: bool = True, *, labels: Any = None) -> Tensor:
        """Store more patterns without refitting, and return their indices ``(n,)``.

        With a prior, the new patterns get the mean prior.

        Args:
            patterns: ``(n, d)``, a tensor or a NumPy array.
            check: raise if a pattern holds infinity, or no known value. False skips the check, and promises that there
                is no NaN.
            labels: the class of each new pattern, integers ``(n,)``. Required if and only if the memory has labels.

        Raises:
            AHopError: the patterns do not match those stored, or hold infinity. Labels are missing, or are given to a
                memory without labels. The memory is sharded.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.add(torch.ones(2, 4))
        tensor([3, 4])
        """
        self._refuse_sharded("add")
        patterns = from_numpy(patterns)
        check_patterns(patterns)
        check_width("patterns", patterns, self.patterns)
        before, added = len(self.patterns), patterns.detach().to(self.patterns)
        unknown = has_unknown(patterns=added) if check else False
        if unknown:
            self._check_missing("patterns")
        if (labels is None) != (self.labels is None):
            expected = "not be given: the memory has none" if self.labels is None else "be given: the memory has labels"
            raise AHopError(f"labels must {expected}, got {'none' if labels is None else 'labels'}")
        if self.labels is not None:
            self.labels = torch.cat([self.labels, as_labels(labels, len(patterns), self.labels.device)])
        self.patterns, self._unknown = torch.cat([self.patterns, added]), self._unknown or unknown
        if self.prior is not None:
            self._set_prior(torch.cat([self.prior.detach(), self.prior.detach().mean().expand(len(patterns))]))
        return torch.arange(before, len(self.patterns), device=self.patterns.device)

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Delete patterns, and their labels, by index or by boolean mask. Later patterns move up.

        Raises:
            AHopError: ``index`` is invalid, no pattern would be left, or the memory is sharded.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3), "dot")
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

    def _check_missing(self, name: str) -> None:
        """Raises if the similarity cannot score pairs with missing values."""

    @property
    def _count(self) -> int:
        """The number of patterns, of all ranks together."""
        return len(self.patterns) if self.shard is None else self.shard.count

    def _own_prior(self) -> Tensor | None:
        """The prior of the patterns of this rank."""
        shard = self.shard
        return self.prior if self.prior is None or shard is None else self.prior[shard.start : shard.stop]

    def _given_classes(self) -> Classes:
        """The classes, with the class of each pattern of this rank."""
        if self.labels is None:
            raise AHopError("the memory must have labels, got none: use AssociativeMemory(patterns, labels=...)")
        return classes_of(self.labels) if self._classes is None else self._classes

    def _set_prior(self, values: Tensor) -> None:
        self.prior = nn.Parameter(values, requires_grad=self.prior is not None and self.prior.requires_grad)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, which may hold another number of patterns. If it fails, the memory is unchanged.

        Args:
            state_dict, strict, assign: as for ``nn.Module``.

        Raises:
            AHopError: the state dict holds no pattern, infinity in a pattern, a prior or labels of another length, or
                the memory has labels and the state dict has none.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.load_state_dict(ah.AssociativeMemory(torch.ones(2, 4)).state_dict())
        <All keys matched successfully>
        >>> len(memory.patterns)
        2
        """
        before, unknown = (self.shard, self.patterns, self.labels, self._classes), self._unknown
        with unchanged_on_error(self, self.patterns):
            try:
                return super().load_state_dict(state_dict, strict, assign)
            except Exception:
                self._unknown = unknown
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
            unknown = has_unknown(**{f"{prefix}patterns": stored})
            if unknown:
                self._check_missing(f"{prefix}patterns")
            self._unknown = unknown
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
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _keep_loaded(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Keep this rank's part of the patterns and labels of a state dict, and remove them from it."""
        patterns = state_dict.pop(prefix + "patterns")
        labels = None if self.labels is None else state_dict.pop(prefix + "labels").to(self.patterns.device)
        if self.shard is not None:
            shard = Shard(self.shard.group, len(patterns), scale_of(patterns), self.patterns.device)
            self._keep(shard, patterns.to(self.patterns), labels)

    def _load_labels(self, state_dict: dict[str, Any], key: str, count: int) -> None:
        """Check the labels of a state dict, and take their number from it."""
        if self.labels is not None:
            if key not in state_dict:
                raise AHopError(f"{key} must be in the state dict, because the memory has labels, got none")
            state_dict[key] = as_labels(state_dict[key], count, name=key)
            if self.shard is None:
                self.labels = self.labels.new_empty(count)


@contextmanager
def unchanged_on_error(module: nn.Module, constant: Tensor) -> Iterator[None]:
    """Restore all parameters and buffers of ``module`` if the body raises an Exception.

    ``constant`` is a buffer that the body may replace but does not write to, so that no copy of it is needed.
    """
    owners: list[dict[str, Any]] = [*(part._parameters for part in module.modules())]
    owners += [part._buffers for part in module.modules()]
    before = [
        (
            owner,
            name,
            tensor,
            tensor if tensor is None or tensor is constant or is_lazy(tensor) else tensor.detach().clone(),
        )
        for owner in owners
        for name, tensor in owner.items()
    ]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for owner, name, tensor, value in before:
                owner[name] = tensor if tensor is value else tensor.copy_(value)
        for part in module.modules():
            if isinstance(part, AutoSimilarity):
                part.refresh()
        raise
