"""Copies of hflayers under other module names: recognized by their parts, and checked by one call."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers import hopfield as layers
from ahop_layers.convert.registry import CONVERTERS, Converter, full_name
from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation
from ahop_layers.similarity import SimilarityOptions

_LAYER = {"input", "stored_pattern_padding_mask", "association_mask"}
_HOPFIELD = ("association_activation", "norm_stored_pattern", "norm_state_pattern", "norm_pattern_projection",
             "scaling", "batch_first", "input_size", "update_steps_max", "update_steps_eps",
             "get_association_matrix")  # fmt: skip
_CORE = ("embed_dim", "kdim", "vdim", "head_dim", "pattern_dim", "out_dim", "num_heads", "dropout", "query_as_static",
         "key_as_static", "value_as_static", "value_as_connected", "normalize_pattern", "normalize_pattern_affine",
         "add_zero_attn", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
         "out_proj", "bias_k", "bias_v", "p_norm_weight", "p_norm_bias")  # fmt: skip
_SEPARATIONS = ("softmax", "sparsemax", "entmax15")
_ADAPTIVE = (layers.AdaptiveHopfield, layers.AdaptiveHopfieldLayer, layers.AdaptiveHopfieldPooling)
# An adaptive layer derives from our plain one, and from that of hflayers if it is installed.
_KINDS = {
    kind: [each for each in adaptive.__mro__ if each.__name__.removeprefix("Adaptive") == kind]
    for kind, adaptive in zip(("Hopfield", "HopfieldLayer", "HopfieldPooling"), _ADAPTIVE, strict=True)
}


def _kind(module: nn.Module) -> str | None:
    """Returns the class of hflayers that a module has the parts and the call of, or None."""
    inner = getattr(module, "hopfield", module)
    core = getattr(inner, "association_core", None)
    if not isinstance(core, nn.Module) or not all(hasattr(core, name) for name in _CORE):
        return None
    if not all(hasattr(inner, name) for name in _HOPFIELD):
        return None
    if set(inspect.signature(module.forward).parameters) != _LAYER:
        return None
    if inner is module:
        return "Hopfield"
    learned = {name for name, _ in module.named_parameters(recurse=False)}
    return {"lookup_weights": "HopfieldLayer", "pooling_weights": "HopfieldPooling"}.get(
        next(iter(learned & {"lookup_weights", "pooling_weights"}), "")
    )


def register_copies(
    model: nn.Module, like: type | None = None, selected: Callable[[str, nn.Module], bool] | None = None
) -> None:
    """Adds converters for the classes in a model that are copies of a class of hflayers.

    Args:
        model: the model to search.
        like: a class of hflayers or of this package; every module that ``selected`` chooses is a copy of it.
        selected: which modules ``like`` describes.

    Raises:
        AHopError: ``like`` is another class, or is given without ``selected``.
    """
    told = None
    if like is not None:
        told = next((kind for kind, known in _KINDS.items() if like in known), None)
        if told is None:
            raise AHopError(f"like must be Hopfield, HopfieldLayer or HopfieldPooling, got {like!r}")
        if selected is None:
            raise AHopError("like needs where, which chooses the modules that are copies of it, got where=None")
    for name, module in model.named_modules():
        name_of_class = full_name(type(module))
        if told is not None and selected is not None and selected(name, module):
            CONVERTERS[name_of_class] = CONVERTERS[f"hflayers.{told}"]
        elif not any(full_name(base) in CONVERTERS for base in type(module).__mro__):
            kind = _kind(module)
            if kind is not None:
                CONVERTERS[name_of_class] = _checked(CONVERTERS[f"hflayers.{kind}"])


def _checked(converter: Converter) -> Converter:
    return converter._replace(convert=partial(_adapt_checked, converter))


@torch.no_grad()
def _adapt_checked(converter: Converter, layer: Any, options: SimilarityOptions) -> None:
    """Converts a layer, finds the separation of the original by comparing weights, and raises if none fits."""
    hopfield = getattr(layer, "hopfield", layer)
    patterns = _example(hopfield)
    name, training = full_name(type(layer)), layer.training
    hopfield.eval()
    expected = None if patterns is None else hopfield.get_association_matrix(patterns)
    converter.convert(layer, options)
    core = hopfield.association_core
    chosen = core.similarity, core.separation
    if expected is not None:
        core.similarity = None
        found = next((name for name in _SEPARATIONS if _agrees(hopfield, patterns, expected, name)), None)
        core.similarity = chosen[0]
        if found is None:
            raise AHopError(
                f"{name} has the parts of a Hopfield layer, but its weights are none of"
                f" {_SEPARATIONS} of the dot product; pass like=... and where=... to adapt it all the same"
            )
        core.separation = chosen[1] if options.separation is not None else Separation(found).to(expected)
    layer.train(training)


def _agrees(hopfield: Any, patterns: Any, expected: Tensor, separation: str) -> bool:
    hopfield.association_core.separation = Separation(separation).to(expected)
    weights: Tensor = hopfield.get_association_matrix(patterns)
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 1e-2
    return weights.shape == expected.shape and torch.allclose(weights, expected, atol=tolerance, rtol=tolerance)


def _example(hopfield: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns random patterns of one sample, or None for a layer on the meta device."""
    core = hopfield.association_core
    like = next(hopfield.parameters(), torch.empty(0))
    if like.is_meta:
        return None
    free = core.head_dim or 8
    widths = (
        free if core.key_as_static else core.kdim,
        free if core.query_as_static else core.embed_dim,
        (core.pattern_dim or free) if core.value_as_static else core.vdim,
    )
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 5, widths[0]), (1, 3, widths[1]), (1, 5, widths[2])]
    if not hopfield.batch_first:
        shapes = [(rows, batch, width) for batch, rows, width in shapes]
    # Large patterns: without normalization, the separations differ clearly.
    stored, state, projection = ((8 * torch.randn(shape, generator=generator)).to(like) for shape in shapes)
    return stored, state, projection
