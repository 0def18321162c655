"""AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling: the layers of hflayers with a learned similarity.

Each takes every argument of the class it replaces, and the keywords that :class:`AdaptiveHopfield` explains.
"""

from collections.abc import Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from ahop_layers.hopfield.base import arguments
from ahop_layers.hopfield.layers import LAYER_ONLY, HopfieldBase, HopfieldLayerBase, HopfieldPoolingBase
from ahop_layers.packed import Packed, check_bags
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity, LazyAdaptiveSimilarity


class AdaptiveHopfield(HopfieldBase):
    """``hflayers.Hopfield`` with a learned similarity: state patterns look up what they need among stored ones.

    It takes every argument of the class it replaces, in the same order with the same defaults, and more by keyword.

    Args:
        bases, init, debias: see :class:`~ahop_layers.AdaptiveSimilarity`. Every head has weights of its own. With the
            default ``init="dot"`` the layer computes what the one it replaces computes, until it is trained.
        separation: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax"`` (alpha is learned), ``"argmax"``, or a
            :class:`~ahop_layers.separation.Separation`.
        scaling: multiplies the score. A tensor is a buffer, a parameter is learned; the shape ``()`` means one factor
            and ``(heads, 1, 1)`` one per head, while ``(heads,)`` means what it means in hflayers.

    Shapes:
        input ``(N, L, input_size)``, or stored ``(N, S, stored_pattern_size)``, state ``(N, L, input_size)`` and
        projection ``(N, S, pattern_projection_size)`` patterns; output ``(N, L, output_size)``.

    Raises:
        AHopError: an argument that does not fit.

    >>> layer = AdaptiveHopfield(input_size=8, num_heads=2, separation="sparsemax")
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
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
        *, bases: Sequence[str] = ("dis", "dot"), init: str | Tensor = "dot", debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        # fmt: on
        super().__init__(**arguments(locals(), *KEYWORDS))
        self.make_adaptive(input_size, bases, init, debias, separation)

    def make_adaptive(
        self,
        width: int | None,
        bases: Sequence[str] = ("dis", "dot"),
        init: str | Tensor = "dot",
        debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        """Give the core its similarity and separation; ``width`` is that of static patterns, where it is known."""
        core = self.association_core
        like = next(self.parameters(), torch.empty(0))
        dim = width if core.key_as_static and core.query_as_static else core.head_dim
        if dim is None and isinstance(init, Tensor):
            dim = init.shape[-1]
        similarity = (
            LazyAdaptiveSimilarity(core.num_heads, bases, init, debias)
            if dim is None
            else AdaptiveSimilarity(dim, core.num_heads, bases, init, debias)
        )
        separation = separation if isinstance(separation, Separation) else Separation(separation, core.num_heads)
        core.similarity, core.separation = similarity.to(like), separation.to(like)


class AdaptiveHopfieldLayer(HopfieldLayerBase):
    """``hflayers.HopfieldLayer`` with a learned similarity: patterns look up what they need among learned ones.

    It takes every argument of the class it replaces, and the keywords of :class:`AdaptiveHopfield`.

    Shapes: input ``(N, L, input_size)``, output ``(N, L, output_size)``.

    Raises:
        AHopError: an argument that does not fit.

    >>> AdaptiveHopfieldLayer(input_size=8, quantity=16)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

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
        *, bases: Sequence[str] = ("dis", "dot"), init: str | Tensor = "dot", debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        # fmt: on
        given = arguments(locals(), *LAYER_ONLY)
        nn.Module.__init__(self)
        self._assemble(AdaptiveHopfield(**given), given, quantity, trainable, lookup_weights_as_separated,
                       lookup_targets_as_trainable)


class AdaptiveHopfieldPooling(HopfieldPoolingBase):
    """``hflayers.HopfieldPooling`` with a learned similarity: learned queries pool bags of patterns.

    It takes every argument of the class it replaces, and the keywords of :class:`AdaptiveHopfield`.

    Shapes: input ``(N, S, input_size)``, output ``(N, quantity * output_size)``; :meth:`pool_packed` takes bags without
    padding.

    Raises:
        AHopError: an argument that does not fit.

    >>> pooling = AdaptiveHopfieldPooling(input_size=8, num_heads=2)
    >>> pooling(torch.randn(3, 5, 8)).shape
    torch.Size([3, 8])
    >>> pooling.pool_packed(torch.randn(10, 8), [3, 0, 7]).shape
    torch.Size([3, 8])
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
        *, bases: Sequence[str] = ("dis", "dot"), init: str | Tensor = "dot", debias: bool = False,
        separation: str | Separation = "softmax",
    ) -> None:
        # fmt: on
        given = arguments(locals(), "quantity", "trainable")
        nn.Module.__init__(self)
        self._assemble(AdaptiveHopfield(**given), given, quantity, trainable)

    def pool_packed(
        self, instances: Tensor, bag_sizes: Sequence[int] | Tensor | None = None, return_association: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Pools packed bags. Memory grows with the number of instances, not with the size of the largest bag.

        Without update steps, keys and values are computed in slices to bound memory, and in training recomputed for
        their gradients: little more than the instances stays in memory. Under ``torch.compile``, pass ``bag_sizes`` as
        a tensor: one graph then serves all sizes, without slices.

        Args:
            instances: ``(total, input_size)``, those of all N bags, or a nested tensor ``(N, bag, input_size)``.
            bag_sizes: number of instances of each bag, possibly zero: integers in a sequence, array or tensor. None for
                a nested tensor.
            return_association: also return the weights of the instances.

        Returns:
            The result of the padded call, ``(N, quantity * output_size)``, and on request the weights
            ``(total, heads, quantity)``.

        Raises:
            AHopError: the sizes do not add up to the number of instances, or an argument has the wrong type or shape.

        >>> pooling = AdaptiveHopfieldPooling(input_size=8, num_heads=2)
        >>> pooled, weights = pooling.pool_packed(torch.randn(10, 8), [3, 0, 7], return_association=True)
        >>> pooled.shape, weights.shape
        (torch.Size([3, 8]), torch.Size([10, 2, 1]))
        """
        hopfield, core = self.hopfield, self.hopfield.association_core

        def project(part: int, rows: Tensor) -> Tensor:
            return rearrange(hopfield.heads(rows[None], part), "1 h t d -> t h d")

        packed = Packed(
            *check_bags(instances, bag_sizes),
            partial(project, 1),
            partial(project, 2),
            zero_association=core.add_zero_attn,
            keep_keys=core.steps != 0,
        )
        queries = self.pooling_weights if hopfield._batch_first else self.pooling_weights.transpose(0, 1)
        output, weights = core.retrieve(hopfield.heads(queries, 0), packed)
        output = hopfield.activate(output).flatten(1)
        return (output, packed.of_instances(weights)) if return_association else output


KEYWORDS = ("bases", "init", "debias", "separation")
