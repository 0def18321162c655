"""Hopfield, HopfieldLayer and HopfieldPooling: the plain layers, with the interface of ``hflayers``.

They have the constructors, methods, properties, parameter names and outputs of ``hflayers`` 1.0.2. In addition they
compile and export, raise :class:`~ahop_layers.AHopError`, return zeros for fully masked rows, and repeat a static
pattern over heads without mixing samples. ``concat_bias_pattern`` only creates its parameters, so that checkpoints
load: no output of ``hflayers`` depends on them.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import hide
from ahop_layers.errors import (
    AHopError,
    check_dtype,
    check_floating,
    check_given_sizes,
    check_numbers,
    check_sizes,
    describe,
)
from ahop_layers.hopfield.core import AssociationCore, Retrieval
from ahop_layers.packed import PackedPatterns
from ahop_layers.similarity.associator import reset

Patterns = Tensor | Sequence[Tensor]
"""One tensor, or several: what a Hopfield layer takes as its input."""


def arguments(scope: dict[str, Any], *without: str) -> dict[str, Any]:
    """Returns the arguments of a constructor, given the ``locals()`` at its first line."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__", *without)}


def reads(path: str) -> Any:
    """Returns a read-only property for the attribute at a dotted path."""
    return property(attrgetter(path), doc=f"The value of ``{path}``.")


def _setting(name: str) -> Any:
    """Returns a property for a private attribute of ``hflayers.Hopfield``, which holds a setting of the core."""

    def assign(self: "Hopfield", value: Any) -> None:
        core = self.association_core
        names = ("scaling", "update_steps_max", "update_steps_eps")
        core.configure(*(value if each == name else getattr(core, each) for each in names))

    return property(attrgetter(f"association_core.{name}"), assign)


def _norm_flags(path: str) -> tuple[Any, Any]:
    """Returns two properties: whether there is a norm at a dotted path, and whether it is affine."""
    norm = attrgetter(path)
    affine = property(lambda self: getattr(norm(self), "elementwise_affine", False))
    return property(lambda self: norm(self) is not None), affine


def _norm(name: str, size: int | None, wanted: bool, affine: bool, eps: float) -> nn.LayerNorm | None:
    if affine and not wanted:
        raise AHopError(f"normalize_{name}_affine=True needs normalize_{name}=True, got False")
    if wanted and size is None:
        raise AHopError(f"normalize_{name}=True needs the size of the pattern, got input_size=None")
    return nn.LayerNorm(size, eps=eps, elementwise_affine=affine) if wanted and size is not None else None


def as_patterns(input: object, names: str, count: int) -> tuple[Tensor, ...]:
    """Returns a tensor ``count`` times, or the entries of an iterable of that length."""
    if not isinstance(input, (Tensor, Iterable)):
        raise AHopError(f"input must be a tensor, or {names} patterns, got {type(input).__name__}")
    patterns = (input,) * count if isinstance(input, Tensor) else tuple(input)
    if len(patterns) != count:
        raise AHopError(f"input must be a tensor, or {names} patterns, got {len(patterns)}")
    return patterns


