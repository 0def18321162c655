"""AdaptiveSimilarity: the learned score as a module, and the form in which its weights train best."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ahop_layers.errors import AHopError, check_choice, check_floating, check_given_sizes, check_sizes, describe
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import check_bases, fold

INITS = ("dot", "dis", "uniform")


class AdaptiveSimilarity(nn.Module):
    """Scores queries against keys by learned weights on their similarity footprints.

    ``score = sum over bases of beta_base * w_base . footprint_base(query - bias, key)``

    Args:
        dim: number of dimensions ``d`` of a query or key (of one head, where there are heads).
        num_heads: ``None`` for one set of weights, or ``H`` for a set per head.
        bases: the base similarities to combine.
        init: ``"dot"`` (the score is exactly the dot product), ``"dis"`` (exactly the negative squared distance),
            ``"uniform"`` (every entry of every footprint weighs 1/d), or a tensor shaped like ``w``.
        debias: learn a vector that is subtracted from every query, zero at the start.

    Learns:
        w ``([H,] n_bases, d)``, beta ``([H,] n_bases)``, and with ``debias`` bias ``([H,] d)``.

    Raises:
        AHopError: an argument that does not fit.

    >>> import torch, ahop_layers as ah
    >>> similarity = ah.AdaptiveSimilarity(16)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-5)
    True
    >>> similarity
    AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=False)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        bases: Sequence[str] = ("dis", "dot"),
        init: str | Tensor = "dot",
        debias: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim)
        check_given_sizes(num_heads=num_heads)
        self.dim, self.num_heads, self.bases = dim, num_heads, check_bases(bases)
        # A copy: a parameter of another module must not become one of this.
        self.init = init.detach().clone() if isinstance(init, Tensor) else init
        heads = () if num_heads is None else (num_heads,)
        self.w = nn.Parameter(torch.empty(*heads, len(self.bases), dim))
        self.beta = nn.Parameter(torch.empty(*heads, len(self.bases)))
        self.bias = nn.Parameter(torch.empty(*heads, dim)) if debias else None
        self._check_init()
        self.reset_parameters()

    def _check_init(self) -> None:
        if isinstance(self.init, Tensor):
            check_floating(init=self.init)
            if self.init.shape != self.w.shape:
                raise AHopError(f"init must have the shape of w, {describe(self.w)}, got {describe(self.init)}")
            return
        check_choice("init", self.init, INITS)
        if self.init != "uniform" and self.init not in self.bases:
            raise AHopError(f"init={self.init!r} needs {self.init!r} among the bases, got {self.bases}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to what ``init`` says."""
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.init, Tensor):
            self.w.copy_(self.init)
            self.beta.fill_(1.0)
        elif self.init == "uniform":
            self.w.fill_(1.0 / self.dim)
            self.beta.fill_(1.0)
        else:
            # All weight on the last entry of each footprint is the base similarity; beta picks the one base. The other
            # bases keep their unit weight, so their beta has a gradient from the first step.
            self.w.zero_()
            self.w[..., -1] = 1.0
            self.beta.zero_()
            self.beta[..., self.bases.index(self.init)] = 1.0

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Score ``query (..., [H,] L, d)`` against ``key (..., [H,] S, d)``: ``(..., [H,] L, S)``.

        Raises:
            AHopError: a shape, dtype or device that does not fit.
        """
        return adaptive_similarity(self.unbiased(query), key, self.beta.unsqueeze(-1) * self.w, self.bases)

    def unbiased(self, query: Tensor) -> Tensor:
        """``query (..., [H,] L, d)`` without the learned bias.

        >>> similarity = AdaptiveSimilarity(3, debias=True)
        >>> similarity.unbiased(torch.ones(1, 3)) + similarity.bias
        tensor([[1., 1., 1.]], grad_fn=<AddBackward0>)
        """
        return without_bias(query, self.bias)

    def extra_repr(self) -> str:
        """Give the constructor back."""
        init = "tensor" if isinstance(self.init, Tensor) else repr(self.init)
        debias = self.bias is not None
        return f"{self.dim}, num_heads={self.num_heads}, bases={self.bases}, init={init}, debias={debias}"


def without_bias(query: Tensor, bias: Tensor | None) -> Tensor:
    """``query (..., [H,] L, d)`` less ``bias ([H,] d)``, where there is one."""
    return query if bias is None else query - bias.unsqueeze(-2).to(query.dtype)


class _Folded(nn.Module):
    """``w`` as a function of the folded weight ``u``, of which it is the difference."""

    def forward(self, folded: Tensor) -> Tensor:
        return folded - torch.nn.functional.pad(folded[..., 1:], (0, 1))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return fold(weight)


class _FoldedAndPlain(nn.Module):
    """``w`` as the sum of two: the difference of a folded weight, and a weight as it is."""

    def forward(self, folded: Tensor, weight: Tensor) -> Tensor:
        # A step on all of w moves a score by the square of the dimensions; beyond 64 no further than at 64.
        scale = min(1.0, (64 / weight.shape[-1]) ** 2)
        return folded - torch.nn.functional.pad(folded[..., 1:], (0, 1)) + scale * weight

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fold(weight), torch.zeros_like(weight)


def folded_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Train the folded weights of every adaptive similarity in ``module``, in place of ``w`` and ``beta``.

    The score is linear in the folded weight ``u``, the reverse cumulative sum of ``beta * w``. A step on one entry of
    ``u`` is fine: it weighs one similarity. A step on one of ``w`` is far: ``u`` accumulates it. Inside the context
    ``beta`` is 1 and rests; the scores are the same functions before, within and after.
    """
    return _reparametrised(module, _Folded)


def trainable_forms(module: nn.Module) -> AbstractContextManager[None]:
    """As :func:`folded_weights`, with ``w`` trained beside ``u``: the score weighs the sum of both.

    Noise asks for fine steps, but masks without noise for weights in the thousands. With both forms an optimiser whose
    steps have a given size can make either.
    """
    return _reparametrised(module, _FoldedAndPlain)


@contextmanager
def _reparametrised(module: nn.Module, form: type[nn.Module]) -> Iterator[None]:
    adaptive = [part for part in module.modules() if isinstance(part, AdaptiveSimilarity) and part.w.requires_grad]
    kept = [(part, part.w, part.beta.requires_grad) for part in adaptive]
    for part in adaptive:
        with torch.no_grad():
            part.w.mul_(part.beta.unsqueeze(-1))
            part.beta.fill_(1.0)
        part.beta.requires_grad_(False)
        parametrize.register_parametrization(part, "w", form())
    try:
        yield
    finally:
        for part, weight, learns in kept:
            parametrize.remove_parametrizations(part, "w")
            with torch.no_grad():
                weight.copy_(part.w)
            part.w = weight  # the same object as before, which others may hold
            part.beta.requires_grad_(learns)
