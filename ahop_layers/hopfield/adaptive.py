"""AdaptiveHopfield, AdaptiveHopfieldLayer, AdaptiveHopfieldPooling: the layers of hflayers with a learned similarity.

Each takes every argument of the class it replaces, followed by the keywords that :class:`AdaptiveHopfield` documents.
"""

import inspect
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ahop_layers.errors import AHopError, check_module
from ahop_layers.hopfield.core import Retrieval
from ahop_layers.hopfield.layers import Hopfield, HopfieldInterface, HopfieldLayer, HopfieldPooling
from ahop_layers.ops.reference import fold
from ahop_layers.packed import PackedPatterns, check_bags
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, Init, Restored
from ahop_layers.similarity.associator import Associator
from ahop_layers.similarity.blocks import BlocksArgument
from ahop_layers.similarity.options import SimilarityOptions, SimilaritySource

# A layer of static patterns warns after this number of calls with a gradient and without an optimizer step.
CALLS_WITHOUT_UPDATE = 100
_COMPLETED: WeakSet[Any] = WeakSet()  # Hopfield layers that were pickled with hflayers


if TYPE_CHECKING:
    HopfieldBase = Hopfield
    HopfieldLayerBase = HopfieldLayer
    HopfieldPoolingBase = HopfieldPooling
else:

    def _base(own: type) -> type:
        """Returns a plain layer; if hflayers is installed, a class derived from its layer too, for ``isinstance``."""
        try:
            original = getattr(import_module("hflayers"), own.__name__)
        except (AttributeError, ImportError):  # not installed, or another module of this name
            return own
        return type(own.__name__, (own, original), {"__doc__": own.__doc__})

    HopfieldBase, HopfieldLayerBase, HopfieldPoolingBase = map(_base, (Hopfield, HopfieldLayer, HopfieldPooling))


