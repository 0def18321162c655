"""What a memory stores: patterns and all that belongs to them, as an immutable value, in files and state dicts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.arrays import Classes, Ids, as_ids, as_labels, as_tensor, check_values, from_numpy
from ahop_layers.memory.shards import Shards
from ahop_layers.memory.variants import known_range
from ahop_layers.ops.reference import accumulation_dtype

STORED = ("patterns", "labels", "names", "ids", "columns")  # tensors of a state dict that belong to the patterns
FILE_KEY = "ahop_layers.memory"  # where the files of a memory have their header
FILE_VERSION = 1
READ_ELEMENTS = 2**21  # number of elements of the patterns that are read at once


@dataclass(frozen=True, eq=False)
class Stored:
    """The patterns of a memory and all that belongs to them.

    Attributes:
        patterns: ``(n, d)``, floating-point or uint8; of a sharded memory, the part of this rank.
        shape: the shape of a pattern as it was given, ``(d,)`` or the shape of an image.
        unknown: whether a pattern holds NaN.
        largest: the largest absolute value of all patterns; 0 if it is not known.
        labels: the class of each pattern ``(N,)``, of all ranks.
        names: the names of the classes, if they have any: a label is an index of them.
        ids: the name of each pattern, of all ranks.
        columns: the name of each value of a pattern, if the patterns were a data frame.
        shards: which part of the patterns this rank keeps, if the memory is sharded.
        classes: the classes, with the class of each pattern of all ranks.
        dtype: the dtype in which patterns are scored, see :func:`scoring_dtype`.
    """

    patterns: Tensor
    shape: tuple[int, ...]
    unknown: bool
    largest: float
    labels: Tensor | None
    names: tuple[str, ...] | None
    ids: Ids | None
    columns: tuple[str, ...] | None = None
    shards: Shards | None = None
    classes: Classes | None = None
    dtype: torch.dtype = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", scoring_dtype(self.patterns.dtype, self.dim, self.largest))
        if self.labels is not None and self.classes is None:
            found = self.labels.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
            object.__setattr__(self, "classes", Classes(*found))

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # without what was computed from them

    @property
    def dim(self) -> int:
        """The number of values of a pattern."""
        return self.patterns.shape[1]

    @property
    def count(self) -> int:
        """The number of patterns, of all ranks together."""
        return len(self.patterns) if self.shards is None else self.shards.count

    def shaped(self, rows: Tensor) -> Tensor:
        """Returns rows ``(..., d)`` in the shape in which patterns were given."""
        return rows if len(self.shape) == 1 else rows.reshape(*rows.shape[:-1], *self.shape)

    def sample(self, index: Tensor) -> Tensor:
        """Returns the patterns ``index (n,)`` in :attr:`dtype`."""
        return self.patterns.index_select(0, index).to(self.dtype)  # faster than patterns[index]

    def chunk(self, start: int, size: int) -> Tensor:
        """Returns ``size`` patterns from ``start`` on in :attr:`dtype`."""
        return self.patterns[start : start + size].to(self.dtype)

    @cached_property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest known value of each dimension ``(d,)``, of all ranks; NaN if none is known."""
        return self.find_limits()

    @torch.inference_mode(False)
    @torch.no_grad()
    def find_limits(self) -> tuple[Tensor, Tensor]:
        """Computes the :attr:`limits`, which a compiled graph cannot keep."""
        patterns, wide = self.patterns, accumulation_dtype(self.dtype)
        low, high = known_range(patterns) if patterns.is_floating_point() else patterns.aminmax(dim=0)
        low, high = low.to(wide), high.to(wide)
        if self.shards is not None:
            low = self.shards.gather(low.nan_to_num(torch.inf)).amin(0)
            high = self.shards.gather(high.nan_to_num(-torch.inf)).amax(0)
            low, high = (each.masked_fill(low > high, torch.nan) for each in (low, high))
        return low, high

    def given_classes(self) -> Classes:
        """Returns the classes, or raises if there are none."""
        if self.classes is None:
            raise AHopError("the memory must have labels, got none: use AssociativeMemory(patterns, labels=...)")
        return self.classes

    @property
    def shares_classes(self) -> bool:
        """Whether there are several classes, of two patterns or more on average."""
        return self.classes is not None and 1 < len(self.classes.labels) <= self.count // 2

    def class_of(self, index: Tensor) -> Tensor:
        """Returns the class of each pattern ``index (...)``."""
        return self.given_classes().of_pattern[index]

    def named(self, labels: Tensor) -> Any:
        """Returns labels ``(...)`` as they were given: integers as they are, or lists of names."""
        return labels if self.names is None else nested(labels.tolist(), self.names)

    @cached_property
    def place_of(self) -> dict[str | int, int]:
        """The index of each id; raises if there are no ids."""
        if self.ids is None:
            raise AHopError("the memory must have ids, got none: use AssociativeMemory(patterns, ids=...)")
        return {id: at for at, id in enumerate(self.ids)}

    def places(self, ids: Any) -> Tensor:
        """Returns the index of each of the ``ids``, or raises."""
        known, given = self.place_of, as_ids(ids)
        unknown = [each for each in given if each not in known]
        if unknown:
            raise AHopError(f"ids must be ids of stored patterns, got {unknown[0]!r}")
        return torch.tensor([known[each] for each in given], dtype=torch.int64, device=self.patterns.device)

    def product(self, weights: Tensor, known: bool = False) -> Tensor:
        """Sums the patterns, or which of their values are ``known``, with ``weights (..., n)``."""
        if self.patterns.dtype == self.dtype and not self.unknown:
            return weights @ self.patterns
        size, total = max(1, 2**21 // self.dim), weights.new_zeros(*weights.shape[:-1], self.dim)
        for start in range(0, len(self.patterns), size):
            chunk = self.chunk(start, size)
            chunk = (~chunk.isnan()).to(self.dtype) if known else chunk.nan_to_num(0.0)
            total = total + weights[..., start : start + size] @ chunk
        return total

    def take(self, index: Tensor) -> "Stored":
        """Returns the patterns ``index (n,)``, with their classes as labels and without ids."""
        labels = None if self.classes is None else self.class_of(index)
        return replace(self, patterns=self.sample(index), labels=labels, classes=None, names=None, ids=None)

    def only(self, index: Tensor) -> "Stored":
        """Returns the patterns ``index (n,)``, with all that belongs to them."""
        labels = None if self.labels is None else self.labels[index]
        ids = None if self.ids is None else tuple(self.ids[place] for place in index.tolist())
        patterns = self.patterns[index]
        unknown = self.unknown and bool(patterns.isnan().any())
        return replace(self, patterns=patterns, labels=labels, classes=None, ids=ids, unknown=unknown)

    def others(self, patterns: Any, labels: Any, ids: Any, check: bool, replaces: bool) -> "Stored":
        """Returns more patterns, with what belongs to them, as those of this value; or raises."""
        rows, shape = as_patterns(patterns, self.columns)
        if shape not in (self.shape, (self.dim,)):
            expected = ", ".join(map(str, ("n", *self.shape)))
            raise AHopError(f"patterns must be ({expected}), as those stored, got patterns of the shape {shape}")
        if replaces and self.ids is None:
            raise AHopError("replace=True needs a memory with ids, got none")
        for name, given, own in (("labels", labels, self.labels), ("ids", ids, self.ids)):
            if (given is None) != (own is None):
                rule = "not be given: the memory has none" if own is None else f"be given: the memory has {name}"
                raise AHopError(f"{name} must {rule}, got {'none' if given is None else name}")
        return make_stored(converted(rows, self.patterns), self.shape, labels, ids, check, self.names)

    def without(self, index: Any, ids: Any) -> Tensor:
        """Returns the indices of the patterns that are left without those of an index, a mask or ids; or raises."""
        if (index is None) == (ids is None):
            raise AHopError(f"remove takes an index or ids, got {'neither' if index is None else 'both'}")
        keep = torch.ones(len(self.patterns), dtype=torch.bool)
        index = index if ids is None else self.places(ids)
        try:
            removed = torch.as_tensor(from_numpy(index)).cpu()
            keep[removed if removed.numel() else []] = False
        except (IndexError, RuntimeError, TypeError, ValueError):
            kind = describe(index) if isinstance(index, Tensor) else type(index).__name__
            raise AHopError(f"index must be indices or a mask of the {len(keep)} patterns, got {kind}") from None
        if not keep.any():
            raise AHopError(f"index must leave at least one pattern, got all {len(keep)}")
        return keep.nonzero().flatten().to(self.patterns.device)

    def joined(self, added: "Stored", replaces: bool) -> tuple["Stored", Tensor]:
        """Returns these patterns and those ``added``, and the indices of the latter ``(n,)``.

        If ``replaces``, a pattern takes the place of the one with its id. Others are at the end.
        """
        before, n, ids = len(self.patterns), len(added.patterns), self.ids
        place = torch.arange(before, before + n, device=self.patterns.device)
        old = place < 0
        if ids is not None and added.ids is not None:
            known = self.place_of
            twice = [each for each in added.ids if each in known]
            if twice and not replaces:
                raise AHopError(f"ids must not be stored already, got {twice[0]!r}: replace=True replaces them")
            old = torch.tensor([each in known for each in added.ids], device=place.device)
            place = before - 1 + (~old).cumsum(0)
            place[old] = torch.tensor([known[each] for each in twice], dtype=torch.int64, device=place.device)
            ids = (*ids, *(each for each in added.ids if each not in known))

        def join(first: Tensor, second: Tensor) -> Tensor:
            both = torch.cat([first, second[~old] if old.any() else second])
            both[place[old]] = second[old]
            return both

        labels = None if self.labels is None or added.labels is None else join(self.labels, added.labels)
        patterns, names = join(self.patterns, added.patterns), added.names
        if labels is not None and names is not None and list(names) != sorted(names):
            order = torch.tensor(sorted(range(len(names)), key=names.__getitem__), device=labels.device)
            labels, names = order.argsort()[labels], tuple(sorted(names))
        unknown = added.unknown or (self.unknown and bool(patterns.isnan().any()))
        values: dict[str, Any] = {"labels": labels, "classes": None, "names": names, "ids": ids, "unknown": unknown}
        return replace(self, patterns=patterns, **values, largest=max(self.largest, added.largest)), place

    def tensors(self) -> dict[str, Tensor]:
        """Returns what a state dict holds of the patterns."""
        found = {"patterns": self.shaped(self.patterns.detach())}
        if self.labels is not None:
            found["labels"] = self.labels
        texts = {"names": self.names, "ids": self.ids, "columns": self.columns}
        return found | {name: text_tensor(value) for name, value in texts.items() if value is not None}

    def loaded(self, prefix: str, given: Mapping[str, Any], assign: bool) -> "Stored":
        """Returns what a state dict has of the patterns; ``assign`` keeps its tensors, which may be memory-mapped."""
        patterns, name = given["patterns"], f"{prefix}patterns"
        shape = getattr(patterns, "shape", ())
        if not isinstance(patterns, Tensor) or tuple(shape[1:]) != self.shape or not len(patterns):
            got = describe(patterns) if isinstance(patterns, Tensor) else type(patterns).__name__
            expected = ", ".join(map(str, self.shape))
            raise AHopError(f"{name} must be (N, {expected}) with N at least 1, got {got}")
        check_values(name, patterns)
        rows = as_tensor(name, patterns).flatten(1)
        if self.patterns.dtype == torch.uint8:
            rows = converted(rows, self.patterns, name)
        elif not rows.is_floating_point():
            raise AHopError(f"{name} must have the dtype {self.patterns.dtype}, got {rows.dtype}")
        for key in STORED[1:]:
            own = getattr(self, key)
            if (own is None) != (given[key] is None):
                rule = "must not be in the state dict: the memory has none" if own is None else "must be given"
                raise AHopError(f"{prefix}{key} {rule}, got {'some' if own is None else 'none'}")
        rows = rows if assign else rows.to(self.patterns, copy=True)
        return make_stored(rows, self.shape, **belongings(given, prefix), name=name)


def make_stored(
    patterns: Tensor, shape: tuple[int, ...], labels: Any, ids: Any, check: bool = True,
    names: tuple[str, ...] | None = (), name: str = "patterns", columns: tuple[str, ...] | None = None,
) -> Stored:  # fmt: skip
    """Checks ``patterns (N, d)``, which errors call ``name``, and what belongs to them; for names see as_labels."""
    codes = None
    if labels is not None:
        called = name.replace("patterns", "labels")
        codes, names = as_labels(labels, len(patterns), patterns.device, called, names=names)
    unknown, largest = read_values(name, patterns, check)
    ids = None if ids is None else as_ids(ids, len(patterns))
    if columns is not None and (len(columns),) != shape:
        raise AHopError(f"columns must be one for each of {shape} values, got {len(columns)}")
    return Stored(patterns, shape, unknown, largest, codes, names or None, ids, columns)


def read_values(name: str, patterns: Tensor, check: bool = True) -> tuple[bool, float]:
    """Returns whether ``patterns (N, d)`` hold NaN, and their largest absolute value.

    Raises for infinity and for a row without a known value. Without ``check``, it reads evenly spaced patterns of at
    most 2**21 values or so, and reports no NaN.
    """
    if not patterns.is_floating_point() or not patterns.numel():
        return False, 0.0
    rows, first = patterns if check else patterns[:: max(1, patterns.numel() // READ_ELEMENTS)], 0
    chunks = torch.split(rows, max(1, READ_ELEMENTS // rows.shape[1]))
    largest = torch.stack([torch.stack(chunk.aminmax()) for chunk in chunks]).abs().max().item()
    if math.isfinite(largest):
        return False, largest
    for chunk in chunks if check else ():
        infinite, unknown = chunk.isinf().any(1), chunk.isnan().all(1)
        if infinite.any():
            raise AHopError(f"{name} must not be infinite, got infinity in row {first + int(infinite.int().argmax())}")
        if unknown.any():
            got = f"NaN only in row {first + int(unknown.int().argmax())}"
            raise AHopError(f"{name} must have a known value in each row, got {got}")
        first += len(chunk)
    return check, max(chunk.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for chunk in chunks)


def scoring_dtype(dtype: torch.dtype, dim: int, largest: float) -> torch.dtype:
    """Returns the dtype in which patterns of ``dim`` values up to ``largest`` are scored: their own, uint8 in float32.

    It is float32 if sums of their squares overflow or underflow in float16. Other dtypes must hold these sums.
    """
    if not dtype.is_floating_point:
        return torch.float32
    for each in (dtype, accumulation_dtype(dtype)):
        limits = torch.finfo(each)
        if not largest or (
            limits.tiny <= 2 * dim * largest * largest <= limits.max and largest <= torch.finfo(dtype).max
        ):
            return each
    rule = f"patterns must be in {dtype}, and their squares in {accumulation_dtype(dtype)}"
    raise AHopError(f"{rule}, got values up to {largest:.3g}: multiply them by a constant")


def as_patterns(patterns: Any, columns: Sequence[str] | None = None) -> tuple[Tensor, tuple[int, ...]]:
    """Returns patterns ``(N, d)``, and the shape of one as it was given: three or four axes mean images.

    ``columns`` are the names of the columns of stored patterns, see :func:`as_tensor`.
    """
    given = as_tensor("patterns", patterns, columns=columns).detach()
    check_values("patterns", given)
    if not 2 <= given.ndim <= 4 or 0 in given.shape:
        rule = "patterns must be (N, d), or images (N, H, W) or (N, C, H, W), with N and d at least 1"
        raise AHopError(f"{rule}, got {describe(given)}: flatten other patterns")
    return given.flatten(1), tuple(given.shape[1:])


def nested(places: Any, names: Sequence[Any]) -> Any:
    """Replaces each index in nested lists by its name."""
    return [nested(each, names) for each in places] if isinstance(places, list) else names[places]


def converted(rows: Tensor, stored: Tensor, name: str = "patterns") -> Tensor:
    """Returns new patterns in the dtype and on the device of those stored; raises if a value does not fit."""
    if stored.is_floating_point() or rows.dtype == stored.dtype:
        return rows.to(stored)
    whole = rows.round().clamp(0, 255).to(stored.dtype)
    if not torch.equal(whole.to(rows.dtype), rows):
        raise AHopError(f"{name} must be integers from 0 to 255, as those stored, got {describe(rows)} of others")
    return whole.to(stored.device)


def text_tensor(value: Any) -> Tensor:
    """Returns a value of JSON as UTF-8, so that state dicts hold tensors alone."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def text_value(name: str, tensor: Any) -> Any:
    """Returns the value that :func:`text_tensor` encoded."""
    try:
        return json.loads(bytes(tensor.to("cpu", torch.uint8).numpy(force=True)).decode())
    except (AttributeError, UnicodeDecodeError, ValueError) as error:
        raise AHopError(f"{name} must be JSON in UTF-8, got {type(tensor).__name__} of other bytes") from error


def belongings(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns labels, ids and names of columns from a state dict or a file, as arguments of :func:`make_stored`."""
    texts = ((key, tensors.get(key)) for key in ("names", "ids", "columns"))
    names, ids, columns = (None if text is None else text_value(prefix + key, text) for key, text in texts)
    for key, value in (("names", names), ("columns", columns)):
        words = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if value is not None and (not words or len(set(value)) < len(value)):
            raise AHopError(f"{prefix}{key} must be different strings, got {value!r}")
    labels: Any = tensors.get("labels")
    if labels is not None and names is not None:
        by_place = dict(enumerate(names))  # a negative place is no key
        try:
            labels = [by_place[place] for place in labels.tolist()]
        except (AttributeError, KeyError, TypeError):
            raise AHopError(f"{prefix}labels must be indices of the names of classes, got others") from None
    return {"labels": labels, "ids": ids, "columns": None if columns is None else tuple(columns)}
