"""``hflayers.functional``: the association of a Hopfield layer as a function of its parameters."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ahop_layers.errors import AHopError, describe
from ahop_layers.hopfield.core import AssociationCore, Retrieval

__all__ = ["hopfield_core_forward"]


# fmt: off
def hopfield_core_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor | None, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    key_as_static: bool = False, query_as_static: bool = False, value_as_static: bool = False,
    value_as_connected: bool = False, normalize_pattern: bool = False, normalize_pattern_eps: float = 1e-5,
    p_norm_weight: Tensor | None = None, p_norm_bias: Tensor | None = None, head_dim: int | None = None,
    pattern_dim: int | None = None, scaling: float | Tensor | None = None, update_steps_max: int | Tensor | None = 0,
    update_steps_eps: float | Tensor = 1e-4, return_raw_associations: bool = False,
    return_projected_patterns: bool = False,
) -> Retrieval:
    # fmt: on
    """Associates as a plain :class:`~ahop_layers.hflayers.activation.HopfieldCore` with these parameters.

    Takes the arguments that the layers of hflayers pass. No output depends on ``bias_k`` and ``bias_v``. Several heads
    of static patterns do not mix the samples of a batch.
    """
    given = locals()
    if static_k is not None or static_v is not None:
        raise AHopError("static_k and static_v must be None, as in the layers of hflayers, got a tensor")
    if query.shape[-1] != embed_dim_to_check:
        raise AHopError(f"query must be (L, N, {embed_dim_to_check}), got {describe(query)}")
    if num_heads > 1 and key_as_static and value_as_static and use_separate_proj_weight:
        raise AHopError(f"static keys and values need one head here: hflayers cuts the values, got {num_heads} heads")
    with torch.device("meta"):  # the parameters are replaced
        core: Any = AssociationCore(
            query.shape[-1], num_heads, dropout_p, kdim=key.shape[-1], vdim=value.shape[-1], head_dim=head_dim,
            pattern_dim=pattern_dim, disable_out_projection=True, add_zero_attn=add_zero_attn,
            key_as_static=key_as_static, query_as_static=query_as_static, value_as_static=value_as_static,
            value_as_connected=value_as_connected, normalize_pattern=normalize_pattern,
            normalize_pattern_affine=p_norm_weight is not None, normalize_pattern_eps=normalize_pattern_eps,
        )  # fmt: skip
    for name in [name for name in given if name.startswith(("in_proj", "q_proj", "k_proj", "v_proj", "p_norm"))]:
        delattr(core, name)  # a tensor that is no parameter may replace it
        setattr(core, name, None if name == "in_proj_weight" and use_separate_proj_weight else given[name])
    if out_proj_weight is not None:
        core.out_proj = partial(linear, weight=out_proj_weight, bias=out_proj_bias)
    return core.train(training)(
        query, key, value, key_padding_mask, need_weights, attn_mask, scaling, update_steps_max, update_steps_eps,
        return_raw_associations, return_projected_patterns,
    )  # fmt: skip
