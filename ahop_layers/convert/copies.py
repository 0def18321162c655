"""Copies of hflayers under other module names: recognized by their attributes, and checked by one call."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.convert.find import in_eval_mode
from ahop_layers.convert.registry import CONVERTERS, Converter, full_name
from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation
from ahop_layers.similarity.options import SimilarityOptions

_FORWARD_ARGUMENTS = {"input", "stored_pattern_padding_mask", "association_mask"}
_HOPFIELD_ATTRIBUTES = (
    "association_activation", "norm_stored_pattern", "norm_state_pattern", "norm_pattern_projection", "scaling",
    "batch_first", "input_size", "update_steps_max", "update_steps_eps", "get_association_matrix",
)  # fmt: skip
_CORE_ATTRIBUTES = (
    "embed_dim", "kdim", "vdim", "head_dim", "pattern_dim", "out_dim", "num_heads", "dropout", "query_as_static",
    "key_as_static", "value_as_static", "value_as_connected", "normalize_pattern", "normalize_pattern_affine",
    "add_zero_attn", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj",
    "bias_k", "bias_v", "p_norm_weight", "p_norm_bias",
)  # fmt: skip
_LEARNED = {"lookup_weights": "HopfieldLayer", "pooling_weights": "HopfieldPooling"}  # by their learned patterns
_SEPARATIONS = ("softmax", "sparsemax", "entmax15")


def find_copies(
    model: nn.Module, like: type | None = None, selected: Callable[[str, nn.Module], bool] | None = None
) -> dict[nn.Module, Converter]:
    """Returns the converters of the modules that are copies of a layer of hflayers.

    With ``like``, a class with the name of one of hflayers, the modules that ``selected`` chooses are not checked.
    """
    given = getattr(like, "__name__", "").removeprefix("Adaptive")
    if like is not None and f"hflayers.{given}" not in CONVERTERS:
        raise AHopError(f"like must be Hopfield, HopfieldLayer or HopfieldPooling, got {like!r}")
    if like is not None and selected is None:
        raise AHopError("like needs where, which chooses the modules that are copies of it, got where=None")
    copies = {}
    for name, module in model.named_modules():
        if like is not None and selected is not None and selected(name, module):
            if _core(module, given) is not None:
                copies[module] = CONVERTERS[f"hflayers.{given}"]
        elif not any(full_name(base) in CONVERTERS for base in type(module).__mro__):
            kind = _kind(module)
            if kind is not None:
                copies[module] = _checked(CONVERTERS[f"hflayers.{kind}"])
    return copies


def _core(module: nn.Module, kind: str) -> nn.Module | None:
    """Returns the association core of a Hopfield layer, or of the one inside a layer with learned patterns."""
    core = getattr(module if kind == "Hopfield" else getattr(module, "hopfield", None), "association_core", None)
    return core if isinstance(core, nn.Module) else None


def _kind(module: nn.Module) -> str | None:
    """Returns the name of the class of hflayers whose attributes and arguments a module has, or None."""
    hopfield, parameters = getattr(module, "hopfield", module), dict(module.named_parameters(recurse=False))
    outer = next((kind for name, kind in _LEARNED.items() if name in parameters), None)
    kind = "Hopfield" if hopfield is module else outer
    core = None if kind is None else _core(module, kind)
    expected = ((hopfield, _HOPFIELD_ATTRIBUTES), (core, _CORE_ATTRIBUTES))
    fits = all(hasattr(part, name) for part, names in expected for name in names)
    return kind if fits and set(inspect.signature(module.forward).parameters) == _FORWARD_ARGUMENTS else None


def _checked(converter: Converter) -> Converter:
    """Returns a converter that keeps the separation of the original layer, and raises if its weights differ."""

    @torch.no_grad()
    def convert(layer: Any, options: SimilarityOptions) -> None:
        hopfield, name = getattr(layer, "hopfield", layer), full_name(type(layer))
        patterns, core = _example(hopfield), hopfield.association_core
        with in_eval_mode(hopfield):
            expected = None if patterns is None else hopfield.get_association_matrix(patterns)
        converter.convert(layer, options)
        if expected is None:
            return
        similarity, core.similarity, separation = core.similarity, None, core.separation
        with in_eval_mode(hopfield):
            found = next((each for each in _SEPARATIONS if _agrees(hopfield, patterns, expected, each)), None)
        if found is None:
            raise AHopError(
                f"{name} has the parts of a Hopfield layer, but its weights are none of {_SEPARATIONS} of the dot"
                " product; pass like=... and where=... to adapt it all the same"
            )
        core.similarity = similarity
        core.separation = separation if options.separation is not None else core.separation.train(core.training)

    return converter._replace(convert=convert)


def _agrees(hopfield: Any, patterns: Any, expected: Tensor, separation: str) -> bool:
    hopfield.association_core.separation = Separation(separation).to(expected)
    weights: Tensor = hopfield.get_association_matrix(patterns)
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 1e-2
    return weights.shape == expected.shape and torch.allclose(weights, expected, atol=tolerance, rtol=tolerance)


def _example(hopfield: Any) -> tuple[Tensor, ...] | None:
    """Returns random stored, state and projection patterns of one sample, or None for a layer on the meta device."""
    core, parameter = hopfield.association_core, next(hopfield.parameters(), torch.empty(0))
    if parameter.is_meta:
        return None
    free = core.head_dim or 8
    shapes = (
        (1, 5, free if core.key_as_static else core.kdim),
        (1, 3, free if core.query_as_static else core.embed_dim),
        (1, 5, (core.pattern_dim or free) if core.value_as_static else core.vdim),
    )
    generator = torch.Generator().manual_seed(0)
    # Large patterns: without normalization, the separations differ clearly.
    patterns = (8 * torch.randn(shape, generator=generator).to(parameter) for shape in shapes)
    return tuple(pattern if hopfield.batch_first else pattern.transpose(0, 1) for pattern in patterns)
