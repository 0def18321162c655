"""Arrays: data, labels and ids as people have them, from and to tensors, and the largest of many scores."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.onnx import is_onnx_export

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = TypeVar("Array", Tensor, "NDArray[Any]")
"""A tensor or a NumPy array: methods return the kind of array that they are called with."""

LARGEST_EXACT = 2**24  # float32 holds all integers up to this one
RANKED_SCORES = 2**22  # number of scores that are ranked at once: each ranking has a fixed cost


def as_tensor(name: str, x: Any, device: torch.device | None = None, columns: Sequence[str] | None = None) -> Tensor:
    """Returns a tensor, an array, a data frame or a list of numbers as a tensor of floating-point numbers or uint8.

    All but tensors are moved to ``device``. Integers become floating-point numbers, except uint8: float64 if one of
    them is beyond 2**24, where float32 is not exact. The columns of a data frame are arranged as ``columns``, if these
    are given, and must have their names.
    """
    order = _column_order(name, x, columns)
    given = from_numpy(x, device)
    if not isinstance(given, Tensor):
        try:
            given = torch.as_tensor(given, device=device)
        except (RuntimeError, TypeError, ValueError):
            kind = _text_column(x) or getattr(x, "dtype", type(x).__name__)
            raise AHopError(f"{name} must be a tensor, an array or a list of numbers, got {kind}") from None
    given = given if order is None else given[..., order]
    if given.is_complex() or given.is_quantized or given.is_nested or given.layout is not torch.strided:
        kind = "nested" if given.is_nested else f"{given.dtype}, {given.layout}"
        raise AHopError(f"{name} must be real numbers in a dense tensor, got {kind}")
    if given.is_floating_point():
        check_floating(**{name: given})
        return given
    return given if given.dtype == torch.uint8 else _as_floats(given)


def _as_floats(x: Tensor) -> Tensor:
    """Returns integers or bools in the default dtype, or in float64 if a value is beyond what float32 holds exactly."""
    unread = torch.compiler.is_compiling() or x.is_meta or x.device.type == "mps"  # which has no float64
    if x.dtype != torch.bool and torch.iinfo(x.dtype).max > LARGEST_EXACT and not unread:
        exact = x.double()
        if bool((exact.abs() > LARGEST_EXACT).any()):
            return exact
    return x.to(torch.get_default_dtype())


def check_values(name: str, x: Tensor) -> None:
    """Raises unless a tensor is dense and has values."""
    if x.is_meta or x.is_quantized or x.layout is not torch.strided:
        raise AHopError(f"{name} must be a dense tensor with values, got {x.dtype}, {x.layout} on {x.device}")


def is_integer(x: Tensor) -> bool:
    """Returns whether a tensor has an integer dtype."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def as_indices(index: Any, count: int, device: torch.device, shape: tuple[int, ...] | None = None) -> Tensor:
    """Returns indices of ``count`` patterns as int64 on ``device``, expanded to a ``shape`` if one is given."""
    rule = f"index must be integers from 0 to {count - 1}" + ("" if shape is None else ", one for each query")
    try:
        place = torch.as_tensor(from_numpy(index), device=device)
        place = place if shape is None else place.expand(shape)
    except (RuntimeError, TypeError, ValueError):
        raise AHopError(f"{rule}, got {type(index).__name__}") from None
    if not is_integer(place):
        raise AHopError(f"{rule}, got {place.dtype}")
    indices = place.long()  # of unsigned dtypes, PyTorch compares only uint8
    if not bool(((indices >= 0) & (indices < count)).all()):
        raise AHopError(f"{rule}, got {place.dtype} from {int(indices.min())} to {int(indices.max())}")
    return indices


