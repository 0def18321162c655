"""adapt_ and revert_: replace the attention modules of a model by adaptive ones, in place, and undo it."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ahop_layers.convert.class_swap import original_class, restore_class_
from ahop_layers.convert.copies import find_copies
from ahop_layers.convert.find import find_attention
from ahop_layers.convert.registry import Converter
from ahop_layers.errors import AHopError, check_given_sizes, check_module
from ahop_layers.hopfield.adaptive import AdaptiveLayer, is_dot_product, make_plain
from ahop_layers.ops.operators import is_compiled
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, Init
from ahop_layers.similarity.associator import SimilarityList, named_similarities, similarity_parameters
from ahop_layers.similarity.blocks import BlocksArgument
from ahop_layers.similarity.options import SimilarityOptions, SimilaritySource

Where = Callable[[str, nn.Module], bool] | str | Iterable[str]
"""Selects modules: a function of name and module, or one or several name patterns such as ``"encoder.*"``."""

# Ends of class names, because importing torch.distributed.fsdp or torch._dynamo takes seconds. DDP is the class that
# ``replicate`` adds to a module, FSDPModule the one that ``fully_shard`` adds.
_WRAPPERS = ("DataParallel", "DDP", "FSDPModule", "OptimizedModule")


@dataclass(frozen=True)
class Report:
    """The result of :func:`adapt_`; ``print`` shows it as a table.

    Attributes:
        adapted: original class of each adapted module, by name.
        passed_over: reason why an attention module was not adapted, by name.
        new_parameters: number of elements of the new similarities' parameters of known shape.
        dry_run: whether :func:`adapt_` changed nothing.
        blocks: number of blocks of the similarities of each adapted module, by name, unless it has full footprints.
        how: how the attention of each adapted module is replaced, by name: by a ``"converter"``, or in the module's own
            ``forward``, where it calls ``"scaled_dot_product_attention"`` or computes scores ``"by hand"``.

    >>> print(Report({"blocks.0.attn": "Attention"}, {}, 96))
    adapted 1 of 1 attention modules; 96 new parameters
    blocks.0.attn  adapted Attention
    """

    adapted: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    new_parameters: int = 0
    dry_run: bool = False
    how: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The coverage, then one line per module."""
        width = max(map(len, [*self.adapted, *self.passed_over]), default=0)
        done = "would adapt" if self.dry_run else "adapted"
        total = f"{done} {len(self.adapted)} of {len(self.adapted) + len(self.passed_over)} attention modules"
        lines = [total if self.dry_run else f"{total}; {self.new_parameters} new parameters"]
        for name, kind in self.adapted.items():
            how = self.how.get(name, "converter")
            line = f"{name:{width}}  {done} {kind}" + ("" if how == "converter" else f" ({how})")
            lines.append(line + (f", {self.blocks[name]} blocks" if name in self.blocks else ""))
        lines += [f"{name:{width}}  passed over: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join(lines)


def _selector(where: Where | None) -> Callable[[str, nn.Module], bool]:
    where = "*" if where is None else where
    if callable(where):
        return where
    patterns = list(where) if isinstance(where, Iterable) and not isinstance(where, str) else [where]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise AHopError(f"where must be a function of name and module, or one or several name patterns, got {where!r}")
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


# fmt: off
def adapt_(
    model: nn.Module, *, example: Any = None, by_hand: bool = False, where: Where | None = None,
    last: int | None = None, freeze_rest: bool = False, dry_run: bool = False, like: type[nn.Module] | None = None,
    bases: Sequence[str] | None = None, init: Init | None = None, debias: bool = False,
    separation: str | Separation | None = None, blocks: BlocksArgument = "auto",
    similarity: SimilaritySource | None = None,
) -> Report:
    # fmt: on
    """Makes the attention of a model adaptive, in place, and returns a :class:`Report`.

    It knows ``nn.MultiheadAttention`` (also in torchvision's ViT), timm's ``Attention``, the attention of ViT, DeiT,
    DINOv2 and CLIP in transformers, and the Hopfield layers of hflayers and of this package; :func:`register_converter`
    adds other classes. With an ``example``, every other module that calls ``scaled_dot_product_attention`` is adapted
    as well: its own ``forward`` stays, and the call uses the similarity.

    Trained weights are kept. By default a new similarity equals the dot product, so the outputs of the model do not
    change, with one exception: hflayers mixes the samples of a batch if a static pattern is used with several heads, an
    adapted layer does not.

    Call it before the model is compiled or wrapped for data-parallel training: wrappers do not synchronize the
    gradients of parameters that are added later. A compiled or wrapped model is refused, but do not call
    ``adapt_(ddp.module)``: a wrapper around ``model`` cannot be detected.

    Args:
        model: any module, also an attention module itself.
        example: an input of the model, a tuple of inputs, a mapping of keywords, or a function that calls the model.
            The model is called once, in eval mode and without gradients, to find the modules that attend and the number
            and dimension of their heads. An adapted module raises an ``AHopError`` if it attends differently later.
            None adapts known classes only.
        by_hand: also adapt modules that compute scores by a product of queries and keys that reaches a softmax in the
            same module, as in Swin. All else, such as a position bias, remains. Needs ``example``.
        where: which modules to adapt: a function of name and module, or one or several name patterns such as
            ``"encoder.*"``. None selects all.
        last: adapt only the selected modules that are in the last ``last`` layers of the model.
        freeze_rest: set ``requires_grad=False`` for all parameters outside the similarities.
        dry_run: only check the arguments and report what would be adapted.
        like: a class of hflayers; modules with its parts that ``where`` selects are copies of it. Without it, copies
            are recognized by their parts, and one call of each checks that it computes the same weights, with softmax,
            sparsemax or entmax15, which is kept unless ``separation`` is given.
        bases, init, debias: see :class:`~ahop_layers.AdaptiveSimilarity`; None means its default.
        blocks: see :class:`~ahop_layers.AdaptiveHopfield`; the report says what ``"auto"`` chose.
        separation: the name of a separation, or a :class:`~ahop_layers.Separation`, which is copied for each layer.
            None keeps the separation of a Hopfield layer and means softmax for attention. Must be None for modules that
            are adapted with ``by_hand``, which keep their own softmax.
        similarity: a module to use instead of an ``AdaptiveSimilarity``, which is copied for each layer, or a factory
            ``f(dim, num_heads)`` that is called for each layer.

    Raises:
        AHopError: no module can be adapted, the model is already adapted, wrapped or compiled, or an argument is
            invalid, for example a number of blocks that does not divide the dimension of a head. The model is then
            unchanged.

    >>> import ahop_layers as ah
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=2)
    >>> print(ah.adapt_(model, last=1))
    adapted 1 of 2 attention modules; 36 new parameters
    layers.1.self_attn  adapted MultiheadAttention
    layers.0.self_attn  passed over: not in the last 1 layers
    """
    check_module(model=model)
    check_given_sizes(last=last)
    before = next(iter(_adapted_modules(model)), None)
    if before is not None:
        raise AHopError(f"model must not be adapted yet, got one with {before or 'itself'} adapted; see revert_")
    _check_not_wrapped(model)
    if by_hand and example is None:
        raise AHopError("by_hand=True needs example, an input of the model, got None")
    selected, options = _selector(where), SimilarityOptions(bases, init, debias, separation, similarity, blocks)
    copies = find_copies(model, like, None if where is None else selected)
    chosen, passed = _choose(find_attention(model, example, by_hand, copies), selected, last)
    if not chosen:
        reasons = {reason: name or "the model" for name, reason in reversed(passed.items())}
        seen = "; ".join(f"{name} passed over: {reason}" for reason, name in reversed(reasons.items()))
        raise AHopError(f"expected a model with attention to adapt, got {type(model).__name__} with {seen or 'none'}")
    if dry_run and callable(similarity) and not isinstance(similarity, nn.Module):
        options = replace(options, similarity=lambda dim, num_heads: nn.Identity())  # a factory is not called
    built = {name: _build(name, module, converter, options) for name, (module, converter) in chosen.items()}
    adapted = {name: type(module).__name__ for name, (module, _) in chosen.items()}
    how = {name: converter.how for name, (_, converter) in chosen.items()}
    counts = {name: _blocks(each.similarity) for name, each in built.items() if _blocks(each.similarity)}
    if dry_run:
        return Report(adapted, passed, 0, True, how, counts)
    try:
        for name, (module, converter) in chosen.items():
            with _naming(name):
                converter.convert(module, built[name])
    except BaseException:
        for module in _adapted_modules(model).values():
            restore_class_(module)
        raise
    if freeze_rest:
        _freeze_rest(model)
    _exempt_from_decay(model)
    _warn_about_peft(model)
    new = {id(p): p.numel() for module, _ in chosen.values() for p in similarity_parameters(module) if not is_lazy(p)}
    return Report(adapted, passed, sum(new.values()), False, how, counts)


def _check_not_wrapped(model: nn.Module) -> None:
    """Raises if a data-parallel wrapper, a sharded parameter or a compiled module is found in the model."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        found = [f"wrapped in {kind}" for kind in kinds if kind.endswith(_WRAPPERS)]
        found += ["compiled in place"] if is_compiled(module) else []
        sharded = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters(recurse=False))
        found += ["sharded, with DTensor parameters"] if sharded else []
        if found:
            got = f"a model whose {name} is {found[0]}" if name else f"a model that is {found[0]}"
            rule = "model must be neither wrapped nor compiled yet"
            raise AHopError(f"{rule}, got {got}; call adapt_ first, and wrap or compile the adapted model")


def _choose(
    found: dict[str, tuple[nn.Module, Converter | str]], selected: Callable[[str, nn.Module], bool], last: int | None
) -> tuple[dict[str, tuple[nn.Module, Converter]], dict[str, str]]:
    """Returns the modules to adapt with their converters, and the reasons why others are passed over, by name."""
    chosen, passed = {}, {}
    for name, (module, converter) in found.items():
        if isinstance(converter, str):
            passed[name] = converter
        elif not selected(name, module):
            passed[name] = "not chosen by where"
        else:
            chosen[name] = (module, converter)
    if last is not None:
        layers = list(dict.fromkeys(map(_layer, chosen)))[-last:]
        for name in [name for name in chosen if _layer(name) not in layers]:
            del chosen[name]
            passed[name] = f"not in the last {last} layers"
    return chosen, passed


def _layer(name: str) -> str:
    """Returns the layer of a module: its name up to the last number in it, or the whole name."""
    numbered = re.match(r"(?:.*[._])?\d+(?=\.|$)", name)
    return numbered.group() if numbered else name


def _build(name: str, module: nn.Module, converter: Converter, options: SimilarityOptions) -> SimilarityOptions:
    """Returns options with the similarity and the separation of one module; raises if they do not fit."""
    with _naming(name):
        if options.separation is not None and converter.how == "by hand":
            raise AHopError(f"separation must be None for attention by hand, got {options.separation!r}")
        shapes, copied = converter.head_shapes(module), options.copied()
        if not shapes:
            return copied
        parts = [options.copied().make_similarity(dim, heads) for heads, dim in shapes]
        similarity = parts[0] if len(parts) == 1 else SimilarityList(parts)
        heads = shapes[0][0] if len(shapes) == 1 else None
        separation = None if options.separation is None else copied.make_separation(heads)
        return SimilarityOptions(separation=separation, similarity=similarity)


def _blocks(similarity: Any) -> str:
    """Returns the numbers of blocks of one or several similarities, and an empty text for full footprints."""
    parts = similarity if isinstance(similarity, SimilarityList) else [similarity]
    known = [part for part in parts if isinstance(part, AdaptiveSimilarity) and not is_lazy(part.w)]
    return ", ".join(str(part.w.shape[-1]) for part in known if part.blocks.assignment is not None)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefixes an AHopError with the name of a module."""
    try:
        yield
    except AHopError as error:
        raise AHopError(f"{name}: {error}" if name else str(error)) from error


def revert_(model: nn.Module, *, discard: bool = False) -> list[str]:
    """Undoes :func:`adapt_`: restores the class of every module, keeps its weights and removes the similarities.

    A similarity that is no longer the dot product raises, because the outputs would change: ``discard=True`` drops it.

    Parameters that ``freeze_rest`` froze become trainable again. Hopfield layers that were built adaptive become the
    plain layers of :mod:`ahop_layers.hopfield`; a subclass keeps its class, and computes the dot product.

    Returns the names of the restored modules, as in the report of :func:`adapt_`; raises if there are none.

    >>> import ahop_layers as ah
    >>> model = nn.MultiheadAttention(8, 2)
    >>> ah.adapt_(model), ah.revert_(model), type(model).__name__  # doctest: +ELLIPSIS
    (Report(...), [''], 'MultiheadAttention')
    """
    check_module(model=model)
    adapted = _adapted_modules(model)
    for name, module in adapted.items():
        original: Any = original_class(module)
        if original.swapped != type(module).__name__:  # parametrizations set another class
            got = f"{type(module).__name__} for {name!r}"
            raise AHopError(f"modules must have the classes that adapt_ set, got {got}: undo later changes first")
    parts = adapted | {name: part for name, part in model.named_modules() if isinstance(part, AdaptiveLayer)}
    for name, part in {} if discard else parts.items():
        if not all(map(is_dot_product, named_similarities(part).values())):
            rule = f"the similarity of {name or 'the model'} must still be the dot product, got another one"
            raise AHopError(f"{rule}: revert_(model, discard=True) drops it, which changes the outputs")
    for module in adapted.values():
        restore_class_(module)
    adapted |= make_plain(model)
    exempt = vars(model).get("no_weight_decay")
    if isinstance(exempt, _Exempt):
        del model.no_weight_decay
        vars(model).update(exempt.replaced)
    if not _unfreeze(model) and not adapted:
        raise AHopError(f"model must be adapted, got {type(model).__name__} without adapted modules")
    inside = {part for module in adapted.values() for part in module.modules() if part is not module}
    return [name for name, module in adapted.items() if module not in inside]


def _adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the modules whose class was swapped, by name."""
    return {name: module for name, module in model.named_modules() if original_class(module) is not None}


class _Exempt(NamedTuple):
    """Stands for the method ``no_weight_decay`` of a model; unlike a closure, it can be pickled."""

    names: set[str]
    replaced: dict[str, Any]  # an attribute of the model itself, if it had one

    def __call__(self) -> set[str]:
        return set(self.names)


def _exempt_from_decay(model: nn.Module) -> None:
    """Adds the similarities to what ``model.no_weight_decay()`` returns, which optimizers of timm ask for."""
    similarity = {id(parameter) for parameter in similarity_parameters(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in similarity}
    own: Any = getattr(model, "no_weight_decay", set)
    given = {"no_weight_decay": own} if "no_weight_decay" in vars(model) else {}
    replaced = own.replaced if isinstance(own, _Exempt) else given
    vars(model)["no_weight_decay"] = _Exempt({*own(), *names}, replaced)


def _warn_about_peft(model: nn.Module) -> None:
    """Warns if a model has adapters of PEFT, whose ``save_pretrained`` stores only the modules it was told of."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        warnings.warn(
            "save_pretrained of PEFT does not store similarities that are added later: call adapt_ first, then"
            " get_peft_model with modules_to_save=['similarity'] in its config, or use save_similarities",
            stacklevel=3,
        )


def _freeze_rest(model: nn.Module) -> None:
    """Freezes all but the similarities, and records the names in each module, so that a part can be reverted."""
    kept = {id(parameter) for parameter in similarity_parameters(model)}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    ids = {id(parameter) for parameter in frozen}
    for module in model.modules():
        vars(module)["_ahop_frozen"] = [name for name, p in module.named_parameters(recurse=False) if id(p) in ids]
    for parameter in frozen:
        parameter.requires_grad_(False)


def _unfreeze(model: nn.Module) -> bool:
    """Undoes :func:`_freeze_rest` for a model or a part of it, and tells whether anything was frozen."""
    owners = [module for module in model.modules() if "_ahop_frozen" in vars(module)]
    for module in owners:
        names = vars(module).pop("_ahop_frozen")
        for name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(parameter.requires_grad or name in names)
    return bool(owners)
