"""The exception class of the package and the checks that raise it."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn


class AHopError(ValueError):
    """Raised for a bad argument; the message says what was expected and what was given.

    >>> import torch, ahop_layers as ah
    >>> try:
    ...     ah.footprint(torch.zeros(2, 3), torch.zeros(2, 4))
    ... except ah.AHopError as error:
    ...     print(error)
    query and key must have the same last dimension d, got query (2, 3) and key (2, 4)
    """


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of queries, keys, patterns and weights


def describe(tensor: Tensor) -> str:
    """Returns the shape of a tensor for an error message, such as ``(2, 3)``."""
    return str(tuple(tensor.shape))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise AHopError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_callable(**values: object) -> None:
    """Raises unless every value can be called."""
    for name, value in values.items():
        if not callable(value):
            raise AHopError(f"{name} must be a module or a function, got {value!r}")


def check_sizes(**sizes: object) -> None:
    """Raises unless every size is an integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int | Integral) or isinstance(size, bool) or size < 1:
            raise AHopError(f"{name} must be an integer of at least 1, got {size!r}")


def check_given_sizes(**sizes: object) -> None:
    """Raises unless every size is None or an integer of at least 1."""
    check_sizes(**{name: size for name, size in sizes.items() if size is not None})


def check_seed(**seeds: object) -> None:
    """Raises unless every seed is an integer of 64 bits; NumPy's integers are accepted."""
    for name, seed in seeds.items():
        if not isinstance(seed, int | Integral) or isinstance(seed, bool) or not -(2**63) <= int(seed) < 2**64:
            raise AHopError(f"{name} must be an integer of 64 bits, got {seed!r}")


def check_floating(**tensors: object) -> None:
    """Raises unless every argument is a floating-point tensor of a supported dtype."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AHopError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            supported = "dtype float16, bfloat16, float32 or float64"
            kind = supported if tensor.is_floating_point() else "a floating-point dtype"
            raise AHopError(f"{name} must have {kind}, got {tensor.dtype}")


def check_dtype(pattern: Tensor, weight: Tensor | None) -> None:
    """Raises unless patterns have the dtype of a weight of their layer, or autocast converts them."""
    if weight is not None and pattern.dtype != weight.dtype and not torch.is_autocast_enabled(pattern.device.type):
        rule = f"patterns must have the dtype of the layer, {weight.dtype}"
        raise AHopError(f"{rule}, got {pattern.dtype}: convert them, or the layer by layer.to(...)")


def check_module(**modules: object) -> None:
    """Raises unless every argument is an ``nn.Module``."""
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise AHopError(f"{name} must be a module, got {type(module).__name__}")


def check_same_device(**tensors: Any) -> None:
    """Raises unless all tensors, or other objects with a device, are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise AHopError(f"all tensors must be on one device, got {got}")


def check_pair(query: Tensor, key: Tensor) -> None:
    """Raises unless ``query (..., L, d)`` and ``key (..., S, d)`` have the same d and are on one device."""
    check_floating(query=query, key=key)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.ndim < 2:
            raise AHopError(f"{name} must have at least 2 dimensions (..., rows, d), got {describe(tensor)}")
    # Format the message only when raising: under compilation a size may be a symbol that cannot be formatted.
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        rule = "have the same last dimension d" if query.shape[-1] != key.shape[-1] else "have a last dimension d >= 1"
        raise AHopError(f"query and key must {rule}, got query {describe(query)} and key {describe(key)}")
    check_same_device(query=query, key=key)


def divisors(number: int) -> str:
    """Lists the divisors of a number for an error message, such as ``1, 2, 3, 6``."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def check_divides(blocks: int, d: int) -> None:
    """Raises unless ``d`` dimensions can be cut into ``blocks`` blocks of equal width."""
    if d % blocks:
        raise AHopError(f"blocks must divide d = {d}: expected one of {divisors(d)}, got {blocks}")


def check_block_numbers(blocks: Tensor, d: int) -> int:
    """Returns the number n of blocks; raises unless ``blocks (d,)`` has all numbers from 0 to n - 1."""
    if blocks.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise AHopError(f"blocks must have an integer dtype, got {blocks.dtype}")
    if blocks.shape != (d,) or d == 0:
        raise AHopError(f"blocks must name the block of each of the {d} dimensions, got shape {describe(blocks)}")
    used = sorted(set(blocks.tolist()))
    if used != list(range(len(used))):
        got = ", ".join(map(str, used[:8])) + (", ..." if len(used) > 8 else "")
        raise AHopError(f"blocks must use every number from 0 to n - 1, got the numbers {got}")
    return len(used)


def broadcast_batch(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Returns the broadcast batch shape, or raises."""
    longest: Sequence[int] = ()
    for shape in shapes:
        longest = shape if len(shape) > len(longest) else longest
    if all(tuple(shape) == tuple(longest[len(longest) - len(shape) :]) for shape in shapes):
        return tuple(longest)  # the common case, ten times faster than torch.broadcast_shapes
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        got = " and ".join(str(tuple(shape)) for shape in shapes)
        raise AHopError(f"the batch dimensions must broadcast against each other, got {got}") from None


_NUMBERS: dict[str, Callable[[float], bool]] = {
    "a positive number": lambda value: value > 0,
    "a number of at least 0": lambda value: value >= 0,
    "a number between 0 and 1": lambda value: 0 <= value <= 1,
    "a finite number": lambda _: True,
    "a number of at least 0 and below 1": lambda value: 0 <= value < 1,
}


def check_numbers(rule: str, **numbers: object) -> None:
    """Raises unless every number is finite and satisfies ``rule``, a key of ``_NUMBERS``. A bool is no number.

    A ``dropout`` may be one: projects with hflayers have ``dropout=False``.
    """
    for name, value in numbers.items():
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        no_number = isinstance(value, str | bytes) or (is_bool and name != "dropout")
        try:
            number = float("nan") if no_number else float(value)  # type: ignore[arg-type]
        except (OverflowError, RuntimeError, TypeError, ValueError):  # such as None, or an array of several numbers
            number = float("nan")
        if not (abs(number) < float("inf") and _NUMBERS[rule](number)):
            raise AHopError(f"{name} must be {rule}, got {value!r}")
