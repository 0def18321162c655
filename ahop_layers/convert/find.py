"""Finds the attention modules of a model: by the table of converters, and by an example call."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ahop_layers.attention.call import CallAttention, Site
from ahop_layers.convert.class_swap import swap_class_
from ahop_layers.convert.discover import Attending, discover
from ahop_layers.convert.registry import ADAPTIVE_LAYERS, Converter, converter_for, full_name
from ahop_layers.similarity.adaptive import SimilarityOptions

# Attention modules by name, each with its converter or the reason why it is not adapted.
Found = dict[str, tuple[nn.Module, Converter | str]]
# Why a module that is only named attention is not adapted.
NOT_SEEN = "it calls neither scaled_dot_product_attention nor a softmax of products of queries and keys"
_RESERVED = ("similarity", "separation", "associate", "head_shape", "head_shapes", "make_adaptive", "similarity_of")
_FUSED = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "memory_efficient_attention", "flash_attn_func"}
_BY_HAND = {"matmul", "bmm", "baddbmm", "einsum", "transpose", "mT"}  # the operator @ has no name


def find_attention(model: nn.Module, example: Any, by_hand: bool, copies: Mapping[nn.Module, Converter]) -> Found:
    """Returns the attention modules of a model in definition order, without the submodules of those to adapt.

    ``example`` and ``by_hand`` are those of ``adapt_``; ``copies`` are the converters of modules whose class is not in
    the table.
    """
    seen = None if example is None else discover(model, example)
    attending = {module: call for module, call in (seen or {}).items() if call is not None}
    dtype_source = next((p for p in model.parameters() if p.is_floating_point()), None)
    visited: set[nn.Module] = set()

    def known(module: nn.Module) -> Converter | str | None:
        return copies.get(module) or converter_for(module)

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Converter | str]]:
        if module in visited:
            return
        visited.add(module)
        found = known(module)
        if module in attending and not isinstance(found, Converter) and not isinstance(module, ADAPTIVE_LAYERS):
            parts = ((name, part) for name, part in module.named_modules() if name)
            inside = next((name for name, part in parts if part in attending or known(part)), None)
            found = _call_converter(module, attending[module], by_hand, inside, dtype_source)
        if isinstance(found, Converter):
            yield name, module, found
            return
        prefix = f"{name}." if name else ""
        children = [each for part, child in module.named_children() for each in visit(prefix + part, child)]
        if found is None and not children:  # else a module with the name of attention is a wrapper around another
            called = seen is not None and module in seen
            named = re.search(r"(Attention|Attn)(?!.*(Output|Mask))", type(module).__name__)
            if named or (not called and _is_written_as_attention(module)):
                unknown = f"no converter for {full_name(type(module))}; pass example=, or see register_converter"
                found = unknown if seen is None else NOT_SEEN if called else "the example does not call it"
        if found is not None:
            yield name, module, found
        yield from children

    return {name: (module, found) for name, module, found in visit("", model)}


def _call_converter(
    module: nn.Module, found: Attending, by_hand: bool, inside: str | None, dtype_source: Tensor | None
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

    return call_converter(found.sites, found.products, dtype_source)


def call_converter(sites: Sequence[Sequence[Any]], products: int | None, dtype_source: Tensor | None) -> Converter:
    """Returns the converter of a module that attends at known sites; the arguments are those of ``CallAttention``."""
    places = tuple(Site(*site) for site in sites)

    def convert(module: Any, options: SimilarityOptions) -> None:
        swap_class_(module, CallAttention, "similarity", "separation", "_ahop_sites", "_ahop_products")
        module._ahop_sites, module._ahop_products = places, products
        module.make_adaptive(options, dtype_source)

    shapes = list(dict.fromkeys(site.shape for site in places))
    return Converter(convert, lambda _: shapes, "scaled_dot_product_attention" if products is None else "by hand")


def _is_written_as_attention(module: nn.Module) -> bool:
    """Returns whether the ``forward`` of a module names a function of attention, or products and a softmax."""
    names = set(getattr(getattr(type(module).forward, "__code__", None), "co_names", ()))
    return bool(names & _FUSED or ("softmax" in names and names & _BY_HAND))