def from_numpy(x: Any, device: torch.device | None = None) -> Any:
    """Returns a NumPy array of numbers, or a data frame, as a tensor on ``device``, and anything else unchanged.

    What a masked array masks is NaN.
    """
    numpy = sys.modules.get("numpy")  # not a dependency: where it is not imported, nobody has an array
    if hasattr(x, "to_numpy"):
        pandas, frame, x = sys.modules.get("pandas"), x, x.to_numpy()
        # Dtypes such as Int64 have their own unknown values.
        if pandas and x.dtype == object and isinstance(frame, pandas.DataFrame) and not _text_column(frame):
            x = frame.to_numpy(dtype="float64", na_value=nan)
    if numpy is None or not isinstance(x, numpy.ndarray) or x.dtype.kind not in "biufc":
        return x
    if numpy.ma.is_masked(x):
        values, mask = (from_numpy(each, device) for each in (x.data, numpy.ma.getmaskarray(x)))
        return (values if values.is_floating_point() else _as_floats(values)).masked_fill(mask, nan)
    if x.dtype.kind == "f" and x.dtype.itemsize > 8:
        x = x.astype(numpy.float64)
    # Copies arrays that are read-only or have negative strides or another byte order, which PyTorch does not support.
    x = numpy.require(x.astype(x.dtype.newbyteorder("="), copy=False), requirements=["C", "W"])
    return torch.from_numpy(x).to(device)


def column_names(name: str, x: Any) -> tuple[str, ...] | None:
    """Returns the names of the columns of a data frame, or of the values of one of its rows; None for other data."""
    if not hasattr(x, "to_numpy"):
        return None
    names = getattr(x, "columns", None)
    if names is None:  # a row of pandas has the names of its values as its index
        index = getattr(x, "index", ())
        names = () if callable(index) or not all(isinstance(each, str) for each in index) else index
    found = tuple(map(str, names))
    if len(set(found)) < len(found):
        twice = Counter(found).most_common(1)[0][0]
        raise AHopError(f"the columns of {name} must differ, got {twice!r} more than once")
    return found or None


def _column_order(name: str, x: Any, columns: Sequence[str] | None) -> list[int] | None:
    """Returns the place of each of the ``columns`` in a data frame, or raises; None if either has no names."""
    named = None if columns is None else column_names(name, x)
    if columns is None or named is None:
        return None
    place = {each: at for at, each in enumerate(named)}
    for differs, got in ((set(columns) - {*named}, "no column"), ({*named} - set(columns), "a surplus column")):
        if differs:
            raise AHopError(f"{name} must have the columns of the patterns, got {got} {min(differs)!r}")
    return [place[each] for each in columns]


def _text_column(x: Any) -> str | None:
    """Returns the dtype and the name of the first column of a data frame that has no numbers."""
    for name in x.columns if hasattr(x, "to_numpy") and hasattr(x, "columns") else ():
        dtype = getattr(x[name], "dtype", None)  # columns of one name have none
        if (getattr(dtype, "kind", None) or x[name].to_numpy().dtype.kind) not in "biufc":
            return f"{dtype or 'text'} in the column {name!r}"
    return None


def as_given(x: Array, result: Any, columns: Sequence[str] | None = None) -> Array:
    """Returns ``result`` as a NumPy array if ``x`` is one, or a data frame. NumPy has no bfloat16: it becomes float32.

    Nested lists of strings become arrays too. For tensors and lists, the result stays what it is. If the values of a
    result belong to ``columns``, they are arranged as the columns of a data frame ``x``.
    """
    given: Any = result
    order = _column_order("x", x, columns)
    result = result if order is None else result[..., torch.tensor(order).argsort()]
    if not isinstance(x, (Tensor, list, tuple)) and isinstance(result, Tensor):
        given = (result.float() if result.dtype == torch.bfloat16 else result).detach().cpu().numpy()
    elif not isinstance(x, (Tensor, list, tuple)):
        numpy = sys.modules["numpy"]
        given, as_objects = numpy.array(result), numpy.array(result, dtype=object)
        given = given if given.tolist() == as_objects.tolist() else as_objects  # integers beside strings
    return given


