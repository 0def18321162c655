"""Energies of associative memories, which do not increase along the dynamics.

Each function takes the states ``x (..., d)``, the modulated states ``(..., d)``, the scores ``(..., N)`` and the
separation, and returns the energy ``(...)``. The inverse temperature ``beta`` multiplies the scores in the separation.
"""

from collections.abc import Callable

from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation

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
