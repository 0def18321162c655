"""The models of timm: all names are counted on the meta device, and the smallest of each family is run."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import ahop_layers as ah
from benchmarks.harness.rows import Row
from benchmarks.models.check import Case, coverage

SMALLER: dict[str, dict[str, Any]] = {
    "deepseek_vit": {"depth": 2},
    "gemma4_vit": {"depth": 2},
    "qwen3_vit": {"depth": 2},
}
"""Arguments of families whose smallest model is large."""


def families() -> dict[str, list[str]]:
    """Returns the names of all models by family, the module of timm that defines them."""
    import timm

    return {family: timm.list_models(module=family) for family in timm.list_modules()}


def create(name: str, **options: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """Returns a model without pretrained weights, and the size of its input."""
    import timm

    model = timm.create_model(name, **options)
    return model, tuple(model.default_cfg.get("input_size", (3, 224, 224)))


def count(name: str) -> dict[str, object]:
    """Returns the coverage of a model by name, without running it where the meta device suffices."""
    try:
        with torch.device("meta"):
            model, size = create(name)
        found = _coverage(model, torch.empty(1, *size, device="meta"))
    except RuntimeError:  # positions that are computed from values
        model, size = create(name)
        found = _coverage(model, torch.randn(1, *size))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "parameters": parameters, **found}


def _coverage(model: nn.Module, images: torch.Tensor) -> dict[str, object]:
    try:
        return coverage(ah.adapt_(model, example=images, by_hand=True, dry_run=True))
    except ah.AHopError as error:
        return coverage(error)


def make(name: str, **options: Any) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Builds a model and its example."""
    torch.manual_seed(0)
    model, size = create(name, **options)
    return model, (torch.randn(2, *size),)


def cases(counted: Iterable[Row]) -> Iterator[Case]:
    """Yields the smallest model with attention of each family, from the counted rows."""
    smallest: dict[str, Row] = {}
    for row in counted:
        other = smallest.get(row["family"])
        if other is None or int(row["parameters"]) < int(other["parameters"]):
            smallest[row["family"]] = row
    for family, row in sorted(smallest.items()):
        options = SMALLER.get(family, {})
        yield Case("timm", family, partial(make, row["name"], **options), row["name"], {"blocks": 2})
