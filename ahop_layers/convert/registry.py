"""How each kind of attention module becomes adaptive: one table, from the name of a class to its converter."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ahop_layers.attention import Adaptive, AdaptiveAttention, vision
from ahop_layers.convert.class_swap import turn_into
from ahop_layers.errors import AHopError
from ahop_layers.hopfield.adaptive import AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling
from ahop_layers.hopfield.core import AssociationCore
from ahop_layers.separation import Separation

Converter = Callable[[nn.Module, dict[str, Any]], None]


def _adapt_attention(adaptive: type[nn.Module], module: Any, keywords: dict[str, Any]) -> None:
    turn_into(module, adaptive, "similarity", "separation", "_qkv_same_embed_dim")
    module.make_adaptive(**keywords)


def _adapt_hopfield(hopfield: Any, keywords: dict[str, Any]) -> None:
    core, batch_first, width = hopfield.association_core, hopfield.batch_first, hopfield.input_size
    settings = hopfield.scaling, hopfield.update_steps_max, hopfield.update_steps_eps
    turn_into(hopfield, AdaptiveHopfield, "_batch_first", "_input_size")
    hopfield._batch_first, hopfield._input_size = batch_first, width
    if isinstance(core, AssociationCore):
        separation = core.separation
        turn_into(core, AssociationCore, "similarity", "separation")
    else:  # that of hflayers has the attributes and parameters of ours, and is told its settings with every call
        separation = Separation()
        names = ("scaling", "update_steps_max", "update_steps_eps", "steps")
        turn_into(core, AssociationCore, "similarity", "separation", *names)
        core.configure(*settings)
    hopfield.make_adaptive(**{"separation": separation, **keywords})


def _adapt_around(into: type[nn.Module], layer: Any, keywords: dict[str, Any]) -> None:
    """Adapt a layer with learned patterns around a Hopfield module."""
    _adapt_hopfield(layer.hopfield, keywords)
    turn_into(layer, into)


_present, _before = (partial(_adapt_attention, kind) for kind in (vision.ViTAttention, vision.ViTSelfAttention))
_timm, _clip = (partial(_adapt_attention, kind) for kind in (vision.TimmAttention, vision.CLIPAttention))
_layer, _pooling = (partial(_adapt_around, kind) for kind in (AdaptiveHopfieldLayer, AdaptiveHopfieldPooling))

# By name, so that no library has to be imported to be known.
CONVERTERS: dict[str, Converter] = {
    "torch.nn.modules.activation.MultiheadAttention": partial(_adapt_attention, AdaptiveAttention),
    "timm.layers.attention.Attention": _timm,
    "timm.models.vision_transformer.Attention": _timm,
    "transformers.models.vit.modeling_vit.ViTAttention": _present,
    "transformers.models.deit.modeling_deit.DeiTAttention": _present,
    "transformers.models.dinov2.modeling_dinov2.Dinov2Attention": _present,
    "transformers.models.clip.modeling_clip.CLIPAttention": _clip,
    "transformers.models.vit.modeling_vit.ViTSelfAttention": _before,
    "transformers.models.deit.modeling_deit.DeiTSelfAttention": _before,
    "transformers.models.dinov2.modeling_dinov2.Dinov2SelfAttention": _before,
    # In the oldest releases the fused form of each is a class of its own.
    "transformers.models.vit.modeling_vit.ViTSdpaSelfAttention": _before,
    "transformers.models.deit.modeling_deit.DeiTSdpaSelfAttention": _before,
    "transformers.models.dinov2.modeling_dinov2.Dinov2SdpaSelfAttention": _before,
    "transformers.models.clip.modeling_clip.CLIPSdpaAttention": _clip,
    "hflayers.Hopfield": _adapt_hopfield,
    "hflayers.HopfieldLayer": _layer,
    "hflayers.HopfieldPooling": _pooling,
    "ahop_layers.hopfield.base.OwnHopfield": _adapt_hopfield,
    "ahop_layers.hopfield.layers.OwnHopfieldLayer": _layer,
    "ahop_layers.hopfield.layers.OwnHopfieldPooling": _pooling,
}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def register_converter(source: type[nn.Module] | str, adaptive: type[Adaptive]) -> None:
    """Teach :func:`~ahop_layers.adapt_` an attention module of your own.

    Args:
        source: the class to adapt, or its full name.
        adaptive: a subclass of :class:`~ahop_layers.attention.Adaptive` with ``head_shape()`` and a ``forward`` like
            the source's, which finds the source's attributes on ``self`` and attends by ``self.associate``.

    Raises:
        AHopError: ``adaptive`` is not such a class.

    >>> import ahop_layers as ah
    >>> from einops import rearrange
    >>> from ahop_layers.attention import Adaptive
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv = nn.Linear(8, 24)
    >>> class AdaptiveMine(Adaptive):
    ...     def head_shape(self):
    ...         return 2, 4
    ...     def forward(self, x):
    ...         q, k, v = rearrange(self.qkv(x), "n l (three h d) -> three n h l d", three=3, h=2)
    ...         return self.associate(q, k, v, scaling=0.5, mask=None, dropout=0.0)[0]
    >>> ah.register_converter(Mine, AdaptiveMine)
    >>> ah.adapt_(nn.Sequential(Mine())).adapted
    {'0': 'Mine'}
    """
    if not (isinstance(adaptive, type) and issubclass(adaptive, Adaptive)):
        raise AHopError(f"adaptive must be a subclass of ahop_layers.attention.Adaptive, got {adaptive!r}")
    name = source if isinstance(source, str) else _full_name(source)
    CONVERTERS[name] = partial(_adapt_attention, adaptive)


def converter_for(module: nn.Module) -> Converter | str | None:
    """How to adapt a module, or why it cannot be adapted, or None where there is no attention."""
    kind: Any = type(module)
    if isinstance(module, (Adaptive, AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling)):
        return "it is adaptive already"
    for base in kind.__mro__:
        converter = CONVERTERS.get(_full_name(base))
        if converter is not None:
            if kind.forward is not base.forward or "forward" in vars(module):
                return f"{_full_name(kind)} has a forward of its own here; see register_converter"
            # Before transformers 5 this name belonged to a module around the attention.
            return converter if converter is not _present or hasattr(module, "q_proj") else None
    if re.search(r"Window.*Attention", kind.__name__):
        return f"{_full_name(kind)} adds a position bias to scores within windows, which no converter knows"
    if re.search(r"Attention(?!.*Output)", kind.__name__):
        return f"no converter for {_full_name(kind)}; see register_converter"
    return None
