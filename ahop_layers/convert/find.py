"""Finds the attention modules of a model: by the table of converters, and by an example call."""

import dis
import re
from collections.abc import Iterator
from functools import cache, partial
from types import CodeType
from typing import Any

from torch import Tensor, nn

from ahop_layers.attention.call import CallAttention
from ahop_layers.convert.class_swap import turn_into
from ahop_layers.convert.discover import Attending, discover
from ahop_layers.convert.registry import ADAPTIVE_LAYERS, Converter, converter_for, full_name
from ahop_layers.similarity import SimilarityOptions

Found = dict[str, tuple[nn.Module, Converter | str]]
"""Attention modules by name, each with its converter or the reason why it is not adapted."""

NOT_SEEN = "it calls neither scaled_dot_product_attention nor a softmax of products of queries and keys"
"""Why a module that is only named attention is not adapted."""

_RESERVED = ("similarity", "separation", "associate", "head_shape", "head_shapes", "make_adaptive", "similarity_of")
_FUSED = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "memory_efficient_attention", "flash_attn_func"}
_BY_HAND = {"matmul", "bmm", "baddbmm", "einsum", "@"}


def find_attention(model: nn.Module, example: Any = None, by_hand: bool = False) -> Found:
    """Returns the attention modules of a model in definition order, without the submodules of those to adapt.

    Args:
        model: any module.
        example: an input for :func:`~ahop_layers.convert.discover.discover`, or None to use the table only.
        by_hand: whether to adapt attention that does not call ``scaled_dot_product_attention``.
    """
    seen = None if example is None else discover(model, example)
    attending = {module: call for module, call in (seen or {}).items() if call is not None}
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    visited: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Converter | str]]:
        if id(module) in visited:
            return
        visited.add(id(module))
        kind: Any = type(module)
        found = converter_for(module)
        if module in attending and not isinstance(found, Converter) and not isinstance(module, ADAPTIVE_LAYERS):
            parts = ((name, part) for name, part in module.named_modules() if name)
            inside = next((name for name, part in parts if part in attending or converter_for(part)), None)
            found = _call_converter(module, attending[module], by_hand, inside, like)
        if isinstance(found, Converter):
            yield name, module, found
            return
        children = [
            each for part, child in module.named_children() for each in visit(f"{name}.{part}" if name else part, child)
        ]
        if found is None and not children:  # else a module with the name of attention is a wrapper around another
            called = seen is not None and module in seen
            if _is_named_attention(kind) or (not called and _is_written_as_attention(kind)):
                found = _not_reached(module, seen)
        if found is not None:
            yield name, module, found
        yield from children

    return {name: (module, found) for name, module, found in visit("", model)}


def _not_reached(module: nn.Module, seen: dict[nn.Module, Attending | None] | None) -> str:
    """Returns why a module that looks like attention is not adapted."""
    if seen is None:
        return f"no converter for {full_name(type(module))}; pass example=, or see register_converter"
    if module not in seen:
        return "the example does not call it"
    return NOT_SEEN


def _call_converter(
    module: nn.Module, found: Attending, by_hand: bool, inside: str | None, like: Tensor | None
) -> Converter | str:
    """Returns the converter of a module that attends in its own ``forward``, or why it cannot be adapted."""
    if found.reason is not None:
        return found.reason
    if found.products is not None and not by_hand:
        return "it computes scores by hand, without scaled_dot_product_attention; pass by_hand=True"
    if inside is not None:
        return f"it attends, and so does its submodule {inside}"
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    taken = next((name for name in _RESERVED if hasattr(module, name)), None)
    if taken is not None:
        return f"it has an attribute {taken} of its own"
    shapes = list(dict.fromkeys(site.shape for site in found.sites))
    how = "scaled_dot_product_attention" if found.products is None else "by hand"
    return Converter(partial(_adapt_call, found, like), lambda _: shapes, how)


def _adapt_call(found: Attending, like: Tensor | None, module: Any, options: SimilarityOptions) -> None:
    turn_into(module, CallAttention, "similarity", "separation", "_ahop_sites", "_ahop_parts", "_ahop_products")
    module._ahop_sites, module._ahop_products = found.sites, found.products
    module.make_adaptive(options, like)


def _is_named_attention(kind: Any) -> bool:
    return bool(re.search(r"(Attention|Attn)(?!.*(Output|Mask))", kind.__name__))


@cache
def _is_written_as_attention(kind: Any) -> bool:
    """Returns whether the ``forward`` of a class calls attention, or products and a softmax."""
    code = getattr(kind.forward, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    names = {*code.co_names, *(each.argrepr for each in dis.get_instructions(code))}
    return bool(names & _FUSED or ("softmax" in names and names & _BY_HAND))