class HopfieldInterface(nn.Module):
    """Methods and properties common to the three layers."""

    @property
    def _inner(self) -> "Hopfield":
        """The layer that associates: a Hopfield layer itself, or the one inside a layer with learned patterns."""
        raise NotImplementedError

    def _patterns(self, input: Any) -> Any:
        """Returns the input of the inner layer: stored, state and projection patterns."""
        return input

    def get_association_matrix(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None, with_grad: bool = False,
    ) -> Tensor:  # fmt: skip
        """Computes the weights ``(N, heads, L, S)`` of a call, with ``with_grad=True`` for a loss on them."""
        masks = (stored_pattern_padding_mask, association_mask)
        with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
            return self._inner._associate(self._patterns(input), True, False, *masks)[2]

    @torch.no_grad()
    def get_projected_pattern_matrix(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """Computes the projected patterns ``(N, heads, S, pattern_size)`` of a call, without gradient."""
        masks = (stored_pattern_padding_mask, association_mask)
        return self._inner._associate(self._patterns(input), False, True, *masks)[3]

    batch_first = reads("_inner._batch_first")
    scaling = reads("_inner.association_core.scaling")
    stored_pattern_dim = reads("_inner.association_core.kdim")
    state_pattern_dim = input_size = reads("_inner.association_core.embed_dim")
    pattern_projection_dim = reads("_inner.association_core.vdim")
    hidden_size = reads("_inner.association_core.head_dim")
    output_size = reads("_inner.association_core.out_dim")
    pattern_size = reads("_inner.association_core.pattern_dim")
    update_steps_max = reads("_inner.association_core.update_steps_max")
    update_steps_eps = reads("_inner.association_core.update_steps_eps")
    stored_pattern_as_static = reads("_inner.association_core.key_as_static")
    state_pattern_as_static = reads("_inner.association_core.query_as_static")
    pattern_projection_as_static = reads("_inner.association_core.value_as_static")
    normalize_hopfield_space = reads("_inner.association_core.normalize_pattern")
    normalize_hopfield_space_affine = reads("_inner.association_core.normalize_pattern_affine")
    normalize_stored_pattern, normalize_stored_pattern_affine = _norm_flags("_inner.norm_stored_pattern")
    normalize_state_pattern, normalize_state_pattern_affine = _norm_flags("_inner.norm_state_pattern")
    normalize_pattern_projection, normalize_pattern_projection_affine = _norm_flags("_inner.norm_pattern_projection")


class Hopfield(HopfieldInterface):
    """Associates state patterns with stored patterns and reads their pattern projections.

    Takes the arguments of ``hflayers.Hopfield``. ``scaling`` may also be a parameter, which is then trained.

    Shapes: stored patterns ``(N, S, stored_pattern_size)``, state patterns ``(N, L, input_size)``, pattern projections
    ``(N, S, pattern_projection_size)``; output ``(N, L, output_size)``. With ``batch_first=False``, N is the second
    dimension. A batch of 1 broadcasts.
    """

    # fmt: off
    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, output_size: int | None = None,
        pattern_size: int | None = None, num_heads: int = 1, scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0, update_steps_eps: float | Tensor = 1e-4,
        normalize_stored_pattern: bool = True, normalize_stored_pattern_affine: bool = True,
        normalize_stored_pattern_eps: float = 1e-5, normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True, normalize_state_pattern_eps: float = 1e-5,
        normalize_pattern_projection: bool = True, normalize_pattern_projection_affine: bool = True,
        normalize_pattern_projection_eps: float = 1e-5, normalize_hopfield_space: bool = False,
        normalize_hopfield_space_affine: bool = False, normalize_hopfield_space_eps: float = 1e-5,
        stored_pattern_as_static: bool = False, state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False, pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None, pattern_projection_size: int | None = None, batch_first: bool = True,
        association_activation: str | None = None, dropout: float = 0.0, input_bias: bool = True,
        concat_bias_pattern: bool = False, add_zero_association: bool = False, disable_out_projection: bool = False,
    ) -> None:
        # fmt: on
        nn.Module.__init__(self)  # not super(), which may be the constructor of hflayers
        check_sizes(num_heads=num_heads)
        check_given_sizes(
            input_size=input_size, hidden_size=hidden_size, output_size=output_size, pattern_size=pattern_size,
            stored_pattern_size=stored_pattern_size, pattern_projection_size=pattern_projection_size,
        )  # fmt: skip
        check_numbers("a number between 0 and 1", dropout=dropout)
        named = association_activation if isinstance(association_activation, str) else ""
        activation: Any = getattr(torch, named, None)
        if association_activation is not None and not callable(activation):
            raise AHopError(f"association_activation must name a function of torch, got {association_activation!r}")
        self.association_activation, self._batch_first = activation, batch_first
        self._input_size = input_size  # the core has none if all patterns are static
        stored_size, projection_size = stored_pattern_size or input_size, pattern_projection_size or input_size
        self.association_core = AssociationCore(
            input_size, num_heads, kdim=stored_size, vdim=projection_size, head_dim=hidden_size,
            pattern_dim=pattern_size, out_dim=output_size or input_size, query_as_static=state_pattern_as_static,
            key_as_static=stored_pattern_as_static, value_as_static=pattern_projection_as_static,
            value_as_connected=pattern_projection_as_connected, disable_out_projection=disable_out_projection,
            dropout=dropout, bias=input_bias, add_bias_kv=concat_bias_pattern, add_zero_attn=add_zero_association,
            normalize_pattern=normalize_hopfield_space, normalize_pattern_affine=normalize_hopfield_space_affine,
            normalize_pattern_eps=normalize_hopfield_space_eps,
        )
        self.association_core.configure(scaling, update_steps_max, update_steps_eps)
        self.norm_stored_pattern = _norm("stored_pattern", stored_size, normalize_stored_pattern,
                                         normalize_stored_pattern_affine, normalize_stored_pattern_eps)
        self.norm_state_pattern = _norm("state_pattern", input_size, normalize_state_pattern,
                                        normalize_state_pattern_affine, normalize_state_pattern_eps)
        self.norm_pattern_projection = _norm("pattern_projection", projection_size, normalize_pattern_projection,
                                             normalize_pattern_projection_affine, normalize_pattern_projection_eps)
        self.reset_parameters()  # a second time, as hflayers does: the same seed results in the same weights

    @property
    def _inner(self) -> "Hopfield":
        return self

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        for module in self.children():
            reset(module)

    def normalize(self, pattern: Tensor, part: int) -> Tensor:
        """Applies the input norm of part 0, 1 or 2 (state, stored, projection), if any, to ``(N, rows, size)``."""
        norm = (self.norm_state_pattern, self.norm_stored_pattern, self.norm_pattern_projection)[part]
        core = self.association_core
        size = (core.embed_dim, core.kdim, core.vdim)[part]
        static = (core.query_as_static, core.key_as_static, core.value_as_static and not core.value_as_connected)[part]
        expected = norm.normalized_shape[0] if norm is not None else None if static else size
        if expected is not None and pattern.shape[-1] != expected:
            raise AHopError(f"a pattern must be (N, rows, {expected}), got {describe(pattern)}")
        check_dtype(pattern, getattr(norm, "weight", None))
        return pattern if norm is None else norm(pattern)

    def _maybe_transpose(self, *args: Tensor) -> Any:
        """Swaps the first two axes of tensors with ``batch_first=True``; returns one tensor, or a tuple of several."""
        tensors = tuple(tensor.transpose(0, 1) for tensor in args) if self._batch_first else args
        return tensors[0] if len(tensors) == 1 else tensors

    def _associate(
        self, data: Patterns, return_raw_associations: bool = False, return_projected_patterns: bool = False,
        stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None,
    ) -> Retrieval:  # fmt: skip
        """Normalizes the patterns and calls the core; the output has the batch as its second axis, as in hflayers."""
        patterns = as_patterns(data, "stored, state and projection", 3)
        for pattern in patterns:
            check_floating(input=pattern)
            if pattern.ndim != 3:
                raise AHopError(f"a pattern must have 3 dimensions, (N, rows, size), got {describe(pattern)}")
        # Comparing one shape at a time keeps a dynamic batch dimension dynamic under export.
        batch_axis, rows_axis = (0, 1) if self._batch_first else (1, 0)
        sizes = [pattern.shape[batch_axis] for pattern in patterns if pattern.shape[batch_axis] != 1]
        batch = sizes[0] if sizes else 1
        one_batch = all(pattern.shape[batch_axis] in (1, batch) for pattern in patterns)
        if not one_batch or patterns[0].shape[rows_axis] != patterns[2].shape[rows_axis]:
            got = ", ".join(describe(pattern) for pattern in patterns)
            raise AHopError(f"patterns must be (N, S, ...), (N, L, ...), (N, S, ...) with one N and one S, got {got}")
        stored, state, projection = patterns
        if not return_projected_patterns:  # which are those of all rows
            stored, projection = hide(stored_pattern_padding_mask, stored, projection, batch_axis)
        normal = (self.normalize(pattern, part) for part, pattern in enumerate((state, stored, projection)))
        return self._call_core(
            *self._maybe_transpose(*normal),
            key_padding_mask=stored_pattern_padding_mask, attn_mask=association_mask,
            return_raw_associations=return_raw_associations, return_pattern_projections=return_projected_patterns,
        )  # fmt: skip

    def _call_core(self, *patterns: Tensor | PackedPatterns, **keywords: Any) -> Retrieval:
        """Calls the core with normalized query, key and value, and the settings of this layer."""
        core = self.association_core
        settings = {"scaling": core.scaling, "update_steps_max": core.update_steps_max}
        return core(*patterns, need_weights=False, update_steps_eps=core.update_steps_eps, **settings, **keywords)

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """Retrieves the pattern projections that the state patterns are associated with.

        Args:
            input: (stored, state, projection) patterns, or one tensor that is all three.
            stored_pattern_padding_mask: ``(N, S)``, True = ignore.
            association_mask: ``(L, S)`` or ``(N * heads, L, S)``; bool, True = ignore, or a float to add to the scores.
        """
        output = self._associate(input, False, False, stored_pattern_padding_mask, association_mask)[0]
        return self.activate(self._maybe_transpose(output))

    def activate(self, output: Tensor) -> Tensor:
        """Applies the association activation, if any."""
        return output if self.association_activation is None else self.association_activation(output)

    # The private attributes of hflayers, under the names that code outside of the class has to use.
    _Hopfield__batch_first = property(lambda self: self._batch_first, lambda self, v: setattr(self, "_batch_first", v))
    _Hopfield__scaling = _setting("scaling")
    _Hopfield__update_steps_max = _setting("update_steps_max")
    _Hopfield__update_steps_eps = _setting("update_steps_eps")


