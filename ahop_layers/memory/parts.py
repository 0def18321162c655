"""Parts of a memory: similarities by their names, and similarities and separations as values of JSON for files."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_choice
from ahop_layers.memory.images import ImageSimilarity
from ahop_layers.memory.learn.auto import AutoSimilarity
from ahop_layers.ops.operators import has_hooks
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.blocks import Blocks
from ahop_layers.similarity.protocol import FIXED, FixedSimilarity, Similarity


def named_similarity(name: str, patterns: Tensor, shape: Sequence[int] = ()) -> Similarity:
    """Creates the named similarity for ``patterns (N, d)``, which are images if their ``shape`` has several axes."""
    check_choice("similarity", name, ("auto", *FIXED, "adaptive"))
    if name == "auto" and len(shape) > 1:
        channels, height, width = (1, *shape)[-3:]
        images = ImageSimilarity(height, width, channels)
        return images.to(patterns.device, accumulation_dtype(patterns.dtype))
    if name == "auto":
        return AutoSimilarity(patterns)
    return AdaptiveSimilarity(patterns.shape[1]).to(patterns) if name == "adaptive" else FIXED[name]


def is_own(similarity: Any) -> bool:
    """Returns whether a similarity is of this package, all in parameters and buffers, so that copies score alike."""
    types = (AdaptiveSimilarity, AutoSimilarity, ImageSimilarity, nn.ModuleList)
    return isinstance(similarity, nn.Module) and all(
        type(part) in types and not has_hooks(part) and "forward" not in vars(part)
        and all(each is None or isinstance(each, nn.Parameter) for each in part._parameters.values())
        for part in similarity.modules()
    )  # fmt: skip


@torch.no_grad()
def overwrite_(similarity: Any, other: Any) -> None:
    """Gives a similarity the values of its copy; its parameters stay the same objects, for optimizers."""
    if other is similarity or not isinstance(other, nn.Module):
        return
    for own, copied in zip(similarity.modules(), other.modules(), strict=True):
        for name, parameter in own._parameters.items():
            if parameter is not None:
                parameter.copy_(copied._parameters[name])
        for name, buffer in copied._buffers.items():
            own._buffers[name] = None if buffer is None else buffer.clone()
        if isinstance(own, AutoSimilarity):
            own.refresh()


def describe_parts(memory: Any) -> dict[str, Any]:
    """Returns what :func:`make_parts` makes the parts of a memory from; raises if one is not of this package."""
    separation = memory.separation
    alpha = getattr(separation, "alpha_logit", None)
    plain = type(separation) is Separation and (alpha is None or alpha.ndim == 0)
    described = {"similarity": _described(memory.similarity), "separation": separation.name if plain else None}
    for name, value in described.items():
        part = getattr(memory, name)
        if value is None:
            kind = getattr(part, "__name__", type(part).__name__)
            raise AHopError(f"save needs a {name} of this package, got {kind}: save the state_dict of the memory")
    return described


def _described(similarity: Any) -> Any:
    """Returns the name of a similarity, or its class and options; None if it is not one of this package."""
    if isinstance(similarity, FixedSimilarity):
        return similarity.base
    if type(similarity) is AutoSimilarity:
        return "auto"
    if type(similarity) is ImageSimilarity:
        names = ("height", "width", "channels", "sizes", "shifts")
        return ["ImageSimilarity", {name: getattr(similarity, name) for name in names}]
    if type(similarity) is not AdaptiveSimilarity:
        return None
    blocks = similarity.blocks
    options = {
        "num_heads": similarity.num_heads,
        "bases": similarity.bases,
        "init": similarity.init if isinstance(similarity.init, str) else similarity.init.tolist(),
        "debias": similarity.bias is not None,
        "blocks": [blocks.assignment if blocks.named is None else blocks.named.tolist(), blocks.normalize],
    }
    return ["AdaptiveSimilarity", options]


def _make_similarity(dim: int, name: str, options: dict[str, Any]) -> nn.Module:
    if name == "ImageSimilarity":
        return ImageSimilarity(**options)
    init, (blocks, normalize) = options["init"], options["blocks"]
    init = init if isinstance(init, str) else torch.tensor(init, dtype=torch.float64, device="cpu")
    blocks = torch.tensor(blocks, device="cpu") if isinstance(blocks, list) else blocks
    bases = [base if isinstance(base, str) else tuple(base) for base in options["bases"]]
    return AdaptiveSimilarity(dim, **options | {"init": init, "bases": bases, "blocks": Blocks(blocks, normalize)})


def make_parts(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Makes the similarity and the separation of a memory, in the dtype of the ``tensors`` of its state dict."""
    similarity = described["similarity"]
    if not isinstance(similarity, str):
        own = (tensor.dtype for key, tensor in tensors.items() if key.startswith("similarity."))
        dtype = next(dtype for dtype in own if dtype.is_floating_point)
        similarity = _make_similarity(tensors["patterns"][0].numel(), *similarity).to(dtype=dtype)
    return {"similarity": similarity, "separation": Separation(described["separation"])}
