"""Discovery: one example call shows which modules of a model attend, and where in their ``forward``."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ahop_layers.attention.call import PRODUCTS, SDPA, Site, read_product

SOFTMAXES = (functional.softmax, torch.softmax, Tensor.softmax)
HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head", "num_attn_heads")
CHANNELS = "it attends over channels, so the dimension of its queries is the number of tokens"
OTHER_AXIS = "its softmax is not over the keys"
OTHER_SCORES = "the scores of its softmax are not products of queries and keys"
OPAQUE = "it calls multi_head_attention_forward, whose scores cannot be replaced"


class Attending(NamedTuple):
    """How a module attends in one call of its ``forward``."""

    sites: tuple[Site, ...]  # those that can be adapted, in the order of the calls
    products: int | None  # number of products, or None without attention written by hand
    reason: str | None = None  # why the module cannot be adapted


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

    def result(self) -> Attending | None:
        """Returns how the module attended, or None if it did not."""
        sites = tuple(site for site in self.reached if isinstance(site, Site))
        reason = next((each for each in self.reached if isinstance(each, str)), None)
        by_hand = any(site.product is not None for site in sites)
        return Attending(sites, self.products if by_hand else None, reason) if self.reached else None


class _Discover(TorchFunctionMode):
    """Follows products of two tensors to a softmax, and from there to a product with values."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[_Frame] = []
        self.found: dict[nn.Module, list[Attending | None]] = {}

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
            self._mark(output, self._softmax(marks, args, kwargs, output) if func in SOFTMAXES else marks)
        return output

    def _multiply(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        """Marks a product of two tensors, or notes that the product of weights and values completes a site."""
        frame, index = self.frames[-1], self.frames[-1].products
        for each in self.frames:
            each.products += 1
        marks = self._marks(args, kwargs)
        weights = [mark for mark in marks if mark.weights]
        if weights:
            # Weights may be a mixture with those of positions, whose scores are no products.
            for mark in [mark for mark in weights if isinstance(mark.site, Site)] or weights:
                mark.frame.reached[mark.site] = None
            return
        product = read_product(func, args, kwargs)
        if product is not None:
            site = _site(frame.module, product.query, product.key, index)
            marks.append(_Mark(frame, site, index, output.numel(), product.key.shape[-2]))
        self._mark(output, marks)  # earlier ones are scores that are mixed across heads, or part of queries

    def _softmax(self, marks: list[_Mark], args: Any, kwargs: Any, output: Tensor) -> list[_Mark]:
        """Returns the mark of a softmax: that of the product it is computed from, in the same module."""
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
    known = [heads for owner in owners for name in HEADS if isinstance(heads := getattr(owner, name, None), int)]
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    widths = {size // parts for size in sizes for parts in (1, 2, 3) if size % parts == 0}  # projections may be stacked
    rows, dim = query.shape[-2:]
    axis = query.shape[-3] if query.ndim > 3 else None
    if rows == key.shape[-2] and rows != dim:
        heads = known or [axis or 1]
        if any(rows * h in widths for h in heads) and not any(dim * h in widths for h in heads):
            return CHANNELS  # rows are the channels of a head, and the last axis the tokens
    # The axis before the tokens is that of the heads only if the module says so: it may be windows or a batch.
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


def discover(model: nn.Module, example: Any) -> dict[nn.Module, Attending | None]:
    """Calls a model once, in eval mode and without gradients, and returns how each called module attends.

    ``example`` is that of ``adapt_``. A module that does not attend in its own ``forward`` has None.
    """
    mode = _Discover()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(mode.enter).remove)
            hooks.callback(module.register_forward_hook(mode.leave, always_call=True).remove)
        with in_eval_mode(model), torch.no_grad(), mode:
            _call(model, example)
    return {module: _agree(calls) for module, calls in mode.found.items()}


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, (tuple, list)):
        model(*example)
    elif callable(example) and not isinstance(example, Tensor):
        example(model)
    else:
        model(example)


def _agree(calls: list[Attending | None]) -> Attending | None:
    """Combines the calls of one module."""
    attending = [call for call in calls if call is not None]
    refused = next((call for call in attending if call.reason is not None), None)
    if refused is None and attending and any(call != calls[0] for call in calls):
        return attending[0]._replace(reason="it attends differently in several calls of the example")
    return refused or next(iter(attending), None)
