"""AssociativeMemory: stored patterns, and ``y = Xi sep(sim(mod(Xi), x))``, the framework of all Hopfield networks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.association import Similarity, change, dot_product, iterate
from ahop_layers.errors import AHopError, check_choice, check_floating, check_patterns, check_sizes, describe
from ahop_layers.memory.energy import choose_energy
from ahop_layers.memory.fit import Pairs, minimise, retrieval_batches, separation_batches, start_bias
from ahop_layers.memory.kernel import KernelModulation
from ahop_layers.memory.presets import named_similarity, parts
from ahop_layers.separation import Separation
from ahop_layers.similarity import Associator
from ahop_layers.variants import Mixed

BLOCK_ELEMENTS = 2**21
"""How many numbers of the patterns are compared with a query together: bounds what a similarity needs beside them."""

BLOCK_SCORES = 2**23
"""How many scores are held together where all patterns' scores of a query are needed."""


class AssociativeMemory(Associator):
    """Stores patterns, and finds the one a query is a variant of.

    Args:
        patterns: ``(N, d)``; held, not copied.
        similarity: ``"dot"``, ``"dis"``, ``"l1"``, ``"adaptive"``, or a function or module that scores queries
            ``(L, d)`` against keys ``(S, d)``: ``(L, S)``.
        separation: a name out of :class:`ahop_layers.separation.Separation`, or such a module.
        modulation: a module that changes patterns ``(S, d)`` before they are compared, or ``None``.
        prior: learn a log-probability of each pattern, which is added to its score; zero at the start.
        activation: ``"sign"`` for the binary states of the classic networks.
        objective: what :meth:`fit` minimises: ``"retrieval"``, the paper's loss, or ``"separation"``, how close the
            modulated patterns lie.

    Raises:
        AHopError: an argument that does not fit.

    >>> import torch, ahop_layers as ah
    >>> patterns = torch.rand(100, 16) * 2 - 1
    >>> memory = ah.AssociativeMemory(patterns, similarity="dis")
    >>> memory.recall(patterns[:3] + 0.01)
    tensor([0, 1, 2])
    """

    patterns: Tensor

    def __init__(
        self,
        patterns: Tensor,
        similarity: str | Similarity = "dot",
        separation: str | Separation = "softmax",
        modulation: nn.Module | None = None,
        *,
        prior: bool = False,
        activation: str | None = None,
        objective: str = "retrieval",
    ) -> None:
        super().__init__()
        check_patterns(patterns)
        check_choice("objective", objective, ("retrieval", "separation"))
        if activation not in (None, "sign"):
            raise AHopError(f"activation must be 'sign' or None, got {activation!r}")
        if objective == "separation" and not isinstance(modulation, KernelModulation):
            raise AHopError(f"objective='separation' needs a KernelModulation, got {type(modulation).__name__}")
        self.register_buffer("patterns", patterns.detach())
        self.similarity = named_similarity(similarity, patterns) if isinstance(similarity, str) else similarity
        self.separation = Separation(separation) if isinstance(separation, str) else separation
        self.modulation, self.activation, self.objective = modulation, activation, objective
        self.prior = nn.Parameter(patterns.new_zeros(len(patterns))) if prior else None

    @classmethod
    def preset(cls, name: str, patterns: Tensor, **keywords: Any) -> "AssociativeMemory":
        """A network of the paper's first table.

        Args:
            name: Hop, D-Hop, E-Hop, M-Hop, U-Hop, S-Hop, K-Hop (its kernel separates the patterns), K2-Hop (its kernel
                minimises the paper's loss) or A-Hop.
            patterns: ``(N, d)``.
            keywords: ``prior`` for all; ``degree`` for D-Hop, whose energy falls for odd ones; ``features`` for K-Hop
                and K2-Hop; for A-Hop ``bases``, ``init``, ``debias``, and ``table=True``, which adds a learned base to
                the footprints.

        Raises:
            AHopError: an unknown name, or a keyword the network does not have.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(100, 16) * 2 - 1, debias=True)
        >>> memory.similarity
        AdaptiveSimilarity(16, num_heads=None, bases=('dis', 'dot'), init='dot', debias=True)
        """
        return cls(patterns, **parts(name, patterns, **keywords))

    def scores(self, x: Tensor) -> Tensor:
        """The score of every pattern: ``(..., d) -> (..., N)``.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).scores(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
        """
        rows = self._rows(x)
        return torch.cat(list(self._score_blocks(rows)), -1).reshape(*x.shape[:-1], len(self.patterns))

    @torch.no_grad()
    def retrieve(self, x: Tensor, steps: int = 1) -> Tensor:
        """What the memory reads out for ``x (..., d)`` after ``steps`` updates of the state: ``(..., d)``.

        Without gradients, whose graph would hold every block of the patterns; calling the memory itself keeps them.

        Raises:
            AHopError: ``x`` or ``steps`` does not fit.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(4) * 10)
        >>> memory.retrieve(torch.tensor([0.9, 0.2, 0.0, 0.1])).round()
        tensor([10.,  0.,  0.,  0.])
        """
        output: Tensor = self(x, steps)
        return output

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        """As :meth:`retrieve`, with gradients."""
        check_sizes(steps=steps)
        chunks = torch.split(self._rows(x), max(1, BLOCK_SCORES // len(self.patterns)))
        return torch.cat([self._settled(chunk, steps) for chunk in chunks]).reshape(x.shape)

    @torch.no_grad()
    def recall(self, x: Tensor) -> Tensor:
        """The index of the pattern with the largest score: ``(..., d) -> (...)``; memory does not grow with N.

        >>> import torch, ahop_layers as ah
        >>> ah.AssociativeMemory(torch.eye(3)).recall(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.2, 0.1]]))
        tensor([2, 0])
        """
        best = []
        for chunk in torch.split(self._rows(x), 256):
            blocks = [block.max(-1) for block in self._score_blocks(chunk)]
            starts = torch.arange(len(blocks), device=x.device) * self._block_size()
            values, places = (torch.stack(each, -1) for each in zip(*blocks, strict=True))
            block = values.argmax(-1, keepdim=True)
            best.append((places + starts).gather(-1, block).squeeze(-1))
        return torch.cat(best).reshape(x.shape[:-1])

    def energy(self, x: Tensor) -> Tensor:
        """The energy of the states: ``(..., d) -> (...)``, as the paper's first table has it.

        Raises:
            AHopError: there is none for this similarity and separation (U-Hop).

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.randn(20, 8), similarity="dis")
        >>> x = torch.randn(5, 8)
        >>> bool((memory.energy(memory.retrieve(x)) <= memory.energy(x)).all())
        True
        """
        energy = choose_energy(self.similarity is dot_product, self.separation)
        return energy(x, x if self.modulation is None else self.modulation(x), self.scores(x), self.separation)

    def fit(
        self,
        data: Mixed | Pairs | None = None,
        epochs: int = 200,
        lr: float = 0.05,
        batch: int = 512,
        progress: bool = True,
        seed: int = 0,
    ) -> Tensor:
        """Learn what the memory can learn: the similarity, the kernel, the prior.

        The loss is the paper's: the negative logarithm of the weight of the pattern a query was made from. It takes
        the softmax of the scores, whatever the separation, since a sparse weight of zero has no logarithm. A bias that
        is still zero starts as its least-squares estimate.

        Args:
            data: a variant, of which every epoch draws ``batch`` fresh queries; or pairs ``(index (n,), query (n, d))``
                that every epoch goes through in batches. K-Hop needs neither.
            epochs, lr, batch: how long, the largest step of Adam (it decays to zero), and queries a step.
            progress: show a bar, where tqdm is installed.
            seed: decides every random choice.

        Returns:
            The loss of every step.

        Raises:
            AHopError: the memory has nothing to learn, or an argument does not fit.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(50, 16) * 2 - 1, debias=True)
        >>> losses = memory.fit(ah.variants.Mixed(0.3, 0.1, 0.5), epochs=30, batch=64, progress=False)
        >>> bool(losses[-5:].mean() < losses[:5].mean())
        True
        """
        generator = torch.Generator(self.patterns.device).manual_seed(seed)
        if self.objective == "separation" and isinstance(self.modulation, KernelModulation):
            batches = separation_batches(self.patterns, epochs, batch, generator)
            return minimise(self, self.modulation.separation_loss, batches, lr, progress)
        batches = retrieval_batches(data, self.patterns, epochs, batch, generator)
        bias = self._bias()
        if bias is not None and bias.requires_grad and data is not None:
            start_bias(bias, data, self.patterns, batch, generator)
        return minimise(self, self._loss, batches, lr, progress)

    def add(self, patterns: Tensor) -> Tensor:
        """Store more ``patterns (n, d)``, without refitting, and return their indices ``(n,)``.

        Raises:
            AHopError: patterns that do not fit those stored.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.zeros(3, 4))
        >>> memory.add(torch.ones(2, 4))
        tensor([3, 4])
        """
        check_patterns(patterns)
        before = len(self.patterns)
        self.patterns = torch.cat([self.patterns, self._rows(patterns).detach().to(self.patterns)])
        if self.prior is not None:  # a newcomer is as likely as the others on average
            self._set_prior(torch.cat([self.prior.detach(), self.prior.detach().mean().expand(len(patterns))]))
        return torch.arange(before, len(self.patterns), device=self.patterns.device)

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Forget the patterns of these indices; those after them move up.

        Raises:
            AHopError: no pattern would be left, or an index has none.

        >>> import torch, ahop_layers as ah
        >>> memory = ah.AssociativeMemory(torch.eye(3))
        >>> memory.remove([0, 2])
        >>> memory.patterns
        tensor([[0., 1., 0.]])
        """
        keep, gone = torch.ones(len(self.patterns), dtype=torch.bool), torch.as_tensor(index).cpu()
        try:
            keep[gone if gone.numel() else []] = False
        except IndexError:
            raise AHopError(f"index must name some of {len(keep)} patterns, got {index}") from None
        if not keep.any():
            raise AHopError(f"a memory needs at least one pattern, got all {len(keep)} to remove")
        keep = keep.to(self.patterns.device)
        self.patterns = self.patterns[keep]
        if self.prior is not None:
            self._set_prior(self.prior.detach()[keep])

    def _bias(self) -> Tensor | None:
        """The vector ``(d,)`` that the similarity takes off a query, where it has one."""
        bias = getattr(self.similarity, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.shape == self.patterns.shape[1:] else None

    def _set_prior(self, values: Tensor) -> None:
        self.prior = nn.Parameter(values, requires_grad=self.prior is not None and self.prior.requires_grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the number of patterns from the checkpoint."""
        stored = state_dict.get(prefix + "patterns")
        if stored is not None and stored.ndim == 2 and stored.shape[1] == self.patterns.shape[1]:
            before, self.patterns = len(self.patterns), self.patterns.new_empty(stored.shape)  # not the caller's tensor
            if self.prior is not None and len(stored) != before:
                self._set_prior(self.prior.new_zeros(len(stored)))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` as a matrix, or an error if it does not fit the patterns."""
        check_floating(x=x)
        if x.ndim < 1 or x.shape[-1] != self.patterns.shape[1]:
            raise AHopError(f"expected (..., d) with d = {self.patterns.shape[1]} as the patterns, got {describe(x)}")
        return x.reshape(-1, x.shape[-1])

    def _block_size(self) -> int:
        return max(1, BLOCK_ELEMENTS // self.patterns.shape[1])

    def _score_blocks(self, rows: Tensor) -> Iterator[Tensor]:
        """The scores of ``rows (L, d)``, a block of patterns after the other."""
        size = self._block_size()
        for start, block in zip(range(0, len(self.patterns), size), torch.split(self.patterns, size), strict=True):
            scores = self.similarity(rows, block if self.modulation is None else self.modulation(block))
            yield scores if self.prior is None else scores + self.prior[start : start + size]

    def _settled(self, rows: Tensor, steps: int) -> Tensor:
        bias = self._bias()

        def attend(state: Tensor) -> Tensor:
            scores = self.scores(state)
            if self.activation == "sign" and self.separation.name == "exponential":
                scores = scores - scores.amax(-1, keepdim=True)  # the same signs, and exp stays finite
            weights: Tensor = self.separation(scores, masked=False)
            return weights

        def read(weights: Tensor) -> Tensor:
            output = weights @ self.patterns
            return output.sign() + (output == 0) if self.activation == "sign" else output  # a state is -1 or 1

        def follow(weights: Tensor) -> Tensor:
            # The similarity takes the bias off its query, so a state that came from the patterns must carry it.
            return read(weights) if bias is None else read(weights) + bias

        return read(iterate(rows[None, None], attend, follow, change, steps - 1, 0.0))[0, 0]

    def _loss(self, batch: Pairs) -> Tensor:
        index, query = batch
        return nn.functional.cross_entropy(self.scores(query), index)
