"""The models of timm: all names are counted on the meta device, and the smallest of each family is run."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

import ahop_layers as ah
from benchmarks.harness.rows import Row
from tests.models.check import Case, coverage

SIZE = 128
"""Height and width of images for models that accept them."""

SMALLER: tuple[dict[str, Any], ...] = ({"img_size": SIZE, "depth": 2}, {"img_size": SIZE}, {"depth": 2}, {})
"""Arguments that make a model smaller; the first that its family accepts are used."""


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
    with torch.device("meta"):
        model, size = create(name)
    try:
        found = _coverage(model, torch.empty(1, *size, device="meta"))
    except RuntimeError:  # positions that are computed from values need a real model, which may be smaller
        smaller, images = make(name)
        found = _coverage(smaller, *images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "parameters": parameters, **found}


def _coverage(model: nn.Module, images: torch.Tensor) -> dict[str, object]:
    try:
        return coverage(ah.adapt_(model, example=images, by_hand=True, dry_run=True))
    except ah.AHopError as error:
        return coverage(error)


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Builds a model, with fewer layers and smaller images if its family allows that, and its example."""
    for options in SMALLER:
        with suppress(TypeError, ValueError, RuntimeError, IndexError, AssertionError, AttributeError):
            torch.manual_seed(0)
            model, (channels, *size) = create(name, **options)
            for height, width in ((SIZE, SIZE), size):
                with suppress(ValueError, RuntimeError, AssertionError), torch.no_grad():
                    images = torch.randn(2, channels, height, width)
                    model.eval()(images)
                    return model, (images,)
    raise ValueError(f"expected a model that runs on images of its default size, got {name}")


def cases(counted: Iterable[Row]) -> Iterator[Case]:
    """Yields the smallest model with attention of each family, from the counted rows."""
    smallest: dict[str, Row] = {}
    for row in counted:
        other = smallest.get(row["family"])
        if other is None or int(row["parameters"]) < int(other["parameters"]):
            smallest[row["family"]] = row
    for family, row in sorted(smallest.items()):
        yield Case("timm", family, partial(make, row["name"]), row["name"], {"blocks": 2})
