"""adapt_ and revert_: swap every attention of a model for its adaptive counterpart, in place, and back."""

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ahop_layers.convert.class_swap import turn_back
from ahop_layers.convert.registry import Converter, converter_for
from ahop_layers.errors import AHopError, check_given_sizes
from ahop_layers.hopfield.adaptive import KEYWORDS
from ahop_layers.similarity import similarity_parameters

Where = Callable[[str, nn.Module], bool] | str | Iterable[str]


@dataclass(frozen=True)
class Report:
    """What :func:`adapt_` did; ``print`` shows it as a table.

    Attributes:
        adapted: name of each adapted module, and its class before.
        passed_over: name of each attention module left as it was, and why.
        new_parameters: how many numbers the similarities have together, as far as their sizes are known yet.
        dry_run: whether nothing was changed.

    >>> print(Report({"blocks.0.attn": "Attention"}, new_parameters=96))
    blocks.0.attn  adapted Attention
    adapted 1, passed over 0; 96 new parameters
    """

    adapted: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    new_parameters: int = 0
    dry_run: bool = False

    def __str__(self) -> str:
        """One line a module."""
        width = max(map(len, [*self.adapted, *self.passed_over]), default=0)
        done = "would adapt" if self.dry_run else "adapted"
        lines = [f"{name:{width}}  {done} {kind}" for name, kind in self.adapted.items()]
        lines += [f"{name:{width}}  passed over: {reason}" for name, reason in self.passed_over.items()]
        total = f"{done} {len(self.adapted)}, passed over {len(self.passed_over)}"
        return "\n".join([*lines, total if self.dry_run else f"{total}; {self.new_parameters} new parameters"])


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Converter | str]]:
    """Attention modules in the order in which the model has them, not looking into those that can be adapted."""
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Converter | str]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        found = converter_for(module)
        if found is not None:
            yield name, module, found
        if found is None or isinstance(found, str):
            for child_name, child in module.named_children():
                yield from visit(child, f"{name}.{child_name}" if name else child_name)

    return visit(model, "")


def _chooser(where: Where | None) -> Callable[[str, nn.Module], bool]:
    if where is None:
        return lambda name, module: True
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else list(where)
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _block(name: str) -> str:
    """The block that a module belongs to: its name up to the last number in it, or all of it."""
    numbered = re.match(r"(?:.*[._])?\d+(?=\.|$)", name)
    return numbered.group() if numbered else name


def adapt_(
    model: nn.Module,
    *,
    where: Where | None = None,
    last: int | None = None,
    freeze_rest: bool = False,
    dry_run: bool = False,
    **keywords: Any,
) -> Report:
    """Make the attention of a model adaptive, in place, without changing what the model computes.

    Knows ``nn.MultiheadAttention`` (and so torchvision's ViT), timm's ``Attention``, ViT, DeiT, DINOv2 and CLIP of
    transformers, the three classes of hflayers and ours in their place; :func:`register_converter` adds others.
    Trained weights stay; the new similarities start as the dot product. One exception: hflayers mixes the samples of a
    batch where static patterns meet several heads, and an adapted layer does not.

    Args:
        model: any module; it may itself be an attention module.
        where: which modules: a function of name and module, or name patterns such as ``"encoder.*"``. Default: all.
        last: of these, only the modules in the last so many blocks.
        freeze_rest: leave only the similarities trainable.
        dry_run: change nothing, only report.
        keywords: ``bases``, ``init``, ``debias``, ``separation``, as in :class:`~ahop_layers.AdaptiveAttention`.

    Returns:
        A :class:`Report` of what was adapted, what was passed over, and why.

    Raises:
        AHopError: nothing to adapt, a model that is adapted already, or an argument that does not fit.

    >>> import ahop_layers as ah
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2)
    >>> print(ah.adapt_(model, last=1))
    layers.1.self_attn  adapted MultiheadAttention
    layers.0.self_attn  passed over: not in the last 1 blocks
    adapted 1, passed over 1; 36 new parameters
    """
    if not isinstance(model, nn.Module):
        raise AHopError(f"model must be a module, got {type(model).__name__}")
    unknown = set(keywords) - set(KEYWORDS)
    if unknown:
        raise AHopError(f"keywords must be out of {', '.join(KEYWORDS)}, got {sorted(unknown)}")
    check_given_sizes(last=last)
    before = [name for name, module in model.named_modules() if "_former" in vars(module)]
    if before:
        raise AHopError(f"the model must not be adapted yet, got one with {before[0] or 'itself'} adapted; see revert_")
    wanted, chosen, passed = _chooser(where), {}, {}
    for name, module, found in _walk(model):
        if isinstance(found, str):
            passed[name] = found
        elif not wanted(name, module):
            passed[name] = "not chosen by where"
        else:
            chosen[name] = (module, found)
    if last is not None:
        blocks = list(dict.fromkeys(map(_block, chosen)))
        for name in [name for name in chosen if _block(name) not in blocks[-last:]]:
            del chosen[name]
            passed[name] = f"not in the last {last} blocks"
    if not chosen:
        reasons = {reason: name or "the model" for name, reason in reversed(passed.items())}
        seen = "; ".join(f"{name} passed over: {reason}" for reason, name in reversed(reasons.items()))
        raise AHopError(f"expected a model with attention to adapt, got {type(model).__name__} with {seen or 'none'}")
    adapted = {name: type(module).__name__ for name, (module, _) in chosen.items()}
    if dry_run:
        return Report(adapted, passed, dry_run=True)
    try:
        for module, convert in chosen.values():
            convert(module, deepcopy(keywords))  # a separation with parameters is each module's own
    except BaseException:
        revert_(model)  # an argument that does not fit shows at the first module: leave nothing half done
        raise
    mine = similarity_parameters(model)
    if freeze_rest:
        own = {id(parameter) for parameter in mine}
        frozen = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        model.__dict__["_frozen"] = frozen
    return Report(adapted, passed, sum(parameter.numel() for parameter in mine if not is_lazy(parameter)))


def revert_(model: nn.Module) -> list[str]:
    """Undo :func:`adapt_`: every module becomes what it was, with the weights it has now; similarities are dropped.

    Args:
        model: what :func:`adapt_` was called with.

    Returns:
        The names of the modules that were reverted, as :func:`adapt_` reported them.

    Raises:
        AHopError: the model is not adapted.

    >>> import ahop_layers as ah
    >>> model = nn.MultiheadAttention(8, 2)
    >>> ah.adapt_(model), ah.revert_(model), type(model).__name__  # doctest: +ELLIPSIS
    (Report(...), [''], 'MultiheadAttention')
    """
    adapted = {name: module for name, module in model.named_modules() if "_former" in vars(module)}
    if not adapted:
        raise AHopError(f"expected a model that adapt_ adapted, got {type(model).__name__} without adapted modules")
    for module in adapted.values():
        turn_back(module)
    frozen = set(model.__dict__.pop("_frozen", ()))
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(True)
    return [name for name in adapted if not any(_inside(name, other) for other in adapted)]


def _inside(name: str, other: str) -> bool:
    """Whether a module is part of another one; the root has no name."""
    return name != other and (not other or name.startswith(f"{other}."))