class AdaptiveLayer(Restored, HopfieldInterface):
    """The constructor of the adaptive layers: positional arguments and other keywords go to the plain layer."""

    def __init__(
        self, *args: Any, bases: Sequence[str] | None = None, init: Init | None = None, debias: bool = False,
        separation: str | Separation = "softmax", similarity: SimilaritySource | None = None,
        blocks: BlocksArgument = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **keywords)
        hopfield: Any = self._inner
        options = SimilarityOptions(bases, init, debias, separation, similarity, blocks)
        hopfield.make_adaptive(options, learned=hopfield is not self)
        self.to(device=device, dtype=dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Completes a layer that was pickled with hflayers, whose class had the name of this one."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hopfield: Any = self._inner
        own, core, learned = vars(hopfield), hopfield.association_core, hopfield is not self
        if "_batch_first" not in own:
            hopfield._batch_first, hopfield._input_size = own.pop("_Hopfield__batch_first"), core.embed_dim
            core.similarity, core.separation = None, Separation()
            settings = ("scaling", "update_steps_max", "update_steps_eps")
            core.configure(*(own.pop(f"_Hopfield__{name}") for name in settings))
            _COMPLETED.add(hopfield)
        if hopfield in _COMPLETED:  # a layer around it, which is completed later, decides on the dimension
            hopfield.make_adaptive(SimilarityOptions(), learned)
        if learned:
            _COMPLETED.discard(hopfield)


def head_shape(core: Any, input_size: int | None, learned: bool = False) -> tuple[int, int | None]:
    """Returns the number of heads and the dimension of one head.

    Static patterns are not split into heads: both have the input size, unless one of them is ``learned`` by the layer
    or normalized with a learned scale of the size of a head.
    """
    static = core.key_as_static and core.query_as_static
    free = static and (core.head_dim is None or not (learned or core.normalize_pattern_affine))
    return core.num_heads, input_size if free else core.head_dim


def _constructor(plain: type) -> Any:
    """Returns a constructor with the signature of a plain layer, followed by the keywords of the adaptive layers."""

    def __init__(self: AdaptiveLayer, *args: Any, **keywords: Any) -> None:
        AdaptiveLayer.__init__(self, *args, **keywords)

    own = inspect.signature(plain.__init__).parameters.values()  # type: ignore[misc]
    added = inspect.signature(AdaptiveLayer.__init__).parameters.values()
    keywords = [each for each in added if each.kind == each.KEYWORD_ONLY]
    __init__.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
    return __init__


class AdaptiveHopfield(AdaptiveLayer, HopfieldBase):
    """``hflayers.Hopfield`` with a learned similarity: associates state patterns with stored patterns.

    The class it replaces has the arguments up to ``disable_out_projection``, in the same order and with the same
    defaults. The others are keywords. State patterns, stored patterns and pattern projections are what attention
    calls queries, keys and values.

    Args:
        input_size: size of a state pattern. None is allowed only if all patterns are static and not projected.
        hidden_size: dimension of a head in the association space. None means ``input_size / num_heads``.
        output_size: size of an output. None means ``input_size``.
        pattern_size: dimension of a projected pattern of one head, from which outputs are computed. None means
            ``hidden_size``.
        num_heads: number of heads.
        scaling: factor of the scores, often called beta. None means ``1 / sqrt(hidden_size)``, or 1 if all patterns are
            static and not projected. A tensor becomes a buffer, a parameter is trained. The shape ``()`` is one factor,
            ``(heads, 1, 1)`` one per head; ``(heads,)`` has the meaning it has in hflayers.
        update_steps_max: maximum number of update steps, which replace a state by the weighted sum of the stored
            patterns before the output is computed; an integer, or an integer tensor ``(heads,)``. 0 means no update.
            None or a negative number means until convergence, at most 1,000 steps.
        update_steps_eps: a head has converged if its weights change by at most this norm in every sample; a number, or
            a tensor ``(heads,)``.
        normalize_stored_pattern, normalize_state_pattern, normalize_pattern_projection: apply a layer normalization to
            these patterns first.
        normalize_hopfield_space: apply a layer normalization to the projected state and stored patterns of each head.
        normalize_..._affine, normalize_..._eps: give that normalization a learned scale and shift; what is added to its
            variance.
        stored_pattern_as_static, state_pattern_as_static, pattern_projection_as_static: do not project these patterns.
            A static pattern has the size of a head, and every head receives all of it. If state and stored patterns are
            both static, any size is allowed.
        pattern_projection_as_connected: project the pattern projections twice: first by the projection of the stored
            patterns, then by their own.
        stored_pattern_size, pattern_projection_size: sizes of these patterns. None means ``input_size``.
        batch_first: whether patterns are ``(N, rows, size)``; otherwise ``(rows, N, size)``.
        association_activation: name of a function of torch that is applied to the output, such as ``"relu"``.
        dropout: probability of dropping an association weight in training mode.
        input_bias: whether projections have a bias.
        concat_bias_pattern: add the parameters ``bias_k`` and ``bias_v``, so that checkpoints load. As in hflayers, no
            output depends on them.
        add_zero_association: add a projected stored pattern of zeros to every sample, with a projection of zeros.
        disable_out_projection: leave out the output projection: the output is the concatenation of the heads.
        bases, init, debias: see :class:`~ahop_layers.AdaptiveSimilarity`; each head has its own weights. None means its
            default: the layer initially computes the same outputs as the layer it replaces.
        blocks: see :class:`~ahop_layers.AdaptiveSimilarity`. An integer is the number of blocks of one head, or of a
            static pattern, which is not split into heads. ``"auto"`` is the smallest number from 4 to 8 that divides 16
            or more dimensions, and takes over the number of a state dict. None, and ``"auto"`` for other dimensions, is
            the full footprint of the paper, which a lookup of damaged rows should name.
        separation: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, ``"entmax"`` (learned alpha), ``"argmax"``, or a
            :class:`~ahop_layers.Separation`.
        similarity: a module that scores ``(N, H, L, d)`` against ``(N, H, S, d)``, or a function of
            ``(dim, num_heads)`` that returns one. It replaces ``bases``, ``init``, ``debias`` and ``blocks``.
        device, dtype: device and dtype of all parameters and buffers.

    Shapes: input ``(N, L, input_size)``, or stored ``(N, S, stored_pattern_size)``, state ``(N, L, input_size)`` and
    projection ``(N, S, pattern_projection_size)`` patterns; output ``(N, L, output_size)``.

    >>> layer = AdaptiveHopfield(input_size=8, num_heads=2, separation="sparsemax")
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    __init__ = _constructor(Hopfield)

    def make_adaptive(self, options: SimilarityOptions, learned: bool = False) -> None:
        """Sets the similarity and the separation of the core, with the device, dtype and mode of this layer.

        ``learned`` says whether a layer around this one has state or stored patterns of its own.
        """
        core = self.association_core
        heads, dim = head_shape(core, self._input_size, learned)
        own = next((parameter for parameter in self.parameters() if not is_lazy(parameter)), torch.empty(0))
        core.separation = options.make_separation(heads).to(own).train(self.training)
        core.similarity = options.make_similarity(dim, heads).to(own).train(self.training)

    def _associate(self, *args: Any, **keywords: Any) -> Retrieval:
        if self.association_core.static_execution and self.training and not torch.compiler.is_compiling():
            self._warn_if_not_updated()
        return super()._associate(*args, **keywords)

    def _warn_if_not_updated(self) -> None:
        """Warns if a layer without other parameters receives gradients in many calls, but no update."""
        similarity = self.association_core.similarity
        parameter = None if similarity is None else next(similarity.parameters(), None)
        if parameter is None or is_lazy(parameter) or parameter.grad is None:
            return
        version, calls = vars(self).get("_without_update", (None, 0))
        calls = calls + 1 if version == parameter._version else 0
        vars(self)["_without_update"] = (parameter._version, calls)
        if calls == CALLS_WITHOUT_UPDATE:
            warnings.warn(
                f"the similarity of {type(self).__name__} received gradients, but was not updated for {calls} calls: is"
                " the layer part of the model, or are its parameters in the optimizer?",
                stacklevel=4,
            )


class AdaptiveHopfieldLayer(AdaptiveLayer, HopfieldLayerBase):
    """``hflayers.HopfieldLayer`` with a learned similarity: associates its input with learned patterns.

    :class:`AdaptiveHopfield` documents the other arguments; there is no ``normalize_..._eps``.

    Args:
        input_size: size of an input, which is a state pattern.
        lookup_weights_as_separated: learn pattern projections (``target_weights``) separate from the stored patterns
            (``lookup_weights``). Otherwise both are ``lookup_weights``.
        lookup_targets_as_trainable: whether separate ``target_weights`` are trained.
        quantity: number of learned patterns.
        trainable: whether ``lookup_weights`` are trained.

    Shapes: input ``(N, L, input_size)``, output ``(N, L, output_size)``.

    >>> AdaptiveHopfieldLayer(input_size=8, quantity=16)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    _hopfield_class = AdaptiveHopfield
    __init__ = _constructor(HopfieldLayer)


class AdaptiveHopfieldPooling(AdaptiveLayer, HopfieldPoolingBase):
    """``hflayers.HopfieldPooling`` with a learned similarity: pools bags of patterns with learned queries.

    :class:`AdaptiveHopfield` documents the other arguments; there is no ``normalize_..._eps``.

    Args:
        input_size: size of an instance, and of a learned query.
        quantity: number of learned queries. The output is the concatenation of their results.
        trainable: whether the queries are trained.

    Shapes: input ``(N, S, input_size)``, output ``(N, quantity * output_size)``. :meth:`pool_packed` takes bags without
    padding.

    >>> AdaptiveHopfieldPooling(input_size=8, num_heads=2)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 8])
    """

    _hopfield_class = AdaptiveHopfield
    __init__ = _constructor(HopfieldPooling)

    def pool_packed(
        self, instances: Tensor, bag_sizes: Sequence[int] | Tensor, return_association: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Pools packed bags. Memory grows with the number of instances, not with the size of the largest bag.

        Without update steps, keys and values are computed in slices to bound memory, and in training recomputed for
        their gradients: little more than the instances stays in memory. Under ``torch.compile``, pass ``bag_sizes`` as
        a tensor: one graph then serves all sizes, without slices, and raises a RuntimeError if they are wrong.

        Args:
            instances: ``(total, input_size)``, concatenated over all N bags.
            bag_sizes: number of instances of each bag, possibly zero: integers in a sequence, array or tensor.
            return_association: also return the weights of the instances.

        Returns:
            The result of the padded call, ``(N, quantity * output_size)``, and on request the weights
            ``(total, heads, quantity)``.

        >>> pooling = AdaptiveHopfieldPooling(input_size=8, num_heads=2)
        >>> pooled, weights = pooling.pool_packed(torch.randn(10, 8), [3, 0, 7], return_association=True)
        >>> pooled.shape, weights.shape
        (torch.Size([3, 8]), torch.Size([10, 2, 1]))
        """
        hopfield = self.hopfield
        query = hopfield._maybe_transpose(hopfield.normalize(self.pooling_weights, 0))
        bags = PackedPatterns(*check_bags(instances, bag_sizes), hopfield.normalize)
        output, _, weights, _ = hopfield._call_core(query, bags, bags, return_raw_associations=return_association)
        output = hopfield.activate(output.transpose(0, 1)).flatten(1)
        return (output, weights) if return_association else output


@torch.no_grad()
def is_dot_product(similarity: nn.Module | None) -> bool:
    """Returns whether a similarity computes the dot product for all patterns; an unknown class does not count."""
    if not isinstance(similarity, AdaptiveSimilarity):
        return similarity is None
    if any(is_lazy(parameter) for parameter in similarity.parameters()):
        return isinstance(similarity.init, str) and similarity.init == "dot"
    if similarity.bias is not None and bool(similarity.bias.any()):
        return False
    total: Any = 0.0
    for base, folded in zip(similarity.bases, fold(similarity.footprint_weight()).unbind(-2), strict=True):
        differs = base != "dot" or similarity.blocks.normalize or bool((folded != folded[..., :1]).any())
        if differs and bool(folded.any()):
            return False
        total = total + (folded[..., 0] if base == "dot" else 0.0)
    return bool((torch.as_tensor(total) == 1).all())


def hflayers_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a model for its original with hflayers, which loads it with ``strict=True``.

    Its similarities must still be the dot product, as after training with frozen similarities, its separations softmax,
    and its scaling fixed.

    >>> import ahop_layers as ah
    >>> sorted(ah.hflayers_state_dict(ah.AdaptiveHopfield(8, disable_out_projection=True)))[:2]
    ['association_core.in_proj_bias', 'association_core.in_proj_weight']
    """
    check_module(model=model)
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, part in model.named_modules():
        if isinstance(part, Associator):
            if not is_dot_product(part.similarity):
                raise AHopError(f"{name}.similarity must be the dot product for hflayers, got a learned similarity")
            separation = getattr(getattr(part, "separation", None), "name", "softmax")
            if separation != "softmax":
                raise AHopError(f"{name}.separation must be softmax for hflayers, got {separation!r}")
            if isinstance(getattr(part, "scaling", None), nn.Parameter):
                raise AHopError(f"{name}.scaling must be fixed for hflayers, got a parameter")
            added = tuple(f"{name}.{each}." if name else f"{each}." for each in part._added)
            state = {key: value for key, value in state.items() if not f"{key}.".startswith(added)}
    return state


def make_plain(model: nn.Module) -> dict[str, nn.Module]:
    """Removes the similarities of Hopfield layers that were built adaptive, and returns these layers by name."""
    plain = {AdaptiveHopfield: Hopfield, AdaptiveHopfieldLayer: HopfieldLayer, AdaptiveHopfieldPooling: HopfieldPooling}
    found: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, tuple(plain))}
    for part in found.values():
        part._inner.association_core.similarity = None
        part.__class__ = plain.get(type(part), type(part))
    return found
