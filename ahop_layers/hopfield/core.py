"""AssociationCore: the projections of a Hopfield layer, and :func:`~ahop_layers.association.associate` between them."""

from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import Padded, Similarity, Steps, Stored, associate, combine_masks, dot_product
from ahop_layers.errors import AHopError, describe
from ahop_layers.ops.operators import has_hooks
from ahop_layers.separation import Separation
from ahop_layers.similarity import Associator


class Retrieval(NamedTuple):
    """The result of a core: output ``(N, L, out)``, weights ``(N, H, L, S)`` or None, and values ``(N, H, S, e)``."""

    output: Tensor
    weights: Any
    projected: Tensor


class AssociationCore(Associator):
    """Input and output projections of an association, with the argument and parameter names of hflayers' core.

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

    # fmt: off
    def __init__(
        self, embed_dim: int | None, num_heads: int, *, kdim: int | None, vdim: int | None, head_dim: int | None,
        pattern_dim: int | None, out_dim: int | None, query_as_static: bool, key_as_static: bool, value_as_static: bool,
        value_as_connected: bool, disable_out_projection: bool, dropout: float, bias: bool, add_bias_kv: bool,
        add_zero_attn: bool, normalize_pattern: bool, normalize_pattern_affine: bool, normalize_pattern_eps: float,
    ) -> None:
        # fmt: on
        super().__init__()
        self.num_heads, self.dropout, self.add_zero_attn = num_heads, dropout, add_zero_attn
        self.query_as_static, self.key_as_static, self.value_as_static = query_as_static, key_as_static, value_as_static
        self.value_as_connected, self.normalize_pattern = value_as_connected, normalize_pattern
        self.normalize_pattern_affine, self.normalize_pattern_eps = normalize_pattern_affine, normalize_pattern_eps
        statics = (query_as_static, key_as_static, value_as_static)
        if all(statics) and disable_out_projection and not normalize_pattern:
            embed_dim = kdim = vdim = head_dim = out_dim = None  # without projections, the data determines the sizes
        elif embed_dim is None:
            raise AHopError("input_size must be given unless all patterns are static and not projected, got None")
        elif head_dim is None and embed_dim % num_heads:
            raise AHopError(f"without hidden_size, input_size must be a multiple of {num_heads} heads, got {embed_dim}")
        separate = value_as_connected or not kdim == vdim == embed_dim or pattern_dim is not None
        self.embed_dim, self.kdim, self.vdim, self.out_dim = embed_dim, kdim, vdim, out_dim
        self.head_dim = head_dim or (None if embed_dim is None else embed_dim // num_heads)
        self.pattern_dim = pattern_dim or self.head_dim
        if value_as_connected and kdim != vdim:
            raise AHopError(f"a connected pattern projection needs patterns of one size, got {kdim} and {vdim}")
        if normalize_pattern_affine and not normalize_pattern:
            raise AHopError("normalize_hopfield_space_affine needs normalize_hopfield_space, got False")
        if value_as_connected and value_as_static and self.pattern_dim != self.head_dim:
            raise AHopError(f"a connected, static projection needs pattern_size={self.head_dim}, got {pattern_dim}")
        if value_as_connected and key_as_static and not value_as_static and vdim != num_heads * (self.head_dim or 0):
            raise AHopError(f"a connected projection of static patterns must have the width of all heads, got {vdim}")
        if add_bias_kv and key_as_static and value_as_static:
            raise AHopError("concat_bias_pattern needs a projected pattern, got static ones only")

        self.similarity: nn.Module | None = None
        self.separation = Separation()
        wide, out = num_heads * (self.head_dim or 0), num_heads * (self.pattern_dim or 0)
        rows = self._rows
        # hflayers allocates a bias for a static value, which is never added.
        biases = 0 if all(statics) or not bias else sum(rows[:2]) + out
        shapes: dict[str, tuple[int, ...]] = {
            "p_norm_weight": ((self.head_dim or 0) * normalize_pattern_affine,),
            "p_norm_bias": ((self.head_dim or 0) * normalize_pattern_affine,),
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
        self.reset_parameters()

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Number of rows of the query, key and value projections; 0 for a static one."""
        wide, out = ((size or 0) * self.num_heads for size in (self.head_dim, self.pattern_dim))
        return (
            0 if self.query_as_static else wide,
            0 if self.key_as_static else wide,
            0 if self.value_as_static else out,
        )

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
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)  # hflayers' checkpoints do not contain it
            else:
                setattr(self, name, value)
        self.update_steps_max = steps
        self.steps: Steps = steps.tolist() if isinstance(steps, Tensor) else steps

    def reset_parameters(self) -> None:
        """Resets weights to a normal distribution, biases to zero, and similarity and separation to their init."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif name == "p_norm_weight":
                nn.init.ones_(parameter)
            elif name != "scaling":
                nn.init.normal_(parameter, std=0.02)
        if self.out_proj is not None:
            nn.init.normal_(self.out_proj.weight, std=0.02)
            if self.out_proj.bias is not None:
                nn.init.zeros_(self.out_proj.bias)
        reset: Any = getattr(self.similarity, "reset_parameters", None)  # a module of the user may have none
        if reset is not None:
            reset()
        self.separation.reset_parameters()

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects patterns ``(N, L, E)``, ``(N, S, E)``, ``(N, S, E)`` to heads ``(N, H, L, d)`` and so on."""
        q, k, v = (self.heads(pattern, part) for part, pattern in enumerate((query, key, value)))
        if q.shape[-1] != k.shape[-1]:
            raise AHopError(f"static patterns must have the same width, got {describe(query)} and {describe(key)}")
        return q, k, v

    def heads(self, pattern: Tensor, part: int) -> Tensor:
        """Projects part 0, 1 or 2 (query, key, value) to heads: ``(N, rows, E) -> (N, H, rows, d)``."""
        if part == 2 and self.value_as_connected:
            pattern = self._linear(pattern, 1)
        split = self._split(self._linear(pattern, part), part)
        return self.normalize(split) if self.normalize_pattern and part < 2 else split

    def normalize(self, state: Tensor) -> Tensor:
        """Applies layer normalization in the association space."""
        return functional.layer_norm(
            state, state.shape[-1:], self.p_norm_weight, self.p_norm_bias, self.normalize_pattern_eps
        )

    def _linear(self, pattern: Tensor, part: int) -> Tensor:
        """Applies the linear projection of part 0, 1 or 2 (query, key, value); a static part has none."""
        rows, start = self._rows[part], sum(self._rows[:part])
        if not rows:
            return pattern
        mine = slice(start, start + rows)
        joint = self.in_proj_weight
        weight = getattr(self, f"{'qkv'[part]}_proj_weight") if joint is None else joint[mine]
        return functional.linear(pattern, weight, None if self.in_proj_bias is None else self.in_proj_bias[mine])

    def _split(self, pattern: Tensor, part: int) -> Tensor:
        if self._rows[part] or (part == 2 and self.value_as_connected and self._rows[1]):
            return rearrange(pattern, "n l (h d) -> n h l d", h=self.num_heads)
        alone = self.out_proj is None if part == 2 else self.query_as_static and self.key_as_static
        width = self.pattern_dim if part == 2 else self.head_dim
        free = self.head_dim is None or (alone and not (part < 2 and self.normalize_pattern_affine))
        if not free and pattern.shape[-1] != width:
            name = ("state pattern", "stored pattern", "pattern projection")[part]
            raise AHopError(f"a static {name} must have the width of a head, (..., {width}), got {describe(pattern)}")
        return repeat(pattern, "n l d -> n h l d", h=self.num_heads)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores queries ``(N, H, L, d)`` against keys ``(N, H, S, d)``, before scaling: ``(N, H, L, S)``."""
        if self.scales_query:
            tiled = self.scaling.repeat(query.shape[-1])  # type: ignore[union-attr]
            query = query * rearrange(tiled, "(h d) -> h 1 d", h=self.num_heads)
        return dot_product(query, key) if self.similarity is None else self.similarity(query, key)

    @property
    def scales_query(self) -> bool:
        """Whether :meth:`score` applies ``scaling`` to the query; otherwise it multiplies the scores."""
        return isinstance(self.scaling, Tensor) and self.scaling.ndim == 1

    def _similarity(self) -> Similarity:
        """Returns :meth:`score`, or the similarity module where that is all that it computes."""
        overridden = type(self).score is not AssociationCore.score or "score" in self.__dict__
        return self.score if overridden or self.scales_query or self.similarity is None else self.similarity

    def retrieve(self, query: Tensor, stored: Stored, need_weights: bool = True) -> tuple[Tensor, Any]:
        """Associates query heads ``(N, H, L, d)`` with stored patterns: output ``(N, L, out)``, and weights or None."""
        output, weights = associate(
            query,
            stored,
            score=self._similarity(),
            separation=self.separation,
            scaling=1.0 if self.scales_query else self.scaling,
            dropout=self.dropout if self.training else 0.0,
            steps=self.steps,
            eps=self.update_steps_eps,
            need_weights=need_weights,
        )
        output = rearrange(output, "n h l d -> n l (h d)")
        return output if self.out_proj is None else self.out_proj(output), weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
        need_weights: bool = True,
    ) -> Retrieval:
        """Associates ``query (N, L, E)`` with ``key (N, S, E)`` and reads ``value (N, S, E)``; N may be 1 for each.

        A hook on this module receives the weights in any case.
        """
        q, k, v = self.project(query, key, value)
        batch, length, stored = (k if q.shape[0] == 1 else q).shape[0], q.shape[2], k.shape[2]
        mask = combine_masks(padding_mask, association_mask, (batch, self.num_heads, length, stored))
        padded = Padded(k, v, mask, self.add_zero_attn)
        output, weights = self.retrieve(q, padded, need_weights or has_hooks(self))
        return Retrieval(output, weights, padded.value.expand(batch, -1, -1, -1))
