"""AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling: the layers of hflayers with a learned similarity.

Each takes every argument of the class it replaces, in the same order with the same defaults, then by keyword:

- ``bases``, ``init``, ``debias``: see :class:`~ahop_layers.AdaptiveSimilarity`. Every head has weights of its own. With
  the default ``init="dot"`` a layer computes what the one it replaces computes, until it is trained.
- ``separation``: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax"`` (alpha is learned), ``"argmax"``, or a
  :class:`~ahop_layers.separation.Separation`.

``scaling`` multiplies the score. A tensor is a buffer, a parameter is learned; the shape ``()`` means one factor and
``(heads, 1, 1)`` one per head, while ``(heads,)`` means what it means in hflayers.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from ahop_layers.association import settle
from ahop_layers.bags import Bags, end_to_end
from ahop_layers.errors import AHopError
from ahop_layers.hopfield import LAYER_ONLY, HopfieldBase, HopfieldLayerBase, HopfieldPoolingBase
from ahop_layers.own import arguments
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity


def similarity_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of every adaptive similarity inside a module, for a learning rate of their own.

    Raises:
        AHopError: there is no adaptive similarity in the module.

    >>> import ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), AdaptiveHopfieldPooling(8))
    >>> own = similarity_parameters(model)
    >>> rest = [p for p in model.parameters() if all(p is not q for q in own)]
    >>> optimizer = torch.optim.AdamW([{"params": rest}, {"params": own, "lr": 1e-4}], lr=1e-3)
    """
    found = [part for part in module.modules() if isinstance(part, AdaptiveSimilarity)]
    if not found:
        raise AHopError(f"expected a module with an AdaptiveSimilarity inside, got {type(module).__name__} without")
    return [parameter for part in found for parameter in part.parameters()]


class _LazySimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that learns its dimension from the first patterns it sees."""

    cls_to_become = AdaptiveSimilarity

    def __init__(self, num_heads: int, bases: Sequence[str], init: str | Tensor, debias: bool) -> None:
        super().__init__(1, num_heads, bases, init, debias)
        for name in ("w", "bias") if debias else ("w",):
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Wait until the dimension is known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Take the dimension of ``query (..., d)``."""
        if self.has_uninitialized_params():
            self.dim = query.shape[-1]
            for parameter, middle in ((self.w, (len(self.bases),)), (self.bias, ())):
                if isinstance(parameter, UninitializedParameter):
                    parameter.materialize((self.num_heads, *middle, self.dim))
            self.reset_parameters()


class AdaptiveHopfield(HopfieldBase):
    """``hflayers.Hopfield`` with a learned similarity; see the head of this module for the arguments.

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
            _LazySimilarity(core.num_heads, bases, init, debias)
            if dim is None
            else AdaptiveSimilarity(dim, core.num_heads, bases, init, debias)
        )
        separation = separation if isinstance(separation, Separation) else Separation(separation, core.num_heads)
        core.similarity, core.separation = similarity.to(like), separation.to(like)


class AdaptiveHopfieldLayer(HopfieldLayerBase):
    """``hflayers.HopfieldLayer`` with a learned similarity; see the head of this module for the arguments.

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
    """``hflayers.HopfieldPooling`` with a learned similarity; see the head of this module for the arguments.

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

        Without update steps, bags are worked on in groups of some 65,000 instances, and in training each group is
        computed again for its gradients: what stays in memory is little more than the instances.

        Args:
            instances: ``(total, input_size)``, or a nested tensor ``(N, bag, input_size)``.
            bag_sizes: how many instances belong to each of the N bags, zero allowed; not for a nested tensor.
            return_association: also return the weights of the instances.

        Returns:
            What the padded call gives, ``(N, quantity * output_size)``, and on request ``(total, heads, quantity)``.

        Raises:
            AHopError: sizes that do not add up to the instances, or another argument that does not fit.
        """
        instances, sizes = end_to_end(instances, bag_sizes)
        # A GPU needs more bags at a time to be busy.
        limit = GROUP if instances.device.type == "cpu" else 4 * GROUP
        groups = _groups(sizes, limit) if self.hopfield.association_core.steps == 0 else [sizes]
        many = len(groups) > 1 and torch.is_grad_enabled()
        parts = [
            checkpoint(self._pool, part, group, use_reentrant=False) if many else self._pool(part, group)
            for part, group in zip(instances.split_with_sizes([sum(group) for group in groups]), groups, strict=True)
        ]
        output, weights = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return (output, weights) if return_association else output

    def _pool(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Pool one group of bags: output ``(N, quantity * output_size)`` and weights ``(total, heads, quantity)``."""
        hopfield, core = self.hopfield, self.hopfield.association_core
        queries = self.pooling_weights if self.batch_first else self.pooling_weights.transpose(0, 1)
        stored, state, projection = hopfield.normalize(instances[None], queries, instances[None])
        q, k, v = core.project(state, stored, projection)
        key, value = (rearrange(x, "1 h t d -> t h d") for x in (k, v))
        bags = Bags(sizes, instances.device)
        places = torch.arange(len(instances), device=instances.device)
        if core.add_zero_attn:
            places = places + bags.bag  # one more pattern after each bag
            bags = Bags([size + 1 for size in sizes], instances.device)
            key, value = (x.new_zeros(bags.total, *x.shape[1:]).index_copy(0, places, x) for x in (key, value))
        scaling: float | Tensor = 1.0 if core.scales_query else core.scaling

        def attend(state: Tensor) -> Tensor:
            return bags.separate(bags.score(state, key, lambda q, k: core.score(q, k) * scaling), core.separation)

        weights = settle(q, attend, lambda w: bags.read(w, key), bags.change, core.steps, core.update_steps_eps)
        dropped = functional.dropout(weights, core.dropout if self.training else 0.0)
        output = core.read_out(bags.read(dropped, value))
        if hopfield.association_activation is not None:
            output = hopfield.association_activation(output)
        return output.flatten(1), weights.index_select(0, places)


KEYWORDS = ("bases", "init", "debias", "separation")

# Few enough instances to bound the memory of their projections, enough to keep every core busy.
GROUP = 2**16


def _groups(sizes: list[int], limit: int) -> list[list[int]]:
    """Neighbouring bags together until the next would exceed ``limit`` instances; at least one group."""
    groups: list[list[int]] = [[]]
    held = 0
    for size in sizes:
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(size)
        held += size
    return groups
