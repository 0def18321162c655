"""AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling: the layers of hflayers with a learned similarity.

Each takes every argument of the class it replaces, and the keywords that :class:`AdaptiveHopfield` explains.
"""

from collections.abc import Sequence
from functools import cache

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.association import settle
from ahop_layers.hopfield.base import arguments
from ahop_layers.hopfield.layers import LAYER_ONLY, HopfieldBase, HopfieldLayerBase, HopfieldPoolingBase
from ahop_layers.packed import Bags, Slices, end_to_end
from ahop_layers.separation import Separation
from ahop_layers.similarity import SimilaritySource, make_similarity


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
        self._input_size = input_size
        self.make_adaptive(bases, init, debias, separation)

    def make_adaptive(
        self,
        bases: Sequence[str] = ("dis", "dot"),
        init: str | Tensor = "dot",
        debias: bool = False,
        separation: str | Separation = "softmax",
        similarity: SimilaritySource | None = None,
    ) -> None:
        """Adds the similarity and the separation to the core."""
        core = self.association_core
        like = next(self.parameters(), torch.empty(0))
        dim = self._input_size if core.key_as_static and core.query_as_static else core.head_dim
        similarity = make_similarity(dim, core.num_heads, bases, init, debias, similarity)
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
        """Pool bags that lie end to end, in memory that grows with their instances and not with the longest bag.

        Without update steps, instances are worked on in slices, however large a bag is, and in training each slice is
        computed again for its gradients: what stays in memory is little more than the instances.

        Args:
            instances: ``(total, input_size)``, or a nested tensor ``(N, bag, input_size)``.
            bag_sizes: how many instances belong to each of the N bags, zero allowed; not for a nested tensor.
            return_association: also return the weights of the instances.

        Returns:
            What the padded call gives, ``(N, quantity * output_size)``, and on request ``(total, heads, quantity)``.

        Raises:
            AHopError: sizes that do not add up to the instances, or another argument that does not fit.

        >>> pooling = AdaptiveHopfieldPooling(input_size=8, num_heads=2)
        >>> pooled, weights = pooling.pool_packed(torch.randn(10, 8), [3, 0, 7], return_association=True)
        >>> pooled.shape, weights.shape
        (torch.Size([3, 8]), torch.Size([10, 2, 1]))
        """
        instances, sizes = end_to_end(instances, bag_sizes)
        hopfield, core, device = self.hopfield, self.hopfield.association_core, instances.device
        scaling: float | Tensor = 1.0 if core.scales_query else core.scaling
        slices = Slices(instances, sizes, max(1, ROOM[device.type == "cuda"] // instances.shape[-1]))
        bags, places = Bags(sizes, device), torch.arange(len(instances), device=device)
        bags_and_zeros = Bags([size + 1 for size in sizes], device) if core.add_zero_attn else bags

        def key(rows: Tensor) -> Tensor:
            return rearrange(core.heads(hopfield.normalize(rows[None], 1), 1), "1 h t d -> t h d")

        @cache
        def keys() -> Tensor:  # a state that moves reads all of them again and again
            return key(instances)

        def value(rows: Tensor) -> Tensor:
            return rearrange(core.heads(hopfield.normalize(rows[None], 2), 2), "1 h t e -> t h e")

        def score(query: Tensor, key: Tensor) -> Tensor:
            return core.score(query, key) * scaling

        def attend(state: Tensor) -> Tensor:
            moves = core.steps != 0
            scores = bags.score(state, keys(), score) if moves else slices.score(state, key, score)
            if core.add_zero_attn:  # one more pattern after each bag
                zero = score(state, torch.zeros_like(state[:1, :, :1])).squeeze(-1)
                scores = bags_and_zeros.spread(zero.expand(len(sizes), -1, -1)).index_copy(0, places, scores)
            return bags_and_zeros.separate(scores, core.separation)

        def follow(weights: Tensor) -> Tensor:
            return bags.read(weights.index_select(0, places), keys())

        if core.add_zero_attn:
            places = places + bags.bag
        queries = self.pooling_weights if self.batch_first else self.pooling_weights.transpose(0, 1)
        state = core.heads(hopfield.normalize(queries, 0), 0)
        weights = settle(state, attend, follow, bags_and_zeros.change, core.steps, core.update_steps_eps)
        weights = weights.index_select(0, places)
        dropped = functional.dropout(weights, core.dropout if self.training else 0.0)
        output = core.read_out(slices.read(dropped, value))
        if hopfield.association_activation is not None:
            output = hopfield.association_activation(output)
        return (output.flatten(1), weights) if return_association else output.flatten(1)


KEYWORDS = ("bases", "init", "debias", "separation")

# How many numbers of an input to work on at a time, on a CPU and on a GPU: few enough to bound the memory of what is
# computed from them, enough to keep the device busy.
ROOM = (2**22, 2**24)
