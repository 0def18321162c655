"""Energies: what falls, or rests, while a state moves towards a stored pattern.

Each takes the states ``x (..., d)``, their modulated form ``(..., d)``, their scores ``(..., N)`` and the separation.
"""

from collections.abc import Callable

from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation

Energy = Callable[[Tensor, Tensor, Tensor, Separation], Tensor]


def conjugate(scores: Tensor, separation: Separation) -> Tensor:
    """The function of the scores ``(..., N) -> (...)`` whose gradient the separation is.

    For softmax that is the log-sum-exp; for the entmax family ``p . s`` plus the Tsallis entropy of the weights ``p``.
    """
    if separation.name == "softmax":
        return scores.logsumexp(-1)
    weights, alpha = separation(scores), separation.alpha
    entropy = (weights - weights**alpha).sum(-1) / (alpha * (alpha - 1))
    total: Tensor = (weights * scores).sum(-1) + entropy
    return total


def attention_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation) -> Tensor:
    """Half the squared norm of the state, less the conjugate of the separation: M-Hop, S-Hop, K-Hop."""
    return 0.5 * (x * modulated).sum(-1) - conjugate(scores, separation)


def adaptive_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation) -> Tensor:
    """The negative log-sum-exp of the scores: A-Hop.

    It falls where the similarity is the unified one, ``-|x - bias - pattern|^2``, and stays above ``-log N``. For other
    weights the paper promises nothing.
    """
    return -scores.logsumexp(-1)


def classic_energy(x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation) -> Tensor:
    """The negative sum of what the separation is the derivative of: Hop, D-Hop, E-Hop.

    The table of the paper puts the sum over the patterns inside the power and the exponential; this is the sum of
    powers and exponentials, of which the dynamics are the gradient. It falls for odd degrees. Of the sum of
    exponentials it is the logarithm: one falls where the other does, and the logarithm stays finite.
    """
    if separation.name == "exponential":
        return -scores.logsumexp(-1)
    degree = separation.degree if separation.name == "polynomial" else 1
    return -(scores ** (degree + 1)).sum(-1) / (degree + 1)


_BY_SEPARATION: dict[str, Energy] = {
    **dict.fromkeys(("softmax", "sparsemax", "entmax15", "entmax"), attention_energy),
    **dict.fromkeys(("identity", "polynomial", "exponential"), classic_energy),
}


def choose_energy(dot_product: bool, separation: Separation) -> Energy:
    """The energy of a memory, by its separation and whether its similarity is the dot product.

    Raises:
        AHopError: the paper gives none for this memory.
    """
    if dot_product and separation.name in _BY_SEPARATION:
        return _BY_SEPARATION[separation.name]
    if not dot_product and separation.name == "softmax":
        return adaptive_energy
    similarity = "the dot product" if dot_product else "another similarity than the dot product"
    raise AHopError(f"there is no energy for {similarity} with the separation {separation.name!r}")
