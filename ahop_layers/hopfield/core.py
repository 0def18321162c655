"""AssociationCore: the projections of a Hopfield layer around :func:`~ahop_layers.association.associate`."""

from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import Steps, associate, combine_masks, dot_product
from ahop_layers.errors import AHopError, describe
from ahop_layers.separation import Separation
from ahop_layers.similarity import Associator


class Retrieval(NamedTuple):
    """What a core gives: output ``(N, L, out)``, weights ``(N, H, L, S)``, projected values ``(N, H, S, e)``."""

    output: Tensor
    weights: Tensor
    projected: Tensor


class AssociationCore(Associator):
    """Projections around :func:`associate`, with the argument and parameter names of hflayers' core.

    A static query or key is not projected: it is as wide as a head, and every head sees all of it. Where both are
    static their width is free, and with ``embed_dim=None`` only the data knows any size. ``similarity`` is None for the
    dot product.
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
            embed_dim = kdim = vdim = head_dim = out_dim = None  # nothing is projected: the data has the sizes
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
            raise AHopError(f"a connected projection of static patterns must be as wide as all heads, got {vdim}")
        if add_bias_kv and key_as_static and value_as_static:
            raise AHopError("concat_bias_pattern needs a projected pattern, got static ones only")

        self.similarity: nn.Module | None = None
        self.separation = Separation()
        wide, out = num_heads * (self.head_dim or 0), num_heads * (self.pattern_dim or 0)
        rows = self._rows
        # hflayers keeps room for the bias of a static value, which is never added.
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
        """How many rows of the projections make query, key and value; a static part has none."""
        wide, out = ((size or 0) * self.num_heads for size in (self.head_dim, self.pattern_dim))
        return (
            0 if self.query_as_static else wide,
            0 if self.key_as_static else wide,
            0 if self.value_as_static else out,
        )

    def configure(self, scaling: float | Tensor | None, steps: int | Tensor | None, eps: float | Tensor) -> None:
        """Set how scores are scaled and how often states are updated.

        A number, or a tensor ``()`` or ``(H, 1, 1)``, multiplies the scores. Of a tensor ``(H,)`` the entry ``j mod H``
        multiplies dimension ``j`` of the joined heads of the query, which is what hflayers makes of it.
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
        for name, value in (("scaling", scaling), ("update_steps_eps", eps)):
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)  # hflayers' checkpoints do not have it
            else:
                setattr(self, name, value)
        self.update_steps_max = steps
        self.steps: Steps = steps.tolist() if isinstance(steps, Tensor) else steps

    def reset_parameters(self) -> None:
        """Small normal weights, no biases, and the warm start of the similarity."""
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
        """Patterns ``(N, L, E)``, ``(N, S, E)``, ``(N, S, E)`` to heads: ``(N, H, L, d)`` and so on."""
        q, k, v = (self.heads(pattern, part) for part, pattern in enumerate((query, key, value)))
        if q.shape[-1] != k.shape[-1]:
            raise AHopError(f"static patterns must be equally wide, got {describe(query)} and {describe(key)}")
        return q, k, v

    def heads(self, pattern: Tensor, part: int) -> Tensor:
        """Part 0, 1, 2 (query, key, value) of :meth:`project`: ``(N, rows, E) -> (N, H, rows, d)``."""
        if part == 2 and self.value_as_connected:
            pattern = self._linear(pattern, 1)
        split = self._split(self._linear(pattern, part), part)
        return self.normalize(split) if self.normalize_pattern and part < 2 else split

    def normalize(self, state: Tensor) -> Tensor:
        """Layer normalisation in the association space."""
        return functional.layer_norm(
            state, state.shape[-1:], self.p_norm_weight, self.p_norm_bias, self.normalize_pattern_eps
        )

    def _linear(self, pattern: Tensor, part: int) -> Tensor:
        """Project by part 0, 1, 2 (query, key, value) of the weights; a static part leaves the pattern alone."""
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
            raise AHopError(f"a static {name} must be as wide as a head, (..., {width}), got {describe(pattern)}")
        return repeat(pattern, "n l d -> n h l d", h=self.num_heads)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """``(N, H, L, d)``, ``(N, H, S, d)`` -> ``(N, H, L, S)``, before scaling."""
        if self.scales_query:
            tiled = self.scaling.repeat(query.shape[-1])  # type: ignore[union-attr]
            query = query * rearrange(tiled, "(h d) -> h 1 d", h=self.num_heads)
        return dot_product(query, key) if self.similarity is None else self.similarity(query, key)

    @property
    def scales_query(self) -> bool:
        """Whether ``scaling`` acts on the query, inside :meth:`score`, and not on its result."""
        return isinstance(self.scaling, Tensor) and self.scaling.ndim == 1

    def read_out(self, output: Tensor) -> Tensor:
        """Join the heads of ``(N, H, L, e)`` and project them: ``(N, L, out)``."""
        output = rearrange(output, "n h l d -> n l (h d)")
        return output if self.out_proj is None else self.out_proj(output)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Retrieval:
        """Associate ``query (N, L, E)`` with ``key (N, S, E)`` and read from ``value (N, S, E)``; N may be 1."""
        q, k, v = self.project(query, key, value)
        batch, length, stored = (k if q.shape[0] == 1 else q).shape[0], q.shape[2], k.shape[2]
        mask = combine_masks(padding_mask, association_mask, (batch, self.num_heads, length, stored))
        if self.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
            mask = None if mask is None else mask.grow()
        output, weights = associate(
            q,
            k,
            v,
            score=self.score,
            separation=self.separation,
            scaling=1.0 if self.scales_query else self.scaling,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            steps=self.steps,
            eps=self.update_steps_eps,
        )
        return Retrieval(self.read_out(output), weights, v.expand(batch, -1, -1, -1))
