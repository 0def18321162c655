"""The Hopfield networks of the paper: retrieval by ``y = Xi sep(sim(mod(Xi), x))``, and their energies."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.similarity.protocol import FIXED
from benchmarks.paper.kernel_similarity import KernelModulation
from benchmarks.paper.table import AdaptiveTableSimilarity

Scores = Callable[[Tensor, Tensor], Tensor]
"""Scores queries ``(L, d)`` against keys ``(S, d)``: ``(L, S)``."""


class Power(nn.Module):
    """Weights ``score ** degree``: those of the first Hopfield networks, and of dense associative memories.

    >>> Power(3)(torch.tensor([2.0, -1.0]))
    tensor([ 8., -1.])
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree

    def forward(self, scores: Tensor) -> Tensor:
        """Turns ``scores (..., S)`` into weights of the same shape."""
        return scores**self.degree


class Exponential(nn.Module):
    """Weights ``exp(score)``, relative to the largest one: the signs of a readout do not depend on their scale.

    >>> Exponential()(torch.tensor([1000.0, -1000.0]))
    tensor([1., 0.])
    """

    def forward(self, scores: Tensor) -> Tensor:
        """Turns ``scores (..., S)`` into weights of the same shape."""
        return (scores - scores.amax(-1, keepdim=True)).exp()


class Network(nn.Module):
    """A Hopfield network that stores patterns.

    Args:
        patterns: ``(N, d)``.
        similarity: ``"dot"``, ``"dis"``, ``"l1"``, or a module that scores queries ``(L, d)`` against keys ``(S, d)``.
            Retrieval adds its ``bias``, if it has one, to the state of the next step.
        separation: a name of :class:`ahop_layers.Separation`, or a module that turns scores into weights.
        kernel: whether patterns are modulated by a learned kernel before they are scored.
        objective: the loss of :func:`~benchmarks.paper.training.train`: ``"retrieval"``, or ``"separation"`` of the
            modulated patterns.
        binary: whether states are -1 or 1.
        prior: learn a log-probability of each pattern that is added to its score, initialized to zero.
        beta: inverse temperature, the factor of the scores in separation, loss and energy. Training sets it if it is
            None; until then it is 1.

    >>> Network(torch.eye(4) * 10).retrieve(torch.tensor([[0.9, 0.2, 0.0, 0.1]])).round()
    tensor([[10.,  0.,  0.,  0.]])
    """

    patterns: Tensor
    beta: Tensor

    def __init__(
        self,
        patterns: Tensor,
        similarity: str | Scores = "dot",
        separation: str | nn.Module = "softmax",
        *,
        kernel: bool = False,
        objective: str = "retrieval",
        binary: bool = False,
        prior: bool = False,
        beta: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("patterns", patterns)
        self.register_buffer("beta", patterns.new_tensor(beta or 1.0))
        self.similarity = FIXED[similarity] if isinstance(similarity, str) else similarity
        self.separation = ah.Separation(separation) if isinstance(separation, str) else separation
        self.modulation = KernelModulation(patterns.shape[1]).to(patterns) if kernel else None
        self.objective, self.binary, self.fits_beta = objective, binary, beta is None
        self.prior = nn.Parameter(torch.zeros_like(patterns[:, 0])) if prior else None

    @property
    def bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity subtracts from a query, if it has one."""
        return getattr(self.similarity, "bias", None)

    def scores(self, x: Tensor) -> Tensor:
        """Scores queries ``x (L, d)`` against all patterns: ``(L, N)``."""
        scores = self.similarity(x, self._modulated(self.patterns))
        return scores if self.prior is None else scores + self.prior

    def _modulated(self, x: Tensor) -> Tensor:
        return x if self.modulation is None else self.modulation(x)

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        """Retrieves patterns for queries ``(L, d) -> (L, d)`` with ``steps`` updates."""
        for step in range(steps):
            state = x if step == 0 or self.bias is None else x + self.bias
            x = self.separation(self.beta * self.scores(state)) @ self.patterns
            x = torch.where(x < 0, -1.0, 1.0).to(x) if self.binary else x
        return x

    @torch.no_grad()
    def retrieve(self, x: Tensor, steps: int = 1) -> Tensor:
        """As :meth:`forward`, without gradients."""
        return self(x, steps)

    @torch.no_grad()
    def recall(self, x: Tensor) -> Tensor:
        """Finds the index of the pattern with the largest score: ``(L, d) -> (L,)``."""
        return self.scores(x).argmax(-1)

    def energy(self, x: Tensor) -> Tensor:
        """Computes the energy of states, as in the paper's first table: ``(L, d) -> (L,)``.

        For the dot product and softmax or a member of the entmax family (M-Hop, S-Hop, K-Hop), it is half the product
        of the state and the modulated state, minus the function of the scores whose gradient is the separation.

        For the dot product and another separation (Hop, D-Hop, E-Hop), it is the negative sum over patterns of the
        antiderivative of the separation; the paper's table has the sum inside the power and the exponential. It does
        not increase for odd degrees. For the exponential it is the logarithm of that sum, which does not overflow.

        For other similarities with softmax (A-Hop), it is the negative log-sum-exp of the scores. For the similarity
        ``-|x - bias - pattern|^2`` it does not increase and is at least ``-log N``. U-Hop has no energy.
        """
        scores, separation, beta = self.scores(x), self.separation, self.beta
        name, dot = getattr(separation, "name", None), self.similarity is FIXED["dot"]
        if isinstance(separation, Power):
            return -(scores ** (separation.degree + 1)).sum(-1) / (separation.degree + 1)
        if name == "softmax" or isinstance(separation, Exponential):
            conjugate = (beta * scores).logsumexp(-1) / beta
        elif dot and name in ("sparsemax", "entmax15", "entmax"):  # p . s plus the Tsallis entropy of the weights p
            weights, alpha = separation(beta * scores), separation.alpha
            entropy = (weights - weights**alpha).sum(-1) / (alpha * (alpha - 1))
            conjugate = (weights * scores).sum(-1) + entropy / beta
        else:
            raise ah.AHopError(f"energy needs the dot product or softmax, got the separation {name!r}")
        return 0.5 * (x * self._modulated(x)).sum(-1) - conjugate if dot and name is not None else -conjugate


def _adaptive(patterns: Tensor, debias: bool = False, **options: Any) -> Network:
    return Network(patterns, ah.AdaptiveSimilarity(patterns.shape[1], debias=debias).to(patterns), **options)


def _table(patterns: Tensor, **options: Any) -> Network:
    return Network(patterns, AdaptiveTableSimilarity(patterns), **options)


NETWORKS: dict[str, Callable[..., Network]] = {
    "Hop": partial(Network, separation=Power(1), binary=True),
    "D-Hop": partial(Network, separation=Power(3), binary=True),
    "E-Hop": partial(Network, separation=Exponential(), binary=True),
    "M-Hop": Network,
    "U-Hop": partial(Network, similarity="l1", separation="argmax"),
    "S-Hop": partial(Network, separation="sparsemax"),
    "K-Hop": partial(Network, separation="entmax15", kernel=True, objective="separation"),
    "K2-Hop": partial(Network, kernel=True),
    "A-Hop": _adaptive,
    "A-Hop, debias": partial(_adaptive, debias=True),
    "A-Hop, debias, table": _table,
}
"""Creates a network of the paper for patterns ``(N, d)``, with the options of :class:`Network`."""
