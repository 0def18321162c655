"""Finds the attention modules of a model: by the table of converters, and by one example call.

The call shows which modules attend in their own ``forward``, and where: a mode follows each product of two tensors to a
softmax, and from there to a product with values.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ahop_layers.attention.call import PRODUCTS, SDPA, CallAttention, Site, read_product
from ahop_layers.convert.class_swap import swap_class_
from ahop_layers.convert.registry import ADAPTIVE_LAYERS, Converter, converter_for, full_name
from ahop_layers.similarity.options import SimilarityOptions

# Reasons why a module is not adapted.
CHANNELS = "it attends over channels, so the dimension of its queries is the number of tokens"
OTHER_AXIS = "its softmax is not over the keys"
OTHER_SCORES = "the scores of its softmax are not products of queries and keys"
OPAQUE = "it calls multi_head_attention_forward, whose scores cannot be replaced"
NOT_SEEN = "it calls neither scaled_dot_product_attention nor a softmax of products of queries and keys"

_SOFTMAXES = (functional.softmax, torch.softmax, Tensor.softmax)
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head", "num_attn_heads")
_RESERVED = ("similarity", "separation", "associate", "head_shape", "make_adaptive", "add_parts",
             "similarity_of")  # fmt: skip
_FUSED = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "memory_efficient_attention", "flash_attn_func"}
_BY_HAND = {"matmul", "bmm", "baddbmm", "einsum", "transpose", "mT"}  # the operator @ has no name


def find_attention(
    model: nn.Module, example: Any, by_hand: bool, copies: Mapping[nn.Module, Converter]
) -> dict[str, tuple[nn.Module, Converter | str]]:
    """Returns the attention modules of a model in definition order, without the submodules of modules to adapt.

    Each has its converter, or the reason why it is not adapted. ``example`` and ``by_hand`` are arguments of
    ``adapt_``; ``copies`` are the converters of modules whose class is not in the table.
    """
    calls = {} if example is None else _call(model, example)
    dtype_source = next((p for p in model.parameters() if p.is_floating_point()), None)
    visited: set[nn.Module] = set()

    def known(module: nn.Module) -> Converter | str | None:
        return copies.get(module) or converter_for(module)

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Converter | str]]:
        if module in visited:
            return
        visited.add(module)
        found, call = known(module), calls.get(module)
        if call is not None and not isinstance(found, Converter) and not isinstance(module, ADAPTIVE_LAYERS):
            parts = ((name, part) for name, part in module.named_modules() if name)
            inside = next((name for name, part in parts if calls.get(part) or known(part)), None)
            found = _why_not(module, call, by_hand, inside) or _converter(call, dtype_source)
        if isinstance(found, Converter):
            yield name, module, found
            return
        prefix = f"{name}." if name else ""
        children = [each for part, child in module.named_children() for each in visit(prefix + part, child)]
        if found is None and not children:  # else a module with the name of attention is a wrapper around another
            named = re.search(r"(Attention|Attn)(?!.*(Output|Mask))", type(module).__name__)
            if named or (module not in calls and _is_written_as_attention(module)):
                unknown = f"no converter for {full_name(type(module))}; pass example=, or see register_converter"
                missed = NOT_SEEN if module in calls else "the example does not call it"
                found = unknown if example is None else missed
        if found is not None:
            yield name, module, found
        yield from children

    return {name: (module, found) for name, module, found in visit("", model)}


def _is_written_as_attention(module: nn.Module) -> bool:
    """Returns whether the ``forward`` of a module names a function of attention, or products and a softmax."""
    names = set(getattr(getattr(type(module).forward, "__code__", None), "co_names", ()))
    return bool(names & _FUSED or ("softmax" in names and names & _BY_HAND))


class _Attending(NamedTuple):
    """How a module attends in one call of its ``forward``."""

    sites: tuple[Site, ...]  # calls that can be adapted, in their order
    products: int | None  # number of products, or None without attention written by hand
    reason: str | None = None  # why the module cannot be adapted


def _why_not(module: nn.Module, call: _Attending, by_hand: bool, inside: str | None) -> str | None:
    """Returns why a module that attends in its own ``forward`` cannot be adapted, or None."""
    taken = next((name for name in _RESERVED if hasattr(module, name)), None)
    if call.reason is not None:
        return call.reason
    if call.products is not None and not by_hand:
        return "it computes scores by hand, without scaled_dot_product_attention; pass by_hand=True"
    if inside is not None:
        return f"it attends, and so does its submodule {inside}"
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    return None if taken is None else f"it has an attribute {taken} of its own"


def _converter(call: _Attending, dtype_source: Tensor | None) -> Converter:
    """Returns the converter of a module that attends at known sites."""

    def convert(module: Any, options: SimilarityOptions) -> None:
        swap_class_(module, CallAttention, "similarity", "separation", "_ahop_sites", "_ahop_products")
        module._ahop_sites, module._ahop_products = call.sites, call.products
        module.add_parts(options.similarity, options.make_separation(None), dtype_source)

    shapes = list(dict.fromkeys(site.shape for site in call.sites))
    return Converter(convert, lambda _: shapes, "scaled_dot_product_attention" if call.products is None else "by hand")


class _Mark(NamedTuple):
    """Where a tensor comes from: a product which may be scores, or any softmax."""

    frame: "_Frame"  # the forward that computed the product
    site: Site | str  # the product as a site, or the reason why it cannot be adapted
    order: int  # index of the product
    size: int  # number of elements of the product
    keys: int  # size of its last axis
    weights: bool = False  # whether the tensor is computed from a softmax of the product

    def fits(self, scores: Tensor) -> bool:
        """Returns whether scores have the size of the product, or more keys, such as attention sinks."""
        keys = scores.shape[-1]
        return keys >= self.keys and scores.numel() * self.keys == self.size * keys


@dataclass
class _Frame:
    """A running ``forward``."""

    module: nn.Module
    products: int = 0
    reached: dict[Site | str, None] = field(default_factory=dict)  # sites, and reasons why others cannot be adapted
    marked: dict[int, tuple[Tensor, list[_Mark]]] = field(default_factory=dict)

    def result(self) -> _Attending | None:
        """Returns how the module attended, or None if it did not."""
        sites = tuple(site for site in self.reached if isinstance(site, Site))
        reason = next((each for each in self.reached if isinstance(each, str)), None)
        by_hand = any(site.product is not None for site in sites)
        return _Attending(sites, self.products if by_hand else None, reason) if self.reached else None


class _Discover(TorchFunctionMode):
    """Follows products of two tensors to a softmax, and from there to a product with values."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[_Frame] = []
        self.found: dict[nn.Module, list[_Attending | None]] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        self.frames.append(_Frame(module))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self.frames:
            frame = self.frames.pop()
            self.found.setdefault(frame.module, []).append(frame.result())
            if frame.module is module:
                break

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.frames:
            return output
        frame = self.frames[-1]
        if func is SDPA:
            query, key = (*args, *(kwargs[name] for name in ("query", "key") if name in kwargs))[:2]
            frame.reached[_site(frame.module, query, key, None)] = None
        elif func is functional.multi_head_attention_forward:
            frame.reached[OPAQUE] = None
        elif func in PRODUCTS:
            self._multiply(func, args, kwargs, output)
        else:
            marks = self._marks(args, kwargs)
            self._mark(output, self._softmax(marks, args, kwargs, output) if func in _SOFTMAXES else marks)
        return output

    def _multiply(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        """Marks a product of two tensors, or notes that the product of weights and values completes a site."""
        frame, index = self.frames[-1], self.frames[-1].products
        for each in self.frames:
            each.products += 1
        marks = self._marks(args, kwargs)
        weights = [mark for mark in marks if mark.weights]
        if weights:
            # Weights may be a mixture with weights of positions, whose scores are no products.
            for mark in [mark for mark in weights if isinstance(mark.site, Site)] or weights:
                mark.frame.reached[mark.site] = None
            return
        product = read_product(func, args, kwargs)
        if product is not None:
            site = _site(frame.module, product.query, product.key, index)
            marks.append(_Mark(frame, site, index, output.numel(), product.key.shape[-2]))
        self._mark(output, marks)  # earlier ones are scores that are mixed across heads, or part of queries

    def _softmax(self, marks: list[_Mark], args: Any, kwargs: Any, output: Tensor) -> list[_Mark]:
        """Returns the mark of a softmax: the one of the product it is computed from, in the same module."""
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        for mark in marks:
            same = any(mark.frame is frame for frame in self.frames[-2:])  # nn.Softmax is a module of its own
            if same and not mark.weights and mark.fits(output):
                site = mark.site if axis in (-1, output.ndim - 1) else OTHER_AXIS
                return [mark._replace(site=site, weights=True)]
        frame = self.frames[-2 if isinstance(self.frames[-1].module, nn.Softmax) and len(self.frames) > 1 else -1]
        return [_Mark(frame, OTHER_SCORES, -1, 0, 0, weights=True)] if output.ndim >= 3 else []

    def _marks(self, args: Any, kwargs: Any) -> list[_Mark]:
        """Returns the marks of all tensors among the arguments, earlier products first."""
        found = {}
        for tensor in _tensors((*args, *kwargs.values())):
            for frame in self.frames:
                for mark in frame.marked.get(id(tensor), (None, []))[1]:
                    found[id(mark.frame), mark.order, mark.weights] = mark
        return sorted(found.values(), key=lambda mark: mark.order)

    def _mark(self, output: Any, marks: list[_Mark]) -> None:
        for tensor in _tensors((output,)) if marks else ():
            for mark in marks:
                kept = mark.frame.marked.get(id(tensor), (tensor, []))[1]
                mark.frame.marked[id(tensor)] = (tensor, [*(m for m in kept if m.order != mark.order), mark])


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        each = value if isinstance(value, (list, tuple)) else [value]
        yield from (tensor for tensor in each if isinstance(tensor, Tensor))


def _site(module: nn.Module, query: Tensor, key: Tensor, product: int | None) -> Site | str:
    """Returns the site of a call, or the reason why it cannot be adapted."""
    owners = (module, getattr(module, "config", None))
    known = [heads for owner in owners for name in _HEAD_COUNTS if isinstance(heads := getattr(owner, name, None), int)]
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    widths = {size // parts for size in sizes for parts in (1, 2, 3) if size % parts == 0}  # projections may be stacked
    rows, dim = query.shape[-2:]
    axis = query.shape[-3] if query.ndim > 3 else None
    if rows == key.shape[-2] and rows != dim:
        heads = known or [axis or 1]
        if any(rows * h in widths for h in heads) and not any(dim * h in widths for h in heads):
            return CHANNELS  # rows are the channels of a head, and the last axis the tokens
    # The axis before the tokens has the heads only if the module says so: it may have windows or a batch.
    named = axis is not None and axis * dim in widths
    if known:
        named = axis in known and not (query.ndim > 4 and query.shape[-4] in known)
    return Site(axis if named else None, dim, product)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Runs in eval mode, and restores the mode of every module and the state of the random generators."""
    training = [module for module in model.modules() if module.training]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices)):
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


def _call(model: nn.Module, example: Any) -> dict[nn.Module, _Attending | None]:
    """Calls a model once, in eval mode and without gradients, and returns how each called module attends.

    A module that does not attend in its own ``forward`` has None.
    """
    mode = _Discover()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(mode.enter).remove)
            hooks.callback(module.register_forward_hook(mode.leave, always_call=True).remove)
        with in_eval_mode(model), torch.no_grad(), mode:
            if isinstance(example, Mapping):
                model(**example)
            elif isinstance(example, (tuple, list)):
                model(*example)
            elif callable(example) and not isinstance(example, Tensor):
                example(model)
            else:
                model(example)
    return {module: _agree(calls) for module, calls in mode.found.items()}


def _agree(calls: list[_Attending | None]) -> _Attending | None:
    attending = [call for call in calls if call is not None]
    refused = next((call for call in attending if call.reason is not None), None)
    if refused is None and attending and any(call != calls[0] for call in calls):
        return attending[0]._replace(reason="it attends differently in several calls of the example")
    return refused or next(iter(attending), None)
