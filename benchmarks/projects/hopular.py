"""Hopular: memory lookups over samples and over features, with a custom initialization of the core's parameters."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import NO_NORMS, Project, supervised

FEATURES, SIZE, SAMPLES = 8, 16, 64


class Lookup(nn.Module):
    """A Hopfield lookup with a residual connection."""

    def __init__(self, layers: Any, size: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.hopfield = layers.Hopfield(
            input_size=size, hidden_size=hidden, pattern_size=hidden, output_size=size, num_heads=heads,
            scaling=10.0 / hidden**0.5, normalize_state_pattern_eps=1e-12, dropout=0.1, **NO_NORMS,
        )  # fmt: skip
        core = self.hopfield.association_core
        weights = [core.q_proj_weight, core.k_proj_weight, core.v_proj_weight]
        if not core.disable_out_projection:
            weights.append(core.out_proj.weight)
        for weight in weights:
            nn.init.kaiming_uniform_(weight, a=5**0.5)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Looks ``x`` up in a memory; True in ``mask (L, S)`` forbids a pair."""
        retrieved: Tensor = self.hopfield((memory, x, memory), association_mask=mask)
        return x + retrieved


class Block(nn.Module):
    """Lookups over samples, then over the features of each sample."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.samples, self.features = Lookup(layers, FEATURES * SIZE, 8, 8), Lookup(layers, SIZE, 8, 2)
        self.sample_norm, self.feature_norm = nn.LayerNorm(FEATURES * SIZE), nn.LayerNorm(SIZE)
        self.output = nn.Linear(FEATURES * SIZE, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Refines rows ``(1, samples, features * size)`` and classifies them."""
        memory = self.sample_norm(rows)
        related = self.samples(self.sample_norm(rows), memory, torch.eye(rows.shape[1], dtype=torch.bool))
        each = self.feature_norm(related.reshape(rows.shape[1], FEATURES, SIZE))
        stored = self.feature_norm(rows.reshape(rows.shape[1], FEATURES, SIZE))
        refined = self.features(each, stored, torch.eye(FEATURES, dtype=torch.bool))
        return self.output(refined.reshape(rows.shape[1], -1))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws embedded rows whose class is the sign of a feature."""
    rows = torch.randn(1, SAMPLES, FEATURES * SIZE, generator=generator)
    return rows, (rows[0, :, 0] > 0).long()


loss = supervised(functional.cross_entropy)
PROJECT = Project("`Hopfield` with association masks and own initialization", Block, batch, loss)
