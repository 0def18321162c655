"""L2M: a pool of prompts; a subclass returns all results of ``_associate`` with gradients."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.projects.project import Project, supervised

WIDTH, POOL, PATTERN = 32, 20, 24


class Prompts(nn.Module):
    """Selects the prompts with the largest association."""

    def __init__(self, layers: Any) -> None:
        super().__init__()

        class WithGradients(layers.HopfieldLayer):
            """Returns output, mean weights, weights and projected patterns."""

            def get_association_matrix(self, input: Tensor, **masks: Any) -> Any:  # type: ignore[override]
                data = self._prepare_input(input=input)
                return self.hopfield._associate(
                    data=data, return_raw_associations=True, return_projected_patterns=True, **masks
                )

        self.encoder = nn.Linear(16, WIDTH)
        self.hopfield = WithGradients(
            input_size=WIDTH, hidden_size=16, output_size=WIDTH, num_heads=1, pattern_size=PATTERN, quantity=POOL,
            lookup_weights_as_separated=True,
        )  # fmt: skip
        self.head = nn.Linear(PATTERN, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Classifies ``(N, L, 16)`` by the sum of the three closest prompts, weighted by their association."""
        _, _, weights, patterns = self.hopfield.get_association_matrix(self.encoder(x).mean(1, keepdim=True))
        weights, patterns = weights.reshape(len(x), POOL), patterns.reshape(len(x), POOL, PATTERN)
        best = weights.topk(3, dim=1)
        chosen = patterns[torch.arange(len(x))[:, None], best.indices]
        return self.head((best.values[..., None] * chosen).sum(1))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws sequences of 4 classes."""
    label = torch.randint(4, (32,), generator=generator)
    x = torch.randn(32, 6, 16, generator=generator)
    x[torch.arange(32), :, label] += 2
    return x, label


loss = supervised(nn.functional.cross_entropy)
PROJECT = Project("subclass of `HopfieldLayer` that calls `_associate`", Prompts, batch, loss)
