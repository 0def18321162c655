"""The networks of the paper's first table: their similarities, kernels and energies."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, dot_product, negative_distance
from ahop_layers.blocks import Blocks
from ahop_layers.errors import AHopError, check_choice, check_sizes
from ahop_layers.learning.auto import AutoSimilarity
from ahop_layers.memory.table import AdaptiveTableSimilarity, TableSimilarity
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.onnx import is_onnx_export
from ahop_layers.ops.reference import accumulation_dtype, pair_values
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.training import base_units
from ahop_layers.variants import known_range
from ahop_layers.widths import scale_of


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

    Args:
        dim: dimension ``d`` of a pattern.
        features: number of rows of Phi; None for ``d``.

    Attributes:
        phi: learned ``(features, d)``, initialized to the identity, so that initially patterns are unchanged.

    Raises:
        AHopError: a size is not a positive integer.

    >>> import torch
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
        """The :func:`uniformity_loss` of ``Phi patterns`` for patterns ``(n, d)``: lower values mean larger distances.

        >>> far, near = torch.eye(3), torch.full((3, 3), 0.5) + 0.1 * torch.eye(3)
        >>> modulation = KernelModulation(3)
        >>> bool(modulation.separation_loss(far) < modulation.separation_loss(near))
        True
        """
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


def negative_manhattan(query: Tensor, key: Tensor) -> Tensor:
    """The negative sum of absolute differences: ``(L, d), (S, d) -> (L, S)``."""
    wide = accumulation_dtype(query.dtype)
    if is_onnx_export():  # which does not know cdist
        return pair_values(query.to(wide), key.to(wide), "l1").sum(-1).to(query.dtype)
    return -torch.cdist(query.to(wide), key.to(wide), p=1).to(query.dtype)


FIXED: dict[str, Similarity] = {"dot": dot_product, "dis": negative_distance, "l1": negative_manhattan}
"""The similarities without parameters, by the base that each sums up."""


def known_scores(similarity: Similarity, query: Tensor, key: Tensor) -> Tensor:
    """Scores of a fixed similarity from the known values: ``d / m`` times the sum over m of d dimensions."""
    base = next(name for name, fixed in FIXED.items() if fixed is similarity)
    weight = query.new_zeros(1, query.shape[-1])
    weight[0, -1] = 1.0
    return adaptive_similarity(query, key, weight, (base,), missing=True)


def named_similarity(name: str, patterns: Tensor, *, table: bool = False, **options: Any) -> Similarity:
    """Create the named similarity for ``patterns (N, d)``; ``table`` and ``options`` are those of ``"adaptive"``."""
    check_choice("similarity", name, ("auto", *FIXED, "adaptive"))
    if name == "auto":
        return AutoSimilarity(patterns)
    if name != "adaptive":
        return FIXED[name]
    if table:
        low, high = known_range(patterns)
        reach = torch.maximum(-low, high)
        options["key_range"] = reach[~reach.isnan()].max()
    similarity = (AdaptiveTableSimilarity if table else AdaptiveSimilarity)(patterns.shape[1], **options).to(patterns)
    if similarity.init == "uniform":  # bases of different degrees have the same shares of the scores at any scale
        units = base_units(similarity, scale_of(patterns))
        for (_, beta), unit in zip(similarity.parameter_names(), units, strict=True):
            getattr(similarity, beta).data.mul_(unit.to(patterns))
    return similarity


def preset_arguments(name: str, patterns: Tensor, **keywords: Any) -> dict[str, Any]:
    """The arguments of :class:`AssociativeMemory` for the preset ``name`` and floating-point ``patterns (N, d)``.

    Raises:
        AHopError: the name is unknown, or the network does not have a keyword.
    """
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


# Energies, which do not increase along the dynamics. Each takes the states ``x (..., d)``, the modulated states
# ``(..., d)``, the scores ``(..., N)``, the separation and the inverse temperature, and returns ``(...)``.

Energy = Callable[[Tensor, Tensor, Tensor, Separation, Tensor], Tensor]


def conjugate(scores: Tensor, separation: Separation, beta: Tensor) -> Tensor:
    """The function of the scores ``(..., N) -> (...)`` whose gradient is the separation of ``beta * scores``.

    For softmax this is the log-sum-exp. For the entmax family it is ``p . s`` plus the Tsallis entropy of the weights
    ``p``.
    """
    if separation.name == "softmax":
        return (beta * scores).logsumexp(-1) / beta
    weights, alpha = separation(beta * scores), separation.alpha
    entropy = (weights - weights**alpha).sum(-1) / (alpha * (alpha - 1))
    total: Tensor = (weights * scores).sum(-1) + entropy / beta
    return total


def attention_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation, beta: Tensor) -> Tensor:
    """Half the squared norm of the state minus the conjugate of the separation: M-Hop, S-Hop, K-Hop."""
    return 0.5 * (x * modulated).sum(-1) - conjugate(scores, separation, beta)


def adaptive_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation, beta: Tensor) -> Tensor:
    """The negative log-sum-exp of the scores: A-Hop.

    For the similarity ``-|x - bias - pattern|^2`` it does not increase and is at least ``-log N``. For other weights
    the paper makes no statement.
    """
    return -(beta * scores).logsumexp(-1) / beta


def classic_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation, beta: Tensor) -> Tensor:
    """The negative sum over patterns of the antiderivative of the separation: Hop, D-Hop, E-Hop.

    The paper's table has the sum over the patterns inside the power and the exponential. This is the sum of the powers
    and exponentials, whose gradient gives the dynamics. It does not increase for odd degrees. For the exponential the
    energy is the logarithm of that sum, which is monotonic in it and does not overflow. The signs of the other two do
    not depend on ``beta``.
    """
    if separation.name == "exponential":
        return -(beta * scores).logsumexp(-1) / beta
    degree = separation.degree if separation.name == "polynomial" else 1
    return -(scores ** (degree + 1)).sum(-1) / (degree + 1)


_BY_SEPARATION: dict[str, Energy] = {
    **dict.fromkeys(("softmax", "sparsemax", "entmax15", "entmax"), attention_energy),
    **dict.fromkeys(("identity", "polynomial", "exponential"), classic_energy),
}


def choose_energy(dot_product: bool, separation: Separation) -> Energy:
    """The energy of a memory, by its separation and whether its similarity is the dot product.

    Raises:
        AHopError: the paper defines no energy for this memory.
    """
    if dot_product and separation.name in _BY_SEPARATION:
        return _BY_SEPARATION[separation.name]
    if not dot_product and separation.name == "softmax":
        return adaptive_energy
    similarity = "the dot product" if dot_product else "a similarity other than the dot product"
    raise AHopError(f"no energy is defined for {similarity} with the separation {separation.name!r}")


# Parts of a memory as values of JSON, for files.


def describe_parts(memory: Any) -> dict[str, Any]:
    """Returns what :func:`make_parts` makes the parts of a memory from.

    Raises:
        AHopError: a part is not one of this package.
    """
    described = {
        "similarity": _described(memory.similarity),
        "separation": None,
        "modulation": None,
    }
    alpha = getattr(memory.separation, "alpha_logit", None)
    if type(memory.separation) is Separation and (alpha is None or alpha.ndim == 0):
        described["separation"] = [memory.separation.name, memory.separation.degree]
    if type(memory.modulation) is KernelModulation:
        described["modulation"] = memory.modulation.phi.shape[0]
    for name, value in described.items():
        part = getattr(memory, name)
        if value is None and part is not None:
            kind = getattr(part, "__name__", type(part).__name__)
            raise AHopError(f"save needs a {name} of this package, got {kind}: save the state_dict of the memory")
    return described


def _described(similarity: Any) -> Any:
    for name, fixed in FIXED.items():
        if similarity is fixed:
            return name
    if type(similarity) is AutoSimilarity:
        return "auto"
    if type(similarity) is TableSimilarity:
        return {"table": similarity.knots, "debias": similarity.bias is not None}
    if type(similarity) not in (AdaptiveSimilarity, AdaptiveTableSimilarity):
        return None
    found: dict[str, Any] = {"bases": similarity.bases, "debias": similarity.bias is not None}
    found["blocks"] = [
        [entry.named.tolist() if entry.named is not None else entry.assignment, entry.normalize]
        for entry in similarity.blocks
    ]
    if type(similarity) is AdaptiveTableSimilarity:
        return found | {"table": similarity.table.knots}
    return found | {"num_heads": similarity.num_heads}


def make_parts(described: dict[str, Any], patterns: Tensor) -> dict[str, Any]:
    """Makes the similarity, separation and modulation of a memory of ``patterns (N, d)``, without learned values."""
    given, modulation, dim = described["similarity"], described["modulation"], patterns.shape[1]
    options: dict[str, Any] = {"debias": given["debias"]} if isinstance(given, dict) else {}
    if isinstance(given, dict) and "blocks" in given:
        options["bases"] = [base if isinstance(base, str) else tuple(base) for base in given["bases"]]
        numbers = [torch.tensor(each) if isinstance(each, list) else each for each, _ in given["blocks"]]
        pairs = zip(numbers, given["blocks"], strict=True)
        options["blocks"] = [Blocks(number, normalize=entry[1]) for number, entry in pairs]
        options["init"] = "uniform"
    if not isinstance(given, dict):
        similarity: Any = given
    elif "num_heads" in given:
        similarity = AdaptiveSimilarity(dim, given["num_heads"], **options)
    elif "blocks" in given:
        similarity = AdaptiveTableSimilarity(dim, knots=tuple(given["table"]), **options)
    else:
        similarity = TableSimilarity(dim, knots=tuple(given["table"]), **options)
    if isinstance(similarity, nn.Module):
        similarity = similarity.to(patterns.device, patterns.dtype if patterns.is_floating_point() else None)
    return {
        "similarity": similarity,
        "separation": Separation(described["separation"][0], degree=described["separation"][1]),
        "modulation": None if modulation is None else KernelModulation(dim, modulation).to(patterns.device),
    }
