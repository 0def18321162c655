"""The networks of the paper's first table: their similarities, kernels, and parts as values of JSON."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_choice, check_sizes, describe
from ahop_layers.learning.auto import AutoSimilarity
from ahop_layers.memory.arrays import check_values
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.blocks import Blocks
from ahop_layers.similarity.fixed import FIXED
from ahop_layers.similarity.images import ImageSimilarity
from ahop_layers.similarity.protocol import Similarity
from ahop_layers.similarity.table import AdaptiveTableSimilarity, TableSimilarity
from ahop_layers.similarity.widths import scale_of
from ahop_layers.training import base_units
from ahop_layers.variants import known_range


def uniformity_loss(points: Tensor) -> Tensor:
    """The log of the mean Gaussian kernel ``exp(-2 |u - v|^2)`` over all pairs of points: ``(..., n, d) -> (...)``.

    This is the separation loss of K-Hop. Points are normalized first, because otherwise distances could grow without
    bound. A single point has the value 0.

    >>> uniformity_loss(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor(-4.)
    """
    n = points.shape[-2]
    if n < 2:
        return points.sum((-2, -1)) * 0
    unit = nn.functional.normalize(points.to(accumulation_dtype(points.dtype)), dim=-1)
    squares = 2 - 2 * unit @ unit.mT
    pairs = torch.ones(n, n, dtype=torch.bool, device=points.device).tril(-1)
    return (-2 * squares).masked_fill(~pairs, -torch.inf).flatten(-2).logsumexp(-1) - math.log(math.comb(n, 2))


class KernelModulation(nn.Module):
    """Computes ``mod(pattern) = Phi^T Phi pattern``, so that a dot product compares ``Phi pattern`` and ``Phi query``.

    ``phi (features, dim)`` is learned; by default it is square. It is initialized to the identity, so that patterns are
    unchanged.

    >>> patterns = torch.randn(5, 8)
    >>> torch.equal(KernelModulation(8)(patterns), patterns)
    True
    """

    def __init__(self, dim: int, features: int | None = None) -> None:
        super().__init__()
        features = dim if features is None else features
        check_sizes(dim=dim, features=features)
        self.phi = nn.Parameter(torch.eye(features, dim))

    def forward(self, patterns: Tensor) -> Tensor:
        """Modulate ``patterns (..., d) -> (..., d)``."""
        phi = self.phi.to(patterns.dtype)
        return patterns @ phi.mT @ phi

    def separation_loss(self, patterns: Tensor) -> Tensor:
        """The :func:`uniformity_loss` of ``Phi patterns`` for patterns ``(n, d)``: the lower, the larger distances."""
        return uniformity_loss(patterns @ self.phi.to(patterns.dtype).mT)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        return f"{self.phi.shape[1]}, features={self.phi.shape[0]}"


class Preset(NamedTuple):
    """A row of the table: arguments of :class:`AssociativeMemory`, and the keywords that the network accepts."""

    similarity: str
    separation: str
    kernel: bool = False
    objective: str = "retrieval"
    activation: str | None = None
    keywords: tuple[str, ...] = ()


PRESETS = {
    "Hop": Preset("dot", "identity", activation="sign"),
    "D-Hop": Preset("dot", "polynomial", activation="sign", keywords=("degree",)),
    "E-Hop": Preset("dot", "exponential", activation="sign"),
    "M-Hop": Preset("dot", "softmax"),
    "U-Hop": Preset("l1", "argmax"),
    "S-Hop": Preset("dot", "sparsemax"),
    "K-Hop": Preset("dot", "entmax15", kernel=True, objective="separation", keywords=("features",)),
    "K2-Hop": Preset("dot", "softmax", kernel=True, keywords=("features",)),
    "A-Hop": Preset("adaptive", "softmax", keywords=("bases", "init", "debias", "table", "blocks")),
}


def named_similarity(
    name: str, patterns: Tensor, shape: Sequence[int] = (), *, table: bool = False, **options: Any
) -> Similarity:
    """Creates the named similarity for ``patterns (N, d)``, which are images if their ``shape`` has several axes.

    ``table`` and ``options`` are those of ``"adaptive"``.
    """
    check_choice("similarity", name, ("auto", *FIXED, "adaptive"))
    if name == "auto" and len(shape) > 1:
        channels, height, width = (1, *shape)[-3:]
        images = ImageSimilarity(height, width, channels)
        return images.to(patterns.device, accumulation_dtype(patterns.dtype))
    if name == "auto":
        return AutoSimilarity(patterns)
    if name != "adaptive":
        return FIXED[name]
    if table:
        check_values("patterns", patterns)
        low, high = known_range(patterns)
        reach = torch.maximum(-low, high)
        options["key_range"] = reach[~reach.isnan()].max()
    similarity = (AdaptiveTableSimilarity if table else AdaptiveSimilarity)(patterns.shape[1], **options).to(patterns)
    if similarity.init == "uniform":  # bases of different degrees have the same shares of the scores at any scale
        similarity.beta.data.mul_(base_units(similarity, scale_of(patterns)).to(patterns))
    return similarity


def preset_arguments(name: str, patterns: Tensor, **keywords: Any) -> dict[str, Any]:
    """The arguments of :class:`AssociativeMemory` for the preset ``name`` and floating-point ``patterns (N, d)``."""
    check_choice("name", name, tuple(PRESETS))
    row = PRESETS[name]
    unknown = [key for key in keywords if key not in row.keywords]
    if unknown:
        known = ", ".join(("labels", "ids", "prior", "check", "beta", *row.keywords))
        raise AHopError(f"{name} takes the keywords {known}, got {', '.join(unknown)}")
    kernel = KernelModulation(patterns.shape[1], keywords.pop("features", None)).to(patterns) if row.kernel else None
    separation = Separation(row.separation, degree=keywords.pop("degree", 3))
    return {
        "similarity": named_similarity(row.similarity, patterns, **keywords),
        "separation": separation,
        "modulation": kernel,
        "objective": row.objective,
        "activation": row.activation,
    }


# Parts of a memory as values of JSON, for files.

KINDS: dict[str, Callable[..., nn.Module]] = {
    kind.__name__: kind for kind in (AdaptiveSimilarity, AdaptiveTableSimilarity, TableSimilarity)
}
"""The similarities that are saved by their options."""


def describe_parts(memory: Any) -> dict[str, Any]:
    """Returns what :func:`make_parts` makes the parts of a memory from; raises if one is not of this package."""
    separation, modulation = memory.separation, memory.modulation
    alpha = getattr(separation, "alpha_logit", None)
    plain = type(separation) is Separation and (alpha is None or alpha.ndim == 0)
    described = {
        "similarity": _described(memory.similarity),
        "separation": [separation.name, separation.degree] if plain else None,
        "modulation": modulation.phi.shape[0] if type(modulation) is KernelModulation else None,
    }
    for name, value in described.items():
        part = getattr(memory, name)
        if value is None and part is not None:
            kind = getattr(part, "__name__", type(part).__name__)
            raise AHopError(f"save needs a {name} of this package, got {kind}: save the state_dict of the memory")
    return described


def _described(similarity: Any) -> Any:
    """Returns the name of a similarity, or its class and options; None if it is not one of this package."""
    kind = type(similarity)
    if kind is AutoSimilarity or similarity in FIXED.values():
        return next((name for name, fixed in FIXED.items() if fixed is similarity), "auto")
    if kind is ImageSimilarity:
        names = ("height", "width", "channels", "sizes", "shifts")
        return [kind.__name__, {name: getattr(similarity, name) for name in names}]
    if kind not in KINDS.values():
        return None
    options: dict[str, Any] = {"debias": similarity.bias is not None, "init": similarity.init}
    if not isinstance(similarity.init, str):
        options["init"] = similarity.init.tolist()
    if kind is AdaptiveSimilarity:
        options["num_heads"] = similarity.num_heads
    else:
        options["knots"] = (similarity if kind is TableSimilarity else similarity.table).knots
    if kind is not TableSimilarity:
        numbers, blocks = similarity.blocks.named, similarity.blocks
        assignment = blocks.assignment if numbers is None else numbers.tolist()
        options |= {"bases": similarity.bases, "blocks": [assignment, blocks.normalize]}
    return [kind.__name__, options]


def _similarity(dim: int, name: str, given: dict[str, Any]) -> Callable[[], nn.Module]:
    """Returns what makes a similarity from its class and options."""
    options = dict(given)
    if name == ImageSimilarity.__name__:
        if options["height"] * options["width"] * options["channels"] != dim:
            raise AHopError(f"images must have the {dim} values of a pattern, got {options}")
        return partial(ImageSimilarity, **options)
    if not isinstance(options["init"], str):
        options["init"] = torch.tensor(options["init"], dtype=torch.float64)
    if "bases" in options:
        options["bases"] = [base if isinstance(base, str) else tuple(base) for base in options["bases"]]
        assignment, normalize = options["blocks"]
        options["blocks"] = Blocks(torch.tensor(assignment) if isinstance(assignment, list) else assignment, normalize)
    return partial(KINDS[name], dim, **options)


def make_parts(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Makes the similarity, separation and modulation of a memory, for the ``tensors`` of its state dict.

    A part that has other sizes than the tensors is refused before it is allocated.
    """
    patterns, (separation, degree) = tensors["patterns"], described["separation"]
    dim, given, features = patterns[0].numel(), described["similarity"], described["modulation"]
    parts = {"similarity": given, "separation": Separation(separation, degree=degree), "modulation": None}
    makes = {} if isinstance(given, str) else {"similarity": _similarity(dim, *given)}
    if features is not None:
        makes["modulation"] = partial(KernelModulation, dim, features)
    for name, make in makes.items():
        with torch.device("meta"):
            sizes = make().state_dict()
        for key, tensor in sizes.items():
            found = tensors.get(f"{name}.{key}")
            if found is None or found.shape != tensor.shape:
                got = "none" if found is None else describe(found)
                raise AHopError(f"{name}.{key} must be {describe(tensor)}, as the header says, got {got}")
        dtypes = (tensors[f"{name}.{key}"].dtype for key in sizes)
        parts[name] = make().to(dtype=next((dtype for dtype in dtypes if dtype.is_floating_point), None))
    return parts