class Classes(NamedTuple):
    """The distinct labels, ascending; the class of each pattern ``(N,)``, from 0; the count of each label."""

    labels: Tensor
    of_pattern: Tensor
    counts: Tensor


Ids = tuple[str | int, ...]
"""The name of each pattern."""


def as_labels(
    labels: Any, count: int, device: torch.device | None = None, name: str = "labels", each: str = "pattern",
    names: tuple[str, ...] | None = (),
) -> tuple[Tensor, tuple[str, ...] | None]:  # fmt: skip
    """Returns a copy of ``labels (count,)`` as int64 on ``device``, and the names of the classes, if they have any.

    Errors call the labels ``name``, and what each of them belongs to ``each``. If they are strings, a label is an index
    of the names. ``names`` has the names so far, to which others are appended. None requires integers.
    """
    rule = f"one for each {each}"
    given = from_numpy(labels)
    given, words = (torch.tensor(given) if isinstance(given, int) else given), False
    if not isinstance(given, Tensor):
        listed = _listed(name, given)
        words = bool(listed) and all(isinstance(word, str) for word in listed)
        if words and names is None:
            raise AHopError(f"{name} must be integers, as those stored, got strings")
        if words:
            names = (*(names or ()), *sorted({*listed} - {*(names or ())}))
            codes = {word: code for code, word in enumerate(names)}
            listed = [codes[word] for word in listed]
        try:
            given = torch.as_tensor(listed)
        except (RuntimeError, TypeError, ValueError):
            wide = next((each for each in listed if isinstance(each, int) and each.bit_length() > 63), None)
            expected = "integers or strings (N,)" if wide is None else "in the range of int64"
            raise AHopError(f"{name} must be {expected}, {rule}, got {wide or 'others'}") from None
    check_values(name, given)
    if not is_integer(given):
        raise AHopError(f"{name} must be integers or strings (N,), {rule}, got {given.dtype}")
    if given.shape != (count,):
        raise AHopError(f"{name} must be (N,) = ({count},), {rule}, got {describe(given)}")
    if names and not words:
        raise AHopError(f"{name} must be strings, as those stored, got integers")
    stored = given.detach().to(device or given.device, torch.int64, copy=True)
    if given.dtype == torch.uint64 and bool((stored < 0).any()):
        raise AHopError(f"{name} must be in the range of int64, {rule}, got {int(stored[stored < 0][0]) + 2**64}")
    return stored, names or None


def as_ids(ids: Any, count: int | None = None) -> Ids:
    """Returns ``count`` different ids, strings or integers, as a tuple."""
    given = from_numpy(ids)
    listed = _listed("ids", given)
    wrong = [type(each).__name__ for each in listed if not isinstance(each, (str, int)) or isinstance(each, bool)]
    if wrong:
        raise AHopError(f"ids must be strings or integers, one for each pattern, got {wrong[0]}")
    if count is not None and len(listed) != count:
        raise AHopError(f"ids must be one for each of {count} patterns, got {len(listed)}")
    if len(set(listed)) < len(listed):
        raise AHopError(f"ids must differ, got {Counter(listed).most_common(1)[0][0]!r} more than once")
    return tuple(listed)


def _listed(name: str, values: Any) -> list[Any]:
    """Returns a sequence, a vector, or an array of strings, as a list. Strings must be valid Unicode, as JSON needs."""
    if isinstance(values, Tensor):
        check_values(name, values)
        values = values.tolist() if values.ndim == 1 else values
    unordered = isinstance(values, (str, bytes, set, frozenset, dict)) or not hasattr(values, "__len__")
    if unordered or getattr(values, "ndim", 1) != 1:
        raise AHopError(f"{name} must be a sequence, got {type(values).__name__}")
    listed = [each.item() if hasattr(each, "item") else each for each in values]
    try:
        "".join(each for each in listed if isinstance(each, str)).encode()
    except UnicodeEncodeError as error:
        raise AHopError(f"{name} must be valid Unicode, got the surrogate {error.object[error.start]!r}") from None
    return listed


