"""Energies of associative memories, which do not increase along the dynamics."""

from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation


def energy(
    x: Tensor, modulated: Tensor, scores: Tensor, separation: Separation, beta: Tensor, dot_product: bool
) -> Tensor:
    """Computes the energy of states ``x (..., d)`` with ``scores (..., N)``, as in the paper's first table: ``(...)``.

    For the dot product and softmax or a member of the entmax family (M-Hop, S-Hop, K-Hop), it is half the product of
    the state and the modulated state, minus the function of the scores whose gradient is the separation.

    For the dot product and another separation (Hop, D-Hop, E-Hop), it is the negative sum over patterns of the
    antiderivative of the separation; the paper's table has the sum inside the power and the exponential. It does not
    increase for odd degrees. For the exponential it is the logarithm of that sum, which does not overflow.

    For other similarities with softmax (A-Hop), it is the negative log-sum-exp of the scores. For the similarity
    ``-|x - bias - pattern|^2`` it does not increase and is at least ``-log N``. Other memories have no energy.
    """
    name, attention = separation.name, ("softmax", "sparsemax", "entmax15", "entmax")
    if name not in ((*attention, "identity", "polynomial", "exponential") if dot_product else ("softmax",)):
        similarity = "the dot product" if dot_product else "a similarity other than the dot product"
        raise AHopError(f"no energy is defined for {similarity} with the separation {name!r}")
    if name in ("identity", "polynomial"):
        degree = separation.degree if name == "polynomial" else 1
        return -(scores ** (degree + 1)).sum(-1) / (degree + 1)
    if name in ("softmax", "exponential"):
        conjugate = (beta * scores).logsumexp(-1) / beta
    else:  # p . s plus the Tsallis entropy of the weights p
        weights, alpha = separation(beta * scores), separation.alpha
        entropy = (weights - weights**alpha).sum(-1) / (alpha * (alpha - 1))
        conjugate = (weights * scores).sum(-1) + entropy / beta
    return 0.5 * (x * modulated).sum(-1) - conjugate if dot_product and name in attention else -conjugate
