"""CallAttention: makes a module adaptive whose ``forward`` computes attention, whatever its class.

The module's own ``forward`` runs unchanged, under a mode that is active during this call and on this thread only. The
mode computes ``scaled_dot_product_attention``, or the product of queries and keys of attention that is written by hand,
with the learned similarity.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ahop_layers.association import Padded, associate
from ahop_layers.attention.adaptive import Adaptive, attend_mask
from ahop_layers.errors import AHopError, describe
from ahop_layers.separation import Separation
from ahop_layers.similarity.associator import SimilarityList

SDPA = functional.scaled_dot_product_attention
MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SUMS_WITH_PRODUCT = (torch.baddbmm, Tensor.baddbmm)
PRODUCTS = (*MATRIX_PRODUCTS, *SUMS_WITH_PRODUCT, torch.einsum)


class Site(NamedTuple):
    """Where a module attends: a call of ``scaled_dot_product_attention``, or a product of queries and keys."""

    heads: int | None  # None if one set of weights serves the whole call
    dim: int  # dimension of one head
    product: int | None = None  # its index among all products of one forward; None for the function

    @property
    def shape(self) -> tuple[int | None, int]:
        """The number and dimension of the heads."""
        return self.heads, self.dim

    def fits(self, query: Tensor) -> bool:
        """Returns whether a query has the number and dimension of heads."""
        heads = self.heads is None or (query.ndim >= 4 and query.shape[-3] == self.heads)
        return heads and query.shape[-1] == self.dim

    def __str__(self) -> str:
        heads = "" if self.heads is None else f"{self.heads} heads of "
        call = "scaled_dot_product_attention" if self.product is None else f"the product {self.product}"
        return f"{call} with {heads}{self.dim} dimensions"


class CallAttention(Adaptive):
    """Adaptive form of any module that attends at known sites; sites with equal shapes of heads share a similarity."""

    _ahop_sites: tuple[Site, ...]
    _ahop_products: int | None  # number of products in one forward; None without attention written by hand

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Calls the original ``forward``; raises an AHopError if it attends at other sites than the known ones."""
        calls = _Calls(self)
        with calls:  # compilers do not know the result of entering it
            output = super().forward(*args, **keywords)
        calls.check()
        return output

    def similarity_of(self, site: Site) -> Any:
        """Returns the similarity of a site."""
        if not isinstance(self.similarity, SimilarityList):
            return self.similarity
        shapes = list(dict.fromkeys(each.shape for each in self._ahop_sites))
        return self.similarity[shapes.index(site.shape)]


class _Calls(TorchFunctionMode):
    """Attends with the similarities of a module during one call of its ``forward``."""

    def __init__(self, module: CallAttention) -> None:
        super().__init__()
        self.module, self.products = module, 0
        self.reached: list[Site] = []
        self.recording = _recording()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces the calls at the sites of the module, and makes all others."""
        kwargs = kwargs or {}
        module = self.module
        if func is SDPA:
            query = args[0] if args else kwargs["query"]
            site = self._reach(None, query, "scaled_dot_product_attention of a query")
            return similarity_attention(module.similarity_of(site), module.separation, *args, **kwargs)
        if module._ahop_products is not None and func in PRODUCTS:
            number, self.products = self.products, self.products + 1
            if any(site.product == number for site in module._ahop_sites):
                product = read_product(func, args, kwargs)
                if product is None:
                    raise self._unexpected(f"another operation in the product {number}")
                site = self._reach(number, product.query, f"in the product {number} a query")
                return product.finish(module.similarity_of(site)(product.query, product.key))
        # Compilers cannot trace the method, which calls super().
        return torch.unflatten(*args, **kwargs) if func is Tensor.unflatten else func(*args, **kwargs)

    def _reach(self, product: int | None, query: Tensor, what: str) -> Site:
        """Returns the site that a call belongs to, and records that it was reached."""
        site = next((each for each in self.module._ahop_sites if each.product == product and each.fits(query)), None)
        if site is None:
            raise self._unexpected(f"{what} {describe(query)}")
        # This mode is not active when a checkpoint inside the module recomputes the call.
        if self.recording is not None and _recording() != self.recording:
            raise AHopError(
                f"{type(self.module).__name__} uses gradient checkpointing inside its forward, which recomputes its"
                " attention without the similarity: turn it off, and apply the checkpoint to the whole module"
            )
        self.reached.append(site)
        return site

    def check(self) -> None:
        """Raises unless every site was reached."""
        for site in self.module._ahop_sites:
            if site not in self.reached:
                raise self._unexpected(f"a forward pass without {site}")
        expected = self.module._ahop_products
        if expected is not None and self.products != expected:
            raise self._unexpected(f"{self.products} products in one forward pass instead of {expected}")

    def _unexpected(self, got: str) -> AHopError:
        """Returns the error of a call that does not match the sites."""
        expected = ", ".join(map(str, self.module._ahop_sites))
        return AHopError(
            f"{type(self.module).__name__} was adapted for calls of {expected}, got {got}; call revert_, and adapt_"
            " with an example that attends as this call does"
        )


def _recording() -> str | None:
    """Returns how autograd records: a reentrant checkpoint disables it, the other one hooks into saved tensors."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    try:
        with disable_saved_tensors_hooks("there are hooks"):  # raised on entry
            return "plain"
    except RuntimeError:
        return "with hooks"


def similarity_attention(
    similarity: nn.Module, separation: Separation, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Computes ``scaled_dot_product_attention`` with a similarity and a separation. Fully masked queries read zeros."""
    if query.is_nested or key.is_nested:
        raise AHopError("query and key must not be nested in an adapted module, got nested tensors")
    lead, scaling = query.shape[:-2], query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, attn_mask = (_with_four_axes(x, lead) for x in (query, key, value, attn_mask))
    stored = Padded(key, value, attend_mask(attn_mask, is_causal))
    output, _ = associate(
        query, stored, score=similarity, separation=separation, scaling=scaling, dropout=dropout_p, need_weights=False
    )
    return output if len(lead) == 2 else output.reshape(*lead, *output.shape[-2:])


def _with_four_axes(x: Any, lead: torch.Size) -> Any:
    """Arranges ``(*lead, L, d)``, or a mask, as ``(N, H, L, d)``; a single leading axis is a batch."""
    if x is None or len(lead) == 2:
        return x
    if len(lead) == 0:
        return x[None, None]
    if x.ndim < 3:
        return x
    return x.unsqueeze(1) if len(lead) == 1 else x.expand(*lead[:-1], *x.shape[-3:]).flatten(0, len(lead) - 2)


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
