"""The converters: one table from the full name of an attention class to the function that makes it adaptive."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ahop_layers import hopfield as layers
from ahop_layers.attention import Adaptive, AdaptiveAttention, vision
from ahop_layers.convert.class_swap import swap_class_, viewed_as
from ahop_layers.errors import AHopError
from ahop_layers.hopfield.adaptive import head_shape
from ahop_layers.hopfield.core import AssociationCore
from ahop_layers.separation import Separation
from ahop_layers.similarity.options import SimilarityOptions


def full_name(kind: type) -> str:
    """Returns the name of a class, prefixed with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class Converter(NamedTuple):
    """How to make the modules of a class adaptive."""

    convert: Callable[[Any, SimilarityOptions], None]  # converts a module in place
    head_shapes: Callable[[Any], Sequence[tuple[int | None, int | None]]]  # heads and dimension of each similarity
    how: str = "converter"  # attention is replaced by its forward, or within the forward of the module


ADAPTIVE_LAYERS = (Adaptive, layers.AdaptiveHopfield, layers.AdaptiveHopfieldLayer, layers.AdaptiveHopfieldPooling)


def _attention(adaptive: type[Adaptive]) -> Converter:
    def convert(module: Any, options: SimilarityOptions) -> None:
        swap_class_(module, adaptive, "similarity", "separation", "_qkv_same_embed_dim")
        module.make_adaptive(options)

    def shapes(module: nn.Module) -> list[tuple[int, int]]:
        # A class that overrides make_adaptive may do without head_shape.
        defined = adaptive.head_shape is not Adaptive.head_shape
        return [viewed_as(module, adaptive).head_shape()] if defined else []

    return Converter(convert, shapes)


def _adapt_hopfield(hopfield: Any, options: SimilarityOptions, learned: bool = False) -> None:
    core, batch_first, width = hopfield.association_core, hopfield.batch_first, hopfield.input_size
    settings = hopfield.scaling, hopfield.update_steps_max, hopfield.update_steps_eps
    swap_class_(hopfield, layers.AdaptiveHopfield, "_batch_first", "_input_size")
    hopfield._batch_first, hopfield._input_size = batch_first, width
    if isinstance(core, AssociationCore):
        separation = core.separation
        swap_class_(core, AssociationCore, "similarity", "separation")
    else:  # the core of hflayers has the same attributes and parameters, but receives these settings in each call
        separation = Separation()
        names = ("scaling", "update_steps_max", "update_steps_eps", "steps")
        swap_class_(core, AssociationCore, "similarity", "separation", *names)
        core.configure(*settings)
    options = options if options.separation is not None else replace(options, separation=separation)
    hopfield.make_adaptive(options, learned)


def _hopfield_shapes(hopfield: Any, learned: bool = False) -> list[tuple[int, int | None]]:
    return [head_shape(hopfield.association_core, hopfield.input_size, learned)]


def _around(adaptive: type[nn.Module]) -> Converter:
    """Returns the converter of a layer with learned patterns, which also converts the Hopfield module inside."""

    def convert(layer: Any, options: SimilarityOptions) -> None:
        _adapt_hopfield(layer.hopfield, options, learned=True)
        swap_class_(layer, adaptive)

    return Converter(convert, lambda layer: _hopfield_shapes(layer.hopfield, learned=True))


_hopfield = Converter(_adapt_hopfield, _hopfield_shapes)
_vit, _vit_before = _attention(vision.ViTAttention), _attention(vision.ViTSelfAttention)
_timm = _attention(vision.TimmAttention)
_layer, _pooling = _around(layers.AdaptiveHopfieldLayer), _around(layers.AdaptiveHopfieldPooling)


