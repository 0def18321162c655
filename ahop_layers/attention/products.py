"""Matrix products of queries and keys, as the functions of PyTorch that compute them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SUMS_WITH_PRODUCT = (torch.baddbmm, Tensor.baddbmm)
PRODUCTS = (*MATRIX_PRODUCTS, *SUMS_WITH_PRODUCT, torch.einsum)


class Product(NamedTuple):
    """A call that multiplies queries ``(..., L, d)`` and keys ``(..., S, d)``."""

    query: Tensor
    key: Tensor
    finish: Callable[[Tensor], Tensor]  # turns the scores (..., L, S) into the result of the call


def read_product(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Product | None:
    """Reads the call of a function of :data:`PRODUCTS` as a product of queries and keys; None if it is none."""
    if func is torch.einsum:
        return _read_einsum(*args)
    values = [*args, *(value for value in keywords.values() if isinstance(value, Tensor))]
    if func in SUMS_WITH_PRODUCT:
        added, left, right = values[:3]
        beta, alpha = keywords.get("beta", 1), keywords.get("alpha", 1)
        # With beta 0, values of the first operand are ignored, even NaN.
        return Product(left, right.mT, lambda scores: scores * alpha + (added * beta if beta else 0))
    left, right = values[:2]
    if left.ndim < 3 or right.ndim < 3:
        return None
    return Product(left, right.mT, lambda scores: scores)


def _read_einsum(equation: Any, *operands: Any) -> Product | None:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(tensors) != 2:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    contracted = [axis for axis in left if axis in right and axis not in output]
    batch = [axis for axis in output if axis in left and axis in right]
    rows, columns = [axis for axis in left if axis not in right], [axis for axis in right if axis not in left]
    if not batch or not len(rows) == len(columns) == len(contracted) == 1:
        return None
    query = tensors[0].permute([left.index(axis) for axis in (*batch, *rows, *contracted)])
    key = tensors[1].permute([right.index(axis) for axis in (*batch, *columns, *contracted)])
    order = [*batch, *rows, *columns]
    return Product(query, key, lambda scores: scores.permute([order.index(axis) for axis in output]))
