"""The networks of the paper's first table."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.association import Similarity, dot_product, negative_distance
from ahop_layers.errors import AHopError, check_choice, check_patterns, has_unknown
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.estimates import scale_of
from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.memory.table import AdaptiveTableSimilarity
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.training import base_units
from ahop_layers.variants import known_range


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


def preset_arguments(
    name: str,
    patterns: Tensor,
    *,
    labels: Any = None,
    prior: bool = False,
    check: bool = True,
    beta: float | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """The arguments of :class:`AssociativeMemory` for the preset ``name``.

    Raises:
        AHopError: the name is unknown, or the network does not have a keyword.
    """
    check_choice("name", name, tuple(PRESETS))
    check_patterns(patterns)
    if check and keywords.get("table"):  # which depends on the range of the patterns
        has_unknown(patterns=patterns)
    row = PRESETS[name]
    unknown = [key for key in keywords if key not in row.keywords]
    if unknown:
        known = ", ".join(("labels", "prior", "check", "beta", *row.keywords))
        raise AHopError(f"{name} takes the keywords {known}, got {', '.join(unknown)}")
    kernel = KernelModulation(patterns.shape[1], keywords.pop("features", None)).to(patterns) if row.kernel else None
    separation = Separation(row.separation, degree=keywords.pop("degree", 3))
    return {
        "similarity": named_similarity(row.similarity, patterns, **keywords),
        "separation": separation,
        "modulation": kernel,
        "objective": row.objective,
        "activation": row.activation,
        "labels": labels,
        "prior": prior,
        "beta": beta,
        "check": check,
    }
