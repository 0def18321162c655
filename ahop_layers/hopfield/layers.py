"""HopfieldLayer and HopfieldPooling: Hopfield layers with learned patterns.

The plain layers have the constructors, methods, properties, parameter names and outputs of ``hflayers`` 1.0.2. In
addition they compile and export, raise :class:`~ahop_layers.AHopError`, return zeros for fully masked rows, and repeat
a static pattern over heads without mixing samples. ``concat_bias_pattern`` only creates its parameters, so that
checkpoints load: no output of ``hflayers`` depends on them.
"""

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_sizes
from ahop_layers.hopfield.base import Hopfield, HopfieldInterface, Patterns, arguments, as_patterns, reads


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
        """Retrieves patterns; the masks are those of :class:`Hopfield`."""
        return self.hopfield(self._patterns(input), stored_pattern_padding_mask, association_mask)

    quantity = reads("_quantity")


class HopfieldLayer(LearnedPatterns):
    """Associates its input with learned patterns; the arguments are those of ``hflayers.HopfieldLayer``.

    Shapes: input ``(N, L, input_size)``, output ``(N, L, output_size)``. With ``batch_first=False``, N is the second
    dimension.

    >>> HopfieldLayer(input_size=8, quantity=16)(torch.randn(3, 4, 8)).shape
    torch.Size([3, 4, 8])
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
    """Pools bags of patterns with learned queries; the arguments are those of ``hflayers.HopfieldPooling``.

    Shapes: input ``(N, S, input_size)``, or a pair of stored patterns and pattern projections of that shape; output
    ``(N, quantity * output_size)``. With ``batch_first=False`` the input is ``(S, N, input_size)`` and the output, as
    in hflayers, ``(quantity, N * output_size)``.

    >>> HopfieldPooling(input_size=8, quantity=2)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 16])
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
        """Pools bags; the masks are those of :class:`Hopfield`."""
        return super().forward(input, stored_pattern_padding_mask, association_mask).flatten(1)