def class_logsumexp(chunks: Iterable[Tensor], of_pattern: Tensor, n_classes: int) -> Tensor:
    """Returns the log-sum-exp of the scores of each class ``(L, n_classes)``, -inf for a class without a pattern.

    ``chunks`` are the scores ``(L, n)``, in at least float32, of consecutive chunks of patterns of the classes
    ``of_pattern (N,)``.
    """
    totals: list[Tensor] = []
    start = 0
    for scores in chunks:
        index, limits = of_pattern[start : start + scores.shape[-1]], torch.finfo(scores.dtype)
        with torch.no_grad():  # the result does not depend on the shift
            lowest = scores.new_full((len(scores), n_classes), -torch.inf)
            shift = lowest.scatter_reduce(-1, index.expand_as(scores), scores, "amax").clamp(limits.min, limits.max)
        exponentials = (scores - shift[:, index]).exp()
        totals.append(torch.zeros_like(shift).index_add(-1, index, exponentials).log() + shift)
        totals, start = [torch.logaddexp(*totals)] if len(totals) == 2 else totals, start + len(index)
    return totals[0]


def top_k(chunks: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` largest scores of each row, best first, and their indices: ``(L, k)`` each.

    ``chunks`` are the scores ``(L, n)`` of consecutive chunks of at least k patterns. Equal scores are ordered by
    index, as in a stable sort of all scores.
    """
    if is_onnx_export():  # TopK of ONNX orders equal scores by index
        found = torch.cat(list(chunks), -1).topk(k, -1)
        return found.values, found.indices
    best: list[tuple[Tensor, Tensor]] = []
    start = 0
    for scores in _concatenated(chunks):
        values, indices = _top_of_chunk(scores, min(k, scores.shape[-1]))
        best.append((values, indices + start))
        start += scores.shape[-1]
        best = [merge(best, k)]
    return best[0]


def merge(parts: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` largest scores and their indices out of several results ``(L, K)`` of :func:`top_k`.

    All indices of a part are smaller than all indices of the next. Within a part, equal scores are ordered by index.
    """
    values, indices = (torch.cat(each, -1) for each in zip(*parts, strict=True))
    values, order = values.sort(dim=-1, descending=True, stable=True)  # keeps the order of equal scores
    return values[..., :k], indices.gather(-1, order[..., :k])


def _concatenated(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Concatenates consecutive chunks ``(L, n)`` up to RANKED_SCORES scores."""
    held: list[Tensor] = []
    count = 0
    for chunk in chunks:
        if held and count + chunk.numel() > RANKED_SCORES:
            yield torch.cat(held, -1)
            held, count = [], 0
        held.append(chunk)
        count += chunk.numel()
    if held:
        yield torch.cat(held, -1)


def _top_of_chunk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``scores (L, n)`` and their indices, in the order of the indices."""
    if k == 1:
        values, indices = scores.max(-1, keepdim=True)  # the first maximum
        return values, indices
    size = scores.shape[-1]
    largest = scores.topk(min(k + 1, size), -1)
    # topk chooses arbitrarily among scores that equal the k-th largest. NaN, which is largest, equals nothing.
    unique = largest.values[..., -1] < largest.values[..., -2] if k < size else scores.new_ones(1)
    indices, threshold = largest.indices[..., :k], largest.values[..., k - 1 : k]
    if torch.compiler.is_compiling() or not unique.all():  # a branch on values would break the graph
        # Ranks unique integers: first all scores above the k-th largest, then all that equal it, each by index.
        group = 1 + (scores <= threshold).int() - ((scores >= threshold) | scores.isnan()).int()
        rank = group.mul_(size).add_(torch.arange(size, dtype=torch.int32, device=scores.device))
        indices = rank.topk(k, -1, largest=False, sorted=False).values.long() % size
    indices = indices.sort(-1).values
    return scores.gather(-1, indices), indices