# Keys are names, so that no other library has to be imported. Only register_converter adds some.
CONVERTERS: dict[str, Converter] = {
    "torch.nn.modules.activation.MultiheadAttention": _attention(AdaptiveAttention),
    "timm.layers.attention.Attention": _timm,
    "timm.models.vision_transformer.Attention": _timm,
    "transformers.models.vit.modeling_vit.ViTAttention": _vit,
    "transformers.models.deit.modeling_deit.DeiTAttention": _vit,
    "transformers.models.dinov2.modeling_dinov2.Dinov2Attention": _vit,
    "transformers.models.vit.modeling_vit.ViTSelfAttention": _vit_before,
    "transformers.models.deit.modeling_deit.DeiTSelfAttention": _vit_before,
    "transformers.models.dinov2.modeling_dinov2.Dinov2SelfAttention": _vit_before,
    "transformers.models.clip.modeling_clip.CLIPAttention": _attention(vision.CLIPAttention),
    "hflayers.Hopfield": _hopfield,
    "hflayers.HopfieldLayer": _layer,
    "hflayers.HopfieldPooling": _pooling,
    full_name(layers.Hopfield): _hopfield,
    full_name(layers.HopfieldLayer): _layer,
    full_name(layers.HopfieldPooling): _pooling,
}


def register_converter(source: type[nn.Module] | str, adaptive: type[Adaptive]) -> None:
    """Registers an adaptive form of another attention class for :func:`~ahop_layers.adapt_`.

    Args:
        source: the class to adapt, or its full name.
        adaptive: a subclass of :class:`~ahop_layers.Adaptive` with ``head_shape()`` and a ``forward`` with the
            signature of the source's. ``forward`` reads the source's attributes from ``self`` and attends with
            ``self.associate``.

    >>> import ahop_layers as ah
    >>> from einops import rearrange
    >>> class MyAttention(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv = nn.Linear(8, 24)
    >>> class MyAdaptiveAttention(ah.Adaptive):
    ...     def head_shape(self):
    ...         return 2, 4
    ...     def forward(self, x):
    ...         q, k, v = rearrange(self.qkv(x), "n l (three h d) -> three n h l d", three=3, h=2)
    ...         return self.associate(q, k, v, scaling=0.5, mask=None, dropout=0.0)[0]
    >>> ah.register_converter(MyAttention, MyAdaptiveAttention)
    >>> ah.adapt_(nn.Sequential(MyAttention())).adapted
    {'0': 'MyAttention'}
    """
    if not isinstance(source, (type, str)):
        raise AHopError(f"source must be a class or the full name of one, got {source!r}")
    if not (isinstance(adaptive, type) and issubclass(adaptive, Adaptive)):
        raise AHopError(f"adaptive must be a subclass of ahop_layers.Adaptive, got {adaptive!r}")
    name = source if isinstance(source, str) else full_name(source)
    CONVERTERS[name] = _attention(adaptive)


# Subclasses may override these: adaptive classes inherit them, or extend them by a call of the overridden method.
_KEPT = ("__init__", "__repr__", "extra_repr", "_load_from_state_dict", "reset_parameters", "_reset_parameters")
_CORES = (full_name(AssociationCore), "hflayers.activation.HopfieldCore")


def _overridden(module: Any, base: type) -> str | None:
    """Returns which method a subclass or an instance overrides, also in a part; a conversion would bypass it."""
    kind = type(module)
    defined = (vars(part).items() for part in base.__mro__ if part not in nn.Module.__mro__)
    own = {name for items in defined for name, value in items if callable(value) or isinstance(value, property)}
    above = (vars(part) for part in kind.__mro__[: kind.__mro__.index(base)])
    names = {name for part in (vars(module), *above) for name in part}
    found = min((names & own).difference(_KEPT), key=lambda name: (name != "forward", name), default=None)
    if found is not None:
        return f"{full_name(kind)} overrides {found}"
    for part in (getattr(module, "hopfield", None), getattr(module, "association_core", None)):
        for known in type(part).__mro__:
            if full_name(known) in _CORES or CONVERTERS.get(full_name(known)) is _hopfield:
                found = found or _overridden(part, known)
    return found


def converter_for(module: nn.Module) -> Converter | str | None:
    """Returns the converter of a module in the table, the reason why it is not used, or None if there is none."""
    if isinstance(module, ADAPTIVE_LAYERS):
        return "it is adaptive already"
    for base in type(module).__mro__:
        converter = CONVERTERS.get(full_name(base))
        if converter is not None:
            overridden = _overridden(module, base)
            if overridden is not None:
                return f"{overridden}; see register_converter"
            # In early releases this is the name of a module that contains the attention.
            return converter if converter is not _vit or hasattr(module, "q_proj") else None
    return None
