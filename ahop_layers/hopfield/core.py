"""AssociationCore: the projections of a Hopfield layer, and :func:`~ahop_layers.association.associate` between them."""

from collections.abc import Sequence
from functools import partial
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import Padded, Steps, associate, combine_masks
from ahop_layers.errors import AHopError, check_dtype, describe
from ahop_layers.ops.operators import has_hooks, is_transformed
from ahop_layers.packed import Packed, PackedPatterns
from ahop_layers.separation import Separation
from ahop_layers.similarity.associator import Associator, reset
from ahop_layers.similarity.protocol import ScoreFunction, dot_product


class Retrieval(NamedTuple):
    """The result of a core, as in hflayers; entries that were not requested are None."""

    output: Tensor  # (L, N, out)
    mean_weights: Any  # weights averaged over heads, before dropout, (N, L, S)
    weights: Any  # (N, H, L, S), or for packed bags (total, H, L)
    projected: Any  # projected values, (N, H, S, e)


class AssociationCore(Associator):
    """Input and output projections of an association: ``hflayers.activation.HopfieldCore``, with the same arguments.

    A static query or key is not projected: it has the width of a head, and every head receives all of it. If both are
    static, any width is accepted, and with ``embed_dim=None`` the data determines every size. ``similarity`` is None
    for the dot product.
    """

    _added = ("similarity", "separation", "scaling")
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    p_norm_weight: Tensor | None
    p_norm_bias: Tensor | None
    scaling: float | Tensor
    update_steps_eps: float | Tensor
    # Copies and earlier releases of hflayers do not set these.
    normalize_pattern_eps = 1e-5
    static_execution = False

    # fmt: off
    def __init__(
        self, embed_dim: int | None = None, num_heads: int = 1, dropout: float = 0.0, bias: bool = True,
        add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None,
        head_dim: int | None = None, pattern_dim: int | None = None, out_dim: int | None = None,
        disable_out_projection: bool = False, key_as_static: bool = False, query_as_static: bool = False,
        value_as_static: bool = False, value_as_connected: bool = False, normalize_pattern: bool = False,
        normalize_pattern_affine: bool = False, normalize_pattern_eps: float = 1e-5,
    ) -> None:
        # fmt: on
        super().__init__()
        self.num_heads, self.dropout, self.add_zero_attn = num_heads, dropout, add_zero_attn
        self.query_as_static, self.key_as_static, self.value_as_static = query_as_static, key_as_static, value_as_static
        self.value_as_connected, self.disable_out_projection = value_as_connected, disable_out_projection
        self.normalize_pattern, self.normalize_pattern_affine = normalize_pattern, normalize_pattern_affine
        self.normalize_pattern_eps = normalize_pattern_eps
        kdim, vdim, out_dim = kdim or embed_dim, vdim or embed_dim, out_dim or embed_dim
        statics = (query_as_static, key_as_static, value_as_static)
        self.static_execution = all((*statics, disable_out_projection, not value_as_connected, not normalize_pattern))
        if self.static_execution:
            embed_dim = kdim = vdim = head_dim = out_dim = None  # without projections, the data determines the sizes
        elif embed_dim is None:
            raise AHopError("input_size must be given unless all patterns are static and not projected, got None")
        elif head_dim is None and embed_dim % num_heads:
            raise AHopError(f"without hidden_size, input_size must be a multiple of {num_heads} heads, got {embed_dim}")
        separate = value_as_connected or not kdim == vdim == embed_dim or pattern_dim is not None
        self.embed_dim, self.kdim, self.vdim, self.out_dim = embed_dim, kdim, vdim, out_dim
        self.head_dim = head_dim or (None if embed_dim is None else embed_dim // num_heads)
        self.pattern_dim = pattern_dim or self.head_dim
        wide, out = (num_heads * (size or 0) for size in (self.head_dim, self.pattern_dim))
        if value_as_connected and kdim != vdim:
            raise AHopError(f"a connected pattern projection needs patterns of one size, got {kdim} and {vdim}")
        if normalize_pattern_affine and not normalize_pattern:
            raise AHopError("normalize_hopfield_space_affine needs normalize_hopfield_space, got False")
        if value_as_connected and value_as_static and self.pattern_dim != self.head_dim:
            raise AHopError(f"a connected, static projection needs pattern_size={self.head_dim}, got {pattern_dim}")
        if value_as_connected and key_as_static and not value_as_static and vdim != wide:
            raise AHopError(f"a connected projection of static patterns must have the width of all heads, got {vdim}")
        if add_bias_kv and key_as_static and value_as_static:
            raise AHopError("concat_bias_pattern needs a projected pattern, got static ones only")

        self.similarity: nn.Module | None = None
        self.separation = Separation()
        rows, norm = self._rows, (self.head_dim or 0) * normalize_pattern_affine
        # hflayers allocates a bias for a static value, which is never added.
        biases = 0 if all(statics) or not bias else sum(rows[:2]) + out
        shapes: dict[str, tuple[int, ...]] = {
            "p_norm_weight": (norm,),
            "p_norm_bias": (norm,),
            "in_proj_weight": (0 if separate else sum(rows), embed_dim or 0),
            "q_proj_weight": (rows[0] * separate, embed_dim or 0),
            "k_proj_weight": (rows[1] * separate, kdim or 0),
            "v_proj_weight": (rows[2] * separate, (wide if value_as_connected else vdim) or 0),
            "in_proj_bias": (biases,),
            "bias_k": (1, 1, wide * (add_bias_kv and not key_as_static)),
            "bias_v": (1, 1, wide * (add_bias_kv and not value_as_static)),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if prod(shape) else None)
        self.out_proj = None if disable_out_projection else nn.Linear(out, out_dim or 0, bias=bias)
        self.configure(1.0, 0, 1e-4)
        self.reset_parameters()

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Number of rows of the query, key and value projections; 0 for a static one."""
        wide, out = ((size or 0) * self.num_heads for size in (self.head_dim, self.pattern_dim))
        return wide * (not self.query_as_static), wide * (not self.key_as_static), out * (not self.value_as_static)

    def configure(self, scaling: float | Tensor | None, steps: int | Tensor | None, eps: float | Tensor) -> None:
        """Sets the scaling of the scores, and the number of update steps and their convergence threshold.

        A scaling that is a number, or a tensor ``()`` or ``(H, 1, 1)``, multiplies the scores. A tensor ``(H,)`` has
        the meaning it has in hflayers: entry ``j mod H`` multiplies dimension ``j`` of the concatenated query heads.
        """
        if scaling is None:
            scaling = 1.0 if self.head_dim is None else 1 / sqrt(self.head_dim)
        per_head: tuple[tuple[int, ...], ...] = ((), (self.num_heads,))
        for name, value, shapes in (
            ("scaling", scaling, (*per_head, (self.num_heads, 1, 1))),
            ("update_steps_max", 0 if steps is None else steps, per_head),
            ("update_steps_eps", eps, per_head),
        ):
            if not isinstance(value, (int, float, Tensor)):
                raise AHopError(f"{name} must be a number or a tensor, got {value!r}")
            if isinstance(value, Tensor) and tuple(value.shape) not in shapes:
                raise AHopError(f"{name} must be a number or have a shape of {shapes}, got {describe(value)}")
        if isinstance(steps, float) or (isinstance(steps, Tensor) and steps.is_floating_point()):
            raise AHopError(f"update_steps_max must be an integer, an integer tensor or None, got {steps!r}")
        for name, value in (("scaling", scaling), ("update_steps_eps", eps)):
            if hasattr(self, name):
                delattr(self, name)  # a number may replace a buffer or parameter
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=False)  # hflayers' checkpoints do not contain it
            else:
                setattr(self, name, value)
        self.update_steps_max = steps
        self.steps: Steps = as_steps(steps)

    def reset_parameters(self) -> None:
        """Resets all parameters; random numbers are drawn in the order of hflayers: a seed gives the same weights."""
        weights = [getattr(self, f"{name}_weight") for name in ("in_proj", "q_proj", "k_proj", "v_proj")]
        weight, bias = (getattr(self.out_proj, name, None) for name in ("weight", "bias"))
        for parameter in (*weights, weight, self.bias_k, self.bias_v):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)
        for parameter in (self.in_proj_bias, self.p_norm_bias, bias):
            if parameter is not None:
                nn.init.zeros_(parameter)
        if self.p_norm_weight is not None:
            nn.init.ones_(self.p_norm_weight)
        reset(self.similarity)
        self.separation.reset_parameters()

    def _projections(self) -> list[tuple[Any, Any]]:
        """Returns weight and bias of the query, key and value projections, cut at once: their gradients are joined."""
        rows, joint, bias = self._rows, self.in_proj_weight, self.in_proj_bias
        apart = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = apart if joint is None else torch.split_with_sizes(joint, rows)
        if bias is None:
            return [(weight, None) for weight in weights]
        used = bias if len(bias) == sum(rows) else bias[: sum(rows)]  # a static value has one, which is never added
        return list(zip(weights, torch.split_with_sizes(used, rows), strict=True))

    def _heads(self, projections: Sequence[Any], pattern: Tensor, part: int) -> Tensor:
        """Projects part 0, 1 or 2 (query, key, value) to heads: ``(N, rows, E) -> (N, H, rows, d)``."""
        if part == 2 and self.value_as_connected:
            pattern = self._linear(pattern, 1, *projections[1])
        split = self._split(self._linear(pattern, part, *projections[part]), part)
        if part == 2 or not self.normalize_pattern:
            return split
        affine = self.p_norm_weight, self.p_norm_bias
        return functional.layer_norm(split, split.shape[-1:], *affine, self.normalize_pattern_eps)

    def _linear(self, pattern: Tensor, part: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Applies the linear projection of part 0, 1 or 2 (query, key, value); a static part has none."""
        if not self._rows[part]:
            return pattern
        check_dtype(pattern, weight)
        return functional.linear(pattern, weight, bias)

    def _split(self, pattern: Tensor, part: int) -> Tensor:
        if self._rows[part] or (part == 2 and self.value_as_connected and self._rows[1]):
            return torch.unflatten(pattern, -1, (self.num_heads, -1)).transpose(1, 2)
        alone = self.out_proj is None if part == 2 else self.query_as_static and self.key_as_static
        width = self.pattern_dim if part == 2 else self.head_dim
        free = self.head_dim is None or (alone and not (part < 2 and self.normalize_pattern_affine))
        if not free and pattern.shape[-1] != width:
            name = ("state pattern", "stored pattern", "pattern projection")[part]
            raise AHopError(f"a static {name} must have the width of a head, (..., {width}), got {describe(pattern)}")
        return repeat(pattern, "n l d -> n h l d", h=self.num_heads)

    def forward(
        self, query: Tensor, key: Tensor | PackedPatterns, value: Any, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, scaling: float | Tensor | None = None,
        update_steps_max: int | Tensor | None = 0, update_steps_eps: float | Tensor = 1e-4,
        return_raw_associations: bool = False, return_pattern_projections: bool = False,
    ) -> Retrieval:  # fmt: skip
        """Associates ``query (L, N, E)`` with ``key (S, N, E)`` and reads ``value (S, N, E)``; N may be 1 for each.

        As in ``HopfieldCore.forward``, scores are not scaled without ``scaling``. A hook on this module receives the
        weights in any case. Packed bags are passed as both ``key`` and ``value``, without
        masks, and have no pattern projections.
        """
        steps = self.steps if update_steps_max is self.update_steps_max else as_steps(update_steps_max)
        heads = partial(self._heads, self._projections())
        # With batch_first=True these views undo the transposition of the layer: projections read contiguous memory.
        state = heads(query.transpose(0, 1), 0)
        stored: Padded | Packed
        if isinstance(key, PackedPatterns):
            stored = Packed(key, heads, zero_association=self.add_zero_attn, keep_keys=steps != 0)
        else:
            keys, values = heads(key.transpose(0, 1), 1), heads(value.transpose(0, 1), 2)
            stored = self._pad(state, keys, values, key_padding_mask, attn_mask)
        similarity: ScoreFunction = dot_product if self.similarity is None else self.similarity
        score, scaling = similarity, 1.0 if scaling is None else scaling
        if isinstance(scaling, Tensor) and scaling.ndim == 1:
            factors = rearrange(scaling.repeat(state.shape[-1]), "(h d) -> h 1 d", h=self.num_heads)
            score, scaling = lambda query, key: similarity(query * factors, key), 1.0
        output, weights = associate(
            state, stored, score=score, separation=self.separation, scaling=scaling,
            dropout=self.dropout if self.training else 0.0, steps=steps, eps=update_steps_eps,
            need_weights=need_weights or return_raw_associations or has_hooks(self),
        )  # fmt: skip
        output = output.transpose(1, 2).flatten(2)
        output = output if self.out_proj is None else self.out_proj(output)
        projected = None
        if isinstance(stored, Packed):
            weights = None if weights is None else stored.of_instances(weights)
        elif return_pattern_projections:
            projected = stored.value.expand(output.shape[0], -1, -1, -1)
        return Retrieval(output.transpose(0, 1), weights.mean(1) if need_weights else None, weights, projected)

    def _pad(
        self, state: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None, association: Tensor | None
    ) -> Padded:
        """Combines the masks for keys and values ``(N, H, S, d)`` and the queries ``(N, H, L, d)``."""
        _check_padding(padding)
        if state.shape[-1] != keys.shape[-1]:
            got = f"heads of the queries {describe(state)} and of the keys {describe(keys)}"
            raise AHopError(f"static patterns must have the same width, got {got}")
        batch = (keys if state.shape[0] == 1 else state).shape[0]
        mask = combine_masks(padding, association, (batch, *state.shape[1:3], keys.shape[2]))
        if self.add_zero_attn:
            mask = None if mask is None else mask.grow(state, keys)
            keys, values = (functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
        return Padded(keys, values, mask)


def _check_padding(mask: object) -> None:
    """Raises for a floating-point mask of 0 and 1, which would be added to the scores; hflayers has no such masks."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or mask.is_meta:
        return
    if torch.compiler.is_compiling() or is_transformed():  # which cannot branch on data
        return
    if bool((mask == 1).any() & ((mask == 0) | (mask == 1)).all()):
        rule = "stored_pattern_padding_mask must be a bool mask, True = ignore, or a float to add to the scores"
        raise AHopError(f"{rule}, got a float mask of 0 and 1: call mask.bool()")


def as_steps(steps: int | Tensor | None) -> Steps:
    """Converts the number of update steps of a layer, or of each head, to integers."""
    return steps.tolist() if isinstance(steps, Tensor) else steps