class LearnedPatterns(HopfieldInterface):
    """A layer with learned patterns, which it passes to ``self.hopfield`` together with its input."""

    _hopfield_class: type[Hopfield] = Hopfield
    hopfield: Hopfield

    @property
    def _inner(self) -> Hopfield:
        return self.hopfield

    def _prepare_input(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        """Returns stored, state and projection patterns, with the learned ones expanded to the batch of the input."""
        patterns = self._patterns(input)
        axis = 0 if self.batch_first else 1
        batch = max(pattern.shape[axis] for pattern in patterns)
        shape = (batch, -1, -1) if self.batch_first else (-1, batch, -1)
        stored, state, projection = (pattern.expand(shape) for pattern in patterns)
        return stored, state, projection

    def _weights(self, name: str, quantity: int, width: int | None, trainable: bool) -> nn.Parameter:
        check_sizes(quantity=quantity)
        if width is None:
            raise AHopError(f"{name} need the size of a pattern, got input_size=None")
        shape = (1, quantity, width) if self.hopfield.batch_first else (quantity, 1, width)
        return nn.Parameter(torch.empty(shape), requires_grad=trainable)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        self.hopfield.reset_parameters()
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """Retrieves patterns; see :class:`Hopfield` for the masks."""
        return self.hopfield(self._patterns(input), stored_pattern_padding_mask, association_mask)

    quantity = reads("_quantity")


class HopfieldLayer(LearnedPatterns):
    """Associates its input with learned patterns; takes the arguments of ``hflayers.HopfieldLayer``.

    Shapes: input ``(N, L, input_size)``, output ``(N, L, output_size)``. With ``batch_first=False``, N is the second
    dimension.
    """

    target_weights: nn.Parameter | None

    # fmt: off
    def __init__(
        self, input_size: int, hidden_size: int | None = None, output_size: int | None = None,
        pattern_size: int | None = None, num_heads: int = 1, scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0, update_steps_eps: float | Tensor = 1e-4,
        lookup_weights_as_separated: bool = False, lookup_targets_as_trainable: bool = True,
        normalize_stored_pattern: bool = True, normalize_stored_pattern_affine: bool = True,
        normalize_state_pattern: bool = True, normalize_state_pattern_affine: bool = True,
        normalize_pattern_projection: bool = True, normalize_pattern_projection_affine: bool = True,
        normalize_hopfield_space: bool = False, normalize_hopfield_space_affine: bool = False,
        stored_pattern_as_static: bool = False, state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False, pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None, pattern_projection_size: int | None = None, batch_first: bool = True,
        association_activation: str | None = None, dropout: float = 0.0, input_bias: bool = True,
        concat_bias_pattern: bool = False, add_zero_association: bool = False, disable_out_projection: bool = False,
        quantity: int = 1, trainable: bool = True,
    ) -> None:
        # fmt: on
        given = arguments(locals(), "quantity", "trainable", "lookup_weights_as_separated",
                          "lookup_targets_as_trainable")
        nn.Module.__init__(self)
        self.hopfield, self._quantity = self._hopfield_class(**given), quantity
        core = self.hopfield.association_core
        width = (core.head_dim if core.key_as_static else None) or stored_pattern_size or input_size
        self.lookup_weights = self._weights("lookup_weights", quantity, width, trainable)
        targets = None
        if lookup_weights_as_separated:
            width = pattern_projection_size or width
            targets = self._weights("target_weights", quantity, width, lookup_targets_as_trainable)
        self.register_parameter("target_weights", targets)
        self.reset_parameters()

    def _patterns(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(input, Tensor):
            raise AHopError(f"input must be a tensor (N, L, input_size), got {type(input).__name__}")
        return self.lookup_weights, input, self.lookup_weights if self.target_weights is None else self.target_weights


class HopfieldPooling(LearnedPatterns):
    """Pools bags of patterns with learned queries; takes the arguments of ``hflayers.HopfieldPooling``.

    Shapes: input ``(N, S, input_size)``, or a pair of stored patterns and pattern projections of that shape; output
    ``(N, quantity * output_size)``. With ``batch_first=False`` the input is ``(S, N, input_size)`` and the output, as
    in hflayers, ``(quantity, N * output_size)``.
    """

    # fmt: off
    def __init__(
        self, input_size: int, hidden_size: int | None = None, output_size: int | None = None,
        pattern_size: int | None = None, num_heads: int = 1, scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0, update_steps_eps: float | Tensor = 1e-4,
        normalize_stored_pattern: bool = True, normalize_stored_pattern_affine: bool = True,
        normalize_state_pattern: bool = True, normalize_state_pattern_affine: bool = True,
        normalize_pattern_projection: bool = True, normalize_pattern_projection_affine: bool = True,
        normalize_hopfield_space: bool = False, normalize_hopfield_space_affine: bool = False,
        stored_pattern_as_static: bool = False, state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False, pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None, pattern_projection_size: int | None = None, batch_first: bool = True,
        association_activation: str | None = None, dropout: float = 0.0, input_bias: bool = True,
        concat_bias_pattern: bool = False, add_zero_association: bool = False, disable_out_projection: bool = False,
        quantity: int = 1, trainable: bool = True,
    ) -> None:
        # fmt: on
        given = arguments(locals(), "quantity", "trainable")
        nn.Module.__init__(self)
        self.hopfield, self._quantity = self._hopfield_class(**given), quantity
        core = self.hopfield.association_core
        width = core.head_dim if core.query_as_static else None
        self.pooling_weights = self._weights("pooling_weights", quantity, width or input_size, trainable)
        self.reset_parameters()

    def _patterns(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        stored, projection = as_patterns(input, "stored and projection", 2)
        return stored, self.pooling_weights, projection

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """Pools bags; see :class:`Hopfield` for the masks."""
        return super().forward(input, stored_pattern_padding_mask, association_mask).flatten(1)
